"""Rules of the user's own operators: a text that names the loops, with which an operator is registered.

    "b s h, h k -> b s k"          a term for every tensor operand, in the order of the schema; one for every result
    "... (g c), (g c) -> ... g"    ``...`` are any leading dims, the same in every term; (g c) merges two loops, g outer
    "b _, _ 1 -> b _"              ``_`` is a dim that stays whole and is no other's; 1 is a dim of size 1

A loop that operands have and a result lacks is summed over. The rule lies with the operator, as its other
registrations do: torch keeps it as long as the operator itself, and nobody else's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopart._torch import OpOverload
from autopart.ir.graph import Arg, Dim, Size
from autopart.rules.factor import Call, Dims, Rule, times
from autopart.rules.loops import Term, Token, described

_KEPT = "_autopart_rule"
"""The attribute of an operator that holds its rule."""

_TOKENS = re.compile(r"\(([^()]*)\)|(\S+)")
_NAME = re.compile(r"[A-Za-z]\w*")


class Misfit(Exception):
    """A call that a rule does not fit."""


@dataclass(frozen=True, slots=True)
class OwnRule:
    """The rule of an operator as its owner wrote it (`text`), read; called as the families of the table are.

    `whole` are the loops that cannot be split, those of ``_`` among them; `linear`, `sizes` and `ends` are as in
    `Rule`. `reads` has the operands that a result depends on, by its number, where these are not all.
    """

    text: str
    operands: tuple[tuple[str, Term], ...]
    results: tuple[Term, ...]
    whole: frozenset[str]
    linear: tuple[str, ...]
    sizes: tuple[tuple[str, tuple[str, ...]], ...]
    reads: tuple[tuple[int, tuple[str, ...]], ...] = ()
    ends: tuple[tuple[str, str], ...] = ()

    def __call__(self, call: Call) -> Rule:
        """The rule of one call. Raises Misfit if the text does not fit its shapes."""
        terms = dict(self.operands)
        operands = [(operand.slot, terms[operand.slot.split(".")[0]]) for operand in call.operands]
        results = self.results * len(call.results) if self._is_list(call) else self.results
        given = {slot: size for slot, _ in self.sizes if (size := _argument(call, slot)) is not None}
        for name, term, shape in _shaped(call, operands, results):
            _check_dims(name, term, shape)
        known = {loops[0]: given[slot] for slot, loops in self.sizes if slot in given and len(loops) == 1}
        try:
            rule = described(
                call,
                operands,
                results,
                blocked=self.whole,
                linear=self.linear,
                known=known,
                sizes={slot: loops for slot, loops in self.sizes if slot in given},
                ends=dict(self.ends),
                unread=[
                    (n, slot) for n, names in self.reads for slot, _ in operands if slot.split(".")[0] not in names
                ],
            )
        except KeyError as error:
            raise Misfit(f"no shape tells the size of loop {error}; name an argument that does in sizes=") from None
        _check_sizes(call, rule, given)
        _check_results(rule, list(_shaped(call, (), results)))
        return rule

    @staticmethod
    def _is_list(call: Call) -> bool:
        """Whether the results are one list, of whatever length."""
        return str(call.op._schema.returns[0].type) != "Tensor"


def own_rule(op: OpOverload) -> OwnRule | None:
    """The rule that an operator is registered with, if any."""
    found: OwnRule | None = getattr(op, _KEPT, None)
    return found


def keep(op: OpOverload, rule: OwnRule) -> None:
    """Register an operator with a rule. Raises ValueError if it has another one."""
    known = own_rule(op)
    if known is not None and known != rule:
        raise ValueError(f"{op} is registered with another rule already: {known.text!r}")
    setattr(op, _KEPT, rule)


def forget(op: OpOverload) -> None:
    """Undo `keep`: for tests, which share a process."""
    delattr(op, _KEPT)


# ---- reading the text ------------------------------------------------------------------------------------------------


def read(
    op: OpOverload,
    text: str,
    *,
    whole: str = "",
    linear: Sequence[str] = (),
    sizes: Mapping[str, str] | None = None,
    reads: Mapping[int, str] | None = None,
    ends: Mapping[str, str] | None = None,
) -> OwnRule:
    """The rule that the text says of an operator. Raises ValueError for what does not fit its schema."""
    schema = op._schema
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"rule: expected operands -> results, such as 'b s h, h k -> b s k', not {text!r}")
    count = iter(range(len(text)))
    operands = [_term(part, count) for part in left.split(",")] if tensors or left.strip() else []
    results = [_term(part, count) for part in right.split(",")]
    for terms, wanted, what in ((operands, tensors, "tensor operand"), (results, schema.returns, "result")):
        if len(terms) != len(wanted):
            raise ValueError(f"rule: {text!r} has {_many(len(terms), what)}, but {op} has {len(wanted)}: {schema}")
    kept = {"*" if loop == "..." else loop for loop in whole.split()}
    kept |= {loop for loop in _loops((*operands, *results)) if loop.startswith("_")}
    made = OwnRule(
        text=" ".join(text.split()),
        operands=tuple(zip(tensors, operands, strict=True)),
        results=tuple(results),
        whole=frozenset(kept),
        linear=tuple(linear),
        sizes=tuple((slot, tuple(loops.split())) for slot, loops in (sizes or {}).items()),
        reads=tuple((number, tuple(names.split())) for number, names in (reads or {}).items()),
        ends=tuple((ends or {}).items()),
    )
    _check_names(op, made)
    return made


def _term(text: str, count: Iterator[int]) -> Term:
    """One tensor's dims; each ``_`` is a loop of its own, numbered by `count`."""
    tokens: list[Token] = []
    for group, single in _TOKENS.findall(text):
        if single == "...":
            tokens.append(("*",))
        elif single == "_":
            tokens.append((f"_{next(count)}",))
        else:
            tokens.append(tuple(group.split()) if group else (single,))
        if tokens[-1] != ("*",) and single not in ("_", "1") and not all(map(_NAME.fullmatch, tokens[-1])):
            raise ValueError(f"rule: {group or single!r} names no loop, which is a letter or a word")
    loops = [loop for token in tokens for loop in token if loop != "1"]
    if ("*",) in tokens[1:] or len(set(loops)) < len(loops):
        raise ValueError(f"rule: {text.strip()!r} has a loop twice, or '...' after a dim")
    return tuple(tokens)


