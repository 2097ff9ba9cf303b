"""Do the ranks make the same call? Asked before anything runs, so that whatever differs is an error on all of them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from autopart.capture.call import Call
from autopart.ir.mesh import Mesh
from autopart.runtime.transport import Transport

_WHOLE = (
    "every rank passes the same whole batch: seed the loader alike on every rank, without a distributed sampler; or, "
    "for a loader that gives each data rank its own samples, pass inputs='local' to parallelize"
)
_OWN = (
    "with inputs='local' ranks of one data rank pass the same samples, and all ranks the same of what is not split; "
    "give the distributed sampler the data rank, not the rank"
)


def agree(
    transport: Transport, key: Hashable, call: Call, mesh: Mesh | None, *, held: bool
) -> tuple[int, tuple[int, ...] | None]:
    """Raise ValueError on every rank unless the calls of all ranks fit together; torch's seed on rank 0, for all.

    `key` is what a program is compiled for, `held` whether reductions wait. Without `mesh` every rank passes the whole
    batch. With it each data rank passes its own samples, and the number of these is returned, an entry a data rank.
    Collective.
    """
    shapes = hashlib.sha256(repr(key).encode()).hexdigest()
    mine: dict[str, Any] = {
        "inputs' shapes, dtypes or values of other arguments, or the model's modes": shapes,
        "batch size": call.batch,
        "use of no_sync()": held,
    }
    mine |= {f"inputs' contents ({split})": sums for split, sums in _checksums(call).items()}
    gathered = transport.all_gather_object((mine, torch.initial_seed()), tuple(range(transport.size)))
    every, seed = [found for found, _ in gathered], int(gathered[0][1])
    for what in mine:
        own = mesh is not None and what in ("batch size", f"inputs' contents ({_SAMPLES})")
        likes = _likes(mesh) if own and mesh is not None else [0] * transport.size
        _check_alike(what, [found[what] for found in every], likes, _OWN if mesh is not None else _WHOLE)
    if mesh is None:
        return seed, None
    return seed, tuple(every[mesh.rank({"dp": part})]["batch size"] for part in range(mesh.degree("dp")))


_SAMPLES, _SHARED = "samples", "what is not split"


def _likes(mesh: Mesh) -> list[int]:
    """For each rank the first that has the same place on dp."""
    return [mesh.rank({"dp": mesh.coordinate(rank).get("dp", 0)}) for rank in range(mesh.size)]


def _check_alike(what: str, found: Sequence[Any], likes: Sequence[int], rule: str) -> None:
    for rank, like in enumerate(likes):
        if found[rank] != found[like]:
            raise ValueError(
                f"the ranks make different calls: the {what} of rank {rank} differ from rank {like}'s; {rule}"
            )


def _checksums(call: Call) -> dict[str, tuple[int, ...]]:
    """Checksums of the tensors that are split and of those that are not."""
    sums: dict[str, tuple[int, ...]] = {_SAMPLES: (), _SHARED: ()}
    for leaf, dim in zip(call.leaves, call.dims, strict=True):
        if isinstance(leaf, torch.Tensor):
            split = _SHARED if dim is None else _SAMPLES
            sums[split] = (*sums[split], _checksum(leaf))
    return sums


def _checksum(tensor: torch.Tensor) -> int:
    """A checksum of at most 64 Ki elements spread over a tensor."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 65536)
    sample = flat[::step].contiguous().cpu()
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes()) if sample.numel() else 0
