"""Views of all elements in another shape or order: which loops two shapes share, dim by dim. All are linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.ir.graph import Dim, Size
from autopart.rules.factor import Call, Dims, Draft, Family, Rule, common, each, ratio, times, wrap

SELF = ("self",)


def split_view(draft: Draft, source: Sequence[Dim], target: Sequence[Dim]) -> tuple[Dims, Dims]:
    """The factors of a row-major view: walk both shapes from outside, taking what the current two dims have in common.

    Where two dims have nothing in common (the 3 x 4 and 2 x 6 left of a 6 x 4 seen as 4 x 6), their group is blocked.
    """
    from_dims: list[list[int]] = [[] for _ in source]
    to_dims: list[list[int]] = [[] for _ in target]
    left = [(i, size) for i, size in enumerate(source) if size != 1]
    right = [(i, size) for i, size in enumerate(target) if size != 1]
    while left and right:
        (i, a), (j, b) = left.pop(0), right.pop(0)
        shared = common(a, b)
        if shared == 1:
            left, right = _block_group(draft, [(i, a), *left], [(j, b), *right], from_dims, to_dims)
            continue
        factor = draft.new(shared)
        from_dims[i] += factor
        to_dims[j] += factor
        left = _rest(i, a, shared) + left
        right = _rest(j, b, shared) + right
    return tuple(map(tuple, from_dims)), tuple(map(tuple, to_dims))


def _rest(place: int, size: Dim, taken: Dim) -> list[tuple[int, Dim]]:
    rest = ratio(size, taken)
    assert rest is not None  # `taken` divides `size`
    return [] if rest == 1 else [(place, rest)]


Remaining = list[tuple[int, Dim]]


def _block_group(
    draft: Draft, left: Remaining, right: Remaining, from_dims: list[list[int]], to_dims: list[list[int]]
) -> tuple[Remaining, Remaining]:
    """Block the fewest leading dims of both sides whose products agree; all of them if none do."""
    taken_left, taken_right = 1, 1
    product_left, product_right = left[0][1], right[0][1]
    while product_left != product_right and (taken_left < len(left) or taken_right < len(right)):
        if taken_right == len(right) or (taken_left < len(left) and _smaller(product_left, product_right)):
            product_left = times(product_left, left[taken_left][1]) or 0
            taken_left += 1
        else:
            product_right = times(product_right, right[taken_right][1]) or 0
            taken_right += 1
    for place, size in left[:taken_left]:
        from_dims[place] += draft.new(size, blocked=True)
    for place, size in right[:taken_right]:
        to_dims[place] += draft.new(size, blocked=True)
    return left[taken_left:], right[taken_right:]


def _smaller(left: Dim, right: Dim) -> bool:
    """An order of sizes that agrees with the order of their values at every large batch."""
    a, b = ((int(s.per_sample), s.constant) if isinstance(s, Size) else (0, s) for s in (left, right))
    return a < b


def _view(call: Call) -> Rule:
    shape = call.shape("self")
    target = _target(call, shape)
    draft = Draft()
    source_dims, target_dims = split_view(draft, shape, target)
    given = call.args.get("size", call.args.get("shape"))
    name = "size" if "size" in call.args else "shape"
    sizes = {f"{name}.{i}": dims for i, dims in enumerate(target_dims) if given[i] != -1}
    return draft.rule(call, {"self": source_dims}, [target_dims], linear=SELF, sizes=sizes)


def _target(call: Call, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape that a view asks for, its -1 worked out."""
    target = tuple(call.args.get("size", call.args.get("shape")))
    if -1 not in target:
        return target
    known = _product([size for size in target if size != -1])
    total = _product(shape)
    rest = ratio(total, known) if total is not None and known is not None and known != 0 else None
    return tuple((0 if rest is None else rest) if size == -1 else size for size in target)


def _product(sizes: Sequence[Dim]) -> Dim | None:
    total: Dim | None = 1
    for size in sizes:
        total = None if total is None else times(total, size)
    return total


def _expand(call: Call) -> Rule:
    shape, asked = call.shape("self"), call.args["size"]
    lead = len(asked) - len(shape)
    draft = Draft()
    own = draft.dims(shape)
    grown = [
        draft.new(n) if i < lead or (shape[i - lead] == 1 and n != -1) else own[i - lead] for i, n in enumerate(asked)
    ]
    sizes = {f"size.{i}": dim for i, dim in enumerate(grown) if asked[i] != -1}
    return draft.rule(call, {"self": own}, [tuple(grown)], linear=SELF, sizes=sizes)


def _repeat(call: Call) -> Rule:
    shape, repeats = call.shape("self"), call.args["repeats"]
    lead = len(repeats) - len(shape)
    draft = Draft()
    own = draft.dims(shape)
    copies = draft.dims(repeats)
    out = tuple(copies[i] + (own[i - lead] if i >= lead else ()) for i in range(len(repeats)))
    sizes = {f"repeats.{i}": dim for i, dim in enumerate(copies)}
    return draft.rule(call, {"self": own}, [out], linear=SELF, sizes=sizes)


def _order(call: Call) -> list[int]:
    """For every dim of the result of a permutation, the dim of the operand."""
    ndim = call.ndim("self")
    name = call.op.overloadpacket.__name__
    order = list(range(ndim))
    if name == "permute":
        return [wrap(dim, ndim) for dim in call.args["dims"]]
    if name == "t":
        return order[::-1]
    first, second = wrap(call.args["dim0"], ndim), wrap(call.args["dim1"], ndim)
    if ndim:
        order[first], order[second] = order[second], order[first]
    return order


def _permute(call: Call) -> Rule:
    draft = Draft()
    own = draft.dims(call.shape("self"))
    return draft.rule(call, {"self": own}, [tuple(own[i] for i in _order(call))], linear=SELF)


def _unsqueeze(call: Call) -> Rule:
    draft = Draft()
    own = draft.dims(call.shape("self"))
    place = wrap(call.args["dim"], len(own) + 1)
    return draft.rule(call, {"self": own}, [(*own[:place], (), *own[place:])], linear=SELF)


def _squeeze(call: Call) -> Rule:
    """Drops the asked dims of size 1. A longer one stays, but is blocked: a piece of size 1 would be dropped."""
    shape = call.shape("self")
    asked = call.args.get("dim", range(len(shape)))
    dims = {wrap(dim, len(shape)) for dim in ((asked,) if isinstance(asked, int) else asked)}
    draft = Draft()
    own = draft.dims(shape, blocked=sorted(dims))
    out = tuple(dim for i, dim in enumerate(own) if not (i in dims and shape[i] == 1))
    return draft.rule(call, {"self": own}, [out], linear=SELF)


RULES: Mapping[str, Family] = {
    **each("view.default _unsafe_view reshape _reshape_copy", _view),
    **each("permute t transpose", _permute),
    "expand": _expand,
    "repeat": _repeat,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
}