def _loops(terms: Sequence[Term]) -> set[str]:
    return {loop for term in terms for token in term for loop in token if loop != "1"}


def _check_names(op: OpOverload, rule: OwnRule) -> None:
    arguments = {argument.name for argument in op._schema.arguments}
    read, made = _loops([term for _, term in rule.operands]), _loops(rule.results)
    counted = {loop for _, loops in rule.sizes for loop in loops}
    for what, given, known in (
        ("whole", rule.whole, read | made),
        ("sizes", counted, read | made),
        ("sizes", [slot.split(".")[0] for slot, _ in rule.sizes], arguments),
        ("reads", [name for _, names in rule.reads for name in names], dict(rule.operands).keys()),
        ("reads", [str(number) for number, _ in rule.reads], set(map(str, range(len(rule.results))))),
        ("ends", [loop for loop, _ in rule.ends], rule.whole),
        ("ends", [slot for _, slot in rule.ends], dict(rule.operands).keys()),
        ("linear", [word.rstrip("*") for words in rule.linear for word in words.split()], arguments),
    ):
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"{what}: {', '.join(unknown)}: expected one of {', '.join(sorted(known))}")
    alone = sorted(made - read - counted - rule.whole)
    if alone:
        raise ValueError(
            f"rule: {', '.join(alone)} is in no operand of {rule.text!r}, so nothing says which part of it to compute: "
            "name it in whole=, or the integer argument that is its size in sizes="
        )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# ---- fitting a call --------------------------------------------------------------------------------------------------


def _argument(call: Call, slot: str) -> Dim | None:
    """A whole number among the arguments, by slot."""
    name, _, place = slot.partition(".")
    arg: Arg = call.args[name]
    if place:
        arg = arg[int(place)] if isinstance(arg, tuple | list) and int(place) < len(arg) else None
    return arg if isinstance(arg, int | Size) else None


def _shaped(
    call: Call, operands: Sequence[tuple[str, Term]], results: Sequence[Term]
) -> Iterator[tuple[str, Term, tuple[Dim, ...]]]:
    """Every tensor of a call, as a message calls it, with its term and its shape."""
    for slot, term in operands:
        yield slot, term, call.shape(slot)
    for number, (term, out) in enumerate(zip(results, call.results, strict=False)):
        if out is not None:
            yield f"result {number}", term, out.shape


def _check_dims(name: str, term: Term, shape: tuple[Dim, ...]) -> None:
    many = term[:1] == (("*",),)
    if len(shape) != len(term) and not (many and len(shape) >= len(term) - 1):
        least = f"at least {len(term) - 1}" if many else f"{len(term)}"
        raise Misfit(f"{name} has {_many(len(shape), 'dim')}, and by the rule {least}")


def _placed(call: Call, rule: Rule) -> Iterator[tuple[str, Dims, tuple[Dim, ...]]]:
    """Every tensor of a call with the loops of its dims, and its shape."""
    for slot, dims in rule.operands:
        yield slot, dims, call.shape(slot)
    for number, (own, out) in enumerate(zip(rule.results, call.results, strict=False)):
        if own is not None and out is not None:
            yield f"result {number}", own, out.shape


def _check_sizes(call: Call, rule: Rule, given: Mapping[str, Dim]) -> None:
    """Every dim, and every size among the arguments, must be the product of its loops; operands may broadcast."""
    pairs = [(slot, loops, given[slot]) for slot, loops in rule.sizes]
    for name, dims, shape in _placed(call, rule):
        pairs += [(f"dim {i} of {name}", loops, s) for i, (loops, s) in enumerate(zip(dims, shape, strict=True))]
    for name, loops, size in pairs:
        total: Dim | None = 1
        for loop in loops:
            total = None if total is None else times(total, rule.factors[loop].size)
        if total != size:
            raise Misfit(f"{name} is {_text(size)}, and by the rule {'no size' if total is None else _text(total)}")


def _check_results(rule: Rule, results: Sequence[tuple[str, Term, tuple[Dim, ...]]]) -> None:
    """A result does not broadcast: a dim of size 1 would be a sum over its loop, which only a loop left out is."""
    sizes = {factor.name: factor.size for factor in rule.factors}
    for name, term, shape in results:
        for back, (token, size) in enumerate(zip(reversed(term), reversed(shape), strict=False), 1):
            longer = [sizes[loop] for loop in token if loop in sizes]
            if size == 1 and longer:
                raise Misfit(f"dim {len(shape) - back} of {name} is 1, and by the rule {_text(longer[0])}")


def _text(size: Dim) -> str:
    return size.text("batch") if isinstance(size, Size) else str(size)
