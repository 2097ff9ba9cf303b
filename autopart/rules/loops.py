"""A notation for rules whose loops are known by name, after Einstein's summation convention.

``"self:mk mat2:kn -> mn"`` says that ``mm`` has the loops m, k and n. Each letter is a factor, each token a dim:

* ``*`` (first in a term) stands for however many leading dims the tensor has, the same ones in every term;
* ``(gc)`` is a dim that merges the factors g and c, g outermost; ``1`` is a dim of size 1;
* a tensor with fewer dims than tokens lacks the first ones, and one of size 1 broadcasts;
* terms of operands that the call does not have are skipped, as are results that nothing uses (``_``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from autopart.ir.graph import Dim
from autopart.rules.factor import Call, Dims, Draft, Product, Rule, ratio

_TOKEN = re.compile(r"\((\w+)\)|(\w|\*)")

Token = tuple[str, ...]
"""The loops of one dim, outermost first; ``("*",)`` stands for any number of dims."""

Term = tuple[Token, ...]
"""The dims of one tensor."""


@lru_cache(maxsize=256)
def _parse(spec: str) -> tuple[tuple[tuple[str, Term], ...], tuple[Term, ...]]:
    left, right = spec.split("->")
    operands = tuple((slot, _tokens(dims)) for slot, dims in (term.split(":") for term in left.split()))
    return operands, tuple(_tokens(term.strip()) for term in right.split(","))


def _tokens(term: str) -> Term:
    return tuple(tuple(group or single) for group, single in _TOKEN.findall(term))


def _fit(term: Term, ndim: int) -> Term:
    """The term with one token a dim: the star spelled out, leading tokens dropped where there are fewer dims."""
    if term[:1] == (("*",),):
        lead = ndim - len(term) + 1
        return tuple((f"*{i}",) for i in range(lead)) + term[1:]
    return term[len(term) - ndim :]


class _Sizes:
    """The size of every loop, solved from the shapes of the terms."""

    def __init__(self, known: Mapping[str, Dim]) -> None:
        self.of: dict[str, Dim] = {"1": 1, **known}

    def read(self, terms: Sequence[tuple[Term, tuple[Dim, ...]]]) -> None:
        """Learn from the dims of one loop first, then from merged dims with one unknown loop."""
        pairs = [(token, size) for term, shape in terms for token, size in zip(term, shape, strict=True)]
        for token, size in pairs:
            if len(token) == 1 and self.of.get(token[0], 1) == 1:
                self.of[token[0]] = size
        for token, size in pairs:
            unknown = [loop for loop in token if loop not in self.of]
            if len(unknown) == 1:
                rest: Dim | None = size
                for loop in token:
                    rest = ratio(rest, self.of[loop]) if loop in self.of and rest is not None else rest
                if rest is not None:
                    self.of[unknown[0]] = rest


def loops(
    call: Call,
    spec: str,
    *,
    blocked: str = "",
    linear: Sequence[str] = (),
    known: Mapping[str, Dim] | None = None,
    sizes: Mapping[str, str] | None = None,
    unread: Sequence[tuple[int, str]] = (),
    ends: Mapping[str, str] | None = None,
) -> Rule:
    """The rule that `spec` says for `call`.

    `blocked` names the letters that cannot be split (``*`` for all of the leading dims), `known` the sizes that shapes
    alone do not tell, `sizes` the integer arguments that are products of letters, `ends` by letter the operand that
    says where the groups of its loop end; the rest is as in `Rule`.
    """
    operands, results = _parse(spec)
    return described(
        call, operands, results, blocked=blocked, linear=linear, known=known, sizes=sizes, unread=unread, ends=ends
    )


def described(
    call: Call,
    operand_terms: Iterable[tuple[str, Term]],
    result_terms: Sequence[Term],
    *,
    blocked: Collection[str] = (),
    linear: Sequence[str] = (),
    known: Mapping[str, Dim] | None = None,
    sizes: Mapping[str, Sequence[str]] | None = None,
    unread: Sequence[tuple[int, str]] = (),
    ends: Mapping[str, str] | None = None,
) -> Rule:
    """`loops` for terms that are parsed already, whose loops may have names of any length."""
    operands = [(slot, _fit(term, call.ndim(slot))) for slot, term in operand_terms if call.has(slot)]
    # a result that nothing uses has no shape here, and needs none
    results = [
        _fit(term, len(out.shape)) if out is not None and term != (("_",),) else None
        for term, out in zip(result_terms, call.results, strict=False)
    ]
    found = _Sizes(known or {})
    found.read([(term, call.shape(slot)) for slot, term in operands])
    pairs = zip(results, call.results, strict=False)
    found.read([(term, out.shape) for term, out in pairs if term is not None and out is not None])

    draft = Draft()
    factors: dict[str, Product] = {
        loop: draft.new(size, blocked=loop in blocked or (loop[0] == "*" and "*" in blocked), name=loop)
        for loop, size in found.of.items()
    }

    def dims(term: Term, shape: tuple[Dim, ...]) -> Dims:
        merged = (tuple(f for loop in token for f in factors[loop]) for token in term)
        return tuple(() if size == 1 else product for size, product in zip(shape, merged, strict=True))

    return draft.rule(
        call,
        {slot: dims(term, call.shape(slot)) for slot, term in operands},
        [None if t is None or o is None else dims(t, o.shape) for t, o in zip(results, call.results, strict=False)],
        linear=linear,
        unread=unread,
        ends=[(factors[loop][0], slot) for loop, slot in (ends or {}).items() if factors.get(loop) and call.has(slot)],
        sizes={
            slot: tuple(f for x in loops for f in factors[x])
            for slot, loops in (sizes or {}).items()
            if all(x in factors for x in loops)
        },
    )
