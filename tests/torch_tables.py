"""The tables that torch.distributed.pipelining generates, as rows of text."""

from __future__ import annotations

from typing import Any

import pytest


def torch_rows(name: str, *, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """The rows of torch's schedule class `name`, without its waits; ValueError where torch refuses the numbers."""
    pipelining: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    oracle = object.__new__(getattr(pipelining, name))
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds and "Interleaved" in name:
        raise ValueError("the microbatches do not make equal rounds")
    oracle.__dict__ |= {
        "pp_group_size": ranks,
        "n_local_stages": chunks,
        "num_stages": ranks * chunks,
        "_stages": [None] * chunks,
        "_num_stages": ranks * chunks,
        "_n_microbatches": microbatches,
        "microbatches_per_round": microbatches // rounds,
    }
    rows = [oracle._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[str(action) for action in row if action is not None] for row in rows]
