"""The batches of a loop whose steps overlap, as calls of the module: read ahead, copied, held against the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopart import capture as capturing
from autopart.api.agreement import digest
from autopart.api.checks import check_cut
from autopart.api.lookahead import Lookahead, different
from autopart.api.module import Parallel
from autopart.api.plain import as_plain
from autopart.api.programs import Asked, Compiled, Made
from autopart.capture import NO_TARGET


class Feed:
    """The batches of an iterator, one after the other."""

    def __init__(self, model: Parallel, items: Iterator[Any]) -> None:
        self._model, self._session, self._items = model, model._autopart, items
        self._read = 0

    def first(self) -> tuple[Asked, Made] | None:
        """The first batch, and what a program for it is made for; None if there is none. Collective.

        Raises ValueError on every rank where some have one and others have not.
        """
        found, transport = self._next(), self._session.join().transport
        if transport is not None and transport.size > 1:
            every = transport.all_gather_object(found is not None, tuple(range(transport.size)))
            if any(every) and not all(every):
                raise different(f"rank {every.index(False)} has no batch 0")
        return found

    def rest(self, made: Made, compiled: Compiled, noted: Callable[[int], None], lag: int) -> Lookahead[Asked]:
        """The batches after the first one, for which a program is `compiled`; `noted(n)` is called as n is read.

        Taking one raises ValueError where it is unlike the first, or not the same on all ranks.
        """

        def following() -> tuple[Asked, int] | None:
            found = self._next()
            if found is None:
                return None
            asked, mine = found
            number = self._read - 1
            self._check(number, mine, made)
            check_cut(asked.shares(compiled.program.plan), compiled.program.plan, compiled.least)
            noted(number)
            return asked, digest(mine.kind, asked.call)

        return Lookahead(following, self._session.transport, max(1, lag))

    def _next(self) -> tuple[Asked, Made] | None:
        item = next(self._items, None)
        if item is None:
            return None
        self._read += 1
        return self._asked(item)

    def _asked(self, item: Any) -> tuple[Asked, Made]:
        """A batch as the call that it stands for, on the device of the ranks here, and copied: it is read for long."""
        session, ranks, target = self._session, self._session.join(), NO_TARGET
        if session.options.loss_fn is not None:
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise TypeError("batches: with a loss_fn each is a pair, what the module takes and the target")
            item, target = item
        named = isinstance(item, Mapping)
        args = () if named else tuple(item) if isinstance(item, tuple | list) else (item,)
        args, kwargs, target = ranks.moved((args, dict(item) if named else {}, target))
        with as_plain(self._model, session.plain):
            call = capturing.read(self._model, args, kwargs, batch=session.options.batch, target=target)
            leaves = tuple(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves)
            asked = Asked(self._model, replace(call, leaves=leaves), target is not NO_TARGET)
            return asked, asked.made(ranks)

    def _check(self, number: int, mine: Made, made: Made) -> None:
        if mine.named() != made.named():
            known = dict(made.named())
            odd = next((name for name, value in mine.named() if known.get(name, self) != value), "its arguments")
            raise ValueError(
                f"batches: batch {number} differs from the first one in {odd}; one program runs for a whole loop: pad "
                "batches to one size, or make a loop for each kind"
            )
