"""Schedules that never flush: the optimizer steps inside the table, and microbatches meet weights of other versions.

The rows are those of an endless stream of which m microbatches are shown: steady state has no bubble, the ends have
one. `schedules.versions` has the version that each action uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopart.ir.action import Action, Boundary, Kind, Schedule, Weights
from autopart.schedules.family import Family, check_count


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """1F1B with an optimizer step after every backward; a backward uses the weights that its forward used."""
    return _schedule("pipedream", microbatches, Weights.STASH, 1, [ranks - 1 - rank for rank in range(ranks)])


def double_buffered(ranks: int, microbatches: int, accumulate: int | None = None) -> Schedule:
    """1F1B with a step every `accumulate` (p by default) microbatches; all of a batch uses the version before the last.

    So w(t+1) = w(t) - lr * g(w(t-1)), on all ranks alike.
    """
    batch = ranks if accumulate is None else accumulate
    check_count("accumulate", batch)
    if batch < ranks:
        raise ValueError(
            f"{batch} microbatches a batch on {ranks} ranks; it takes at least {ranks}, or a batch "
            "would meet more than two versions"
        )
    return _schedule("2bw", microbatches, Weights.DOUBLE, batch, [ranks - 1 - rank for rank in range(ranks)])


def paci(ranks: int, microbatches: int, accumulate: int | None = None) -> Schedule:
    """1F1B with a step every `accumulate` (p-1 by default) microbatches, no copies of the weights.

    A backward meets weights at most ceil((p-1-r) / accumulate) steps newer than its forward did.
    """
    batch = max(1, ranks - 1) if accumulate is None else accumulate
    check_count("accumulate", batch)
    return _schedule("paci", microbatches, Weights.CURRENT, batch, [ranks - 1 - rank for rank in range(ranks)])


def pipelined_backprop(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward and a step at each tick, no copies of the weights: D = 2(p-1-r) steps lie between.

    Training compensates for D (spike compensation, linear weight prediction); the table is the same without.
    """
    return _schedule("pb", microbatches, Weights.CURRENT, 1, [2 * (ranks - 1 - rank) for rank in range(ranks)])


FAMILIES = (
    Family(
        "pipedream",
        "no flush: a step after every backward, a copy of the weights for each microbatch on its way",
        "Narayanan et al., PipeDream, SOSP 2019 (arXiv 1806.03377)",
        "min(m, p - r) microbatches and as many versions of the weights on rank r",
        pipedream,
    ),
    Family(
        "2bw",
        "no flush: a step every p microbatches, two versions of the weights",
        "Narayanan et al., PipeDream-2BW, ICML 2021 (arXiv 2006.09503)",
        "min(m, p - r) microbatches on rank r and two versions of the weights",
        double_buffered,
    ),
    Family(
        "paci",
        "no flush: a step every p - 1 microbatches, one version of the weights",
        "PACI, Breaking the Bubble, 2026 (arXiv 2606.07881)",
        "min(m, p - r) microbatches on rank r",
        paci,
    ),
    Family(
        "pb",
        "no flush: a forward, a backward and a step at every tick, one version of the weights",
        "Kosson et al., Pipelined Backpropagation at Scale, MLSys 2021 (arXiv 2003.11666)",
        "min(m, 2(p - 1 - r) + 1) microbatches on rank r",
        pipelined_backprop,
    ),
)
"""The families of this file."""


def _schedule(name: str, microbatches: int, weights: Weights, batch: int, warmups: list[int]) -> Schedule:
    """Rows of forwards `warmups` ahead of the backwards, with an OPT after each whole batch."""
    if microbatches % batch:
        raise ValueError(
            f"{microbatches} microbatches; it takes a multiple of {batch}, the microbatches of one "
            f"step, such as {microbatches + -microbatches % batch}"
        )
    place = tuple(range(len(warmups)))
    table = tuple(tuple(_row(rank, microbatches, batch, ahead)) for rank, ahead in enumerate(warmups))
    return Schedule(name, microbatches, place, table, weights=weights, optimizer=Boundary.PER_RANK)


def _row(rank: int, microbatches: int, batch: int, ahead: int) -> Iterator[Action]:
    for tick in range(microbatches + ahead):
        if tick < microbatches:
            yield Action(Kind.F, rank, tick)
        done = tick - ahead
        if done >= 0:
            yield Action(Kind.B, rank, done)
            if (done + 1) % batch == 0:
                yield Action(Kind.OPT, rank, done // batch)
