"""Reductions over dims: the reduced loops are contracted, with the combination that the operator makes."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Dims, Draft, Family, Rule, each, wrap
from autopart.rules.loops import loops


def reduced_dims(call: Call) -> frozenset[int]:
    """The dims that a reduction runs over (all of them if it names none)."""
    ndim = call.ndim("self")
    given = call.args.get("dim")
    if given is None or (isinstance(given, tuple | list) and not given):
        return frozenset(range(ndim))
    return frozenset(wrap(dim, ndim) for dim in ((given,) if isinstance(given, int) else given))


def reduction(how: str, *linear: str) -> Family:
    """A reduction whose parts combine by `how`; "blocked" if no combination of the parts gives the result."""

    def family(call: Call) -> Rule:
        shape, over = call.shape("self"), reduced_dims(call)
        draft = Draft()
        own: Dims = tuple(
            draft.new(size, blocked=how == "blocked" and i in over, reduction=how) for i, size in enumerate(shape)
        )
        keep = bool(call.args.get("keepdim", False))
        out = tuple(() if i in over else dim for i, dim in enumerate(own) if keep or i not in over)
        return draft.rule(call, {"self": own}, [out] * len(call.results), linear=linear)

    return family


def _topk(call: Call) -> Rule:
    shape = call.shape("self")
    place = wrap(call.args.get("dim", -1), len(shape))
    draft = Draft()
    own = draft.dims(shape, blocked=(place,))
    out = tuple(draft.new(call.args["k"], blocked=True) if i == place else dim for i, dim in enumerate(own))
    return draft.rule(call, {"self": own}, [out] * 2)


def _histogram(call: Call) -> Rule:
    """Counts add up, unless the numbers themselves say where the bins are."""
    given = call.args["min"] != call.args["max"]
    return loops(call, "self:* -> k", blocked="k" if given else "*k")


BLOCKED = reduction("blocked")

RULES: Mapping[str, Family] = {
    "sum": reduction("sum", "self"),
    "nansum": reduction("sum"),
    "count_nonzero": reduction("sum"),
    "mean": reduction("mean", "self"),
    "prod": reduction("prod"),
    "amax": reduction("max"),
    "amin": reduction("min"),
    "any": reduction("max"),
    "all": reduction("min"),
    "max.default": reduction("max"),
    "min.default": reduction("min"),
    **each("max.dim min.dim argmax argmin median mode kthvalue std var std_mean var_mean", BLOCKED),
    **each("logsumexp linalg_vector_norm norm", BLOCKED),
    "topk": _topk,
    "histc": _histogram,
}
