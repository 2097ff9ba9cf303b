"""Do the ranks make the same call? Asked before anything runs, so that whatever differs is an error on all of them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from autopart.api.programs import Compiled, Named
from autopart.capture.call import Call
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.runtime.transport import Transport

_WHOLE = (
    "every rank passes the same whole batch: seed the loader alike on every rank, without a distributed sampler; or, "
    "for a loader that gives each data rank its own samples, pass inputs='local' to parallelize"
)
_OWN = (
    "with inputs='local' ranks of one data rank pass the same samples, and all ranks the same of what is not split; "
    "give the distributed sampler the data rank, not the rank"
)
_SAME = (
    "every rank makes the same calls of the same module: with the same values, and with tensors of the same sizes but "
    "for the number of samples"
)
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks go by: torch's seed on rank 0; the samples of each data rank, where each passes its own; whether
    all have the call's program.
    """

    seed: int
    samples: tuple[int, ...] | None
    known: bool


def agree(transport: Transport, kind: Named, call: Call, mesh: Mesh | None, *, held: bool, known: bool) -> Agreed:
    """Raise ValueError on every rank unless the calls of all ranks fit together.

    `kind` is what a program is compiled for, `held` whether reductions wait, `known` whether there is a program for the
    call here. Without `mesh` every rank passes the whole batch, with it each data rank its own samples. Collective.
    """
    mine: dict[str, int] = {"kind": _digest(repr(kind)), "batch size": call.batch, "use of no_sync()": held}
    mine |= {f"inputs' contents ({split})": _digest(repr(sums)) for split, sums in _checksums(call).items()}
    seed = torch.initial_seed()  # of 64 bits
    numbers = (*mine.values(), seed >> 32, seed & 0xFFFFFFFF, known)
    gathered = transport.all_gather_numbers(numbers, tuple(range(transport.size)))
    every = [dict(zip(mine, found, strict=False)) for found in gathered]
    high, low = gathered[0][-3:-1]
    for what in mine:
        own = mesh is not None and what in ("batch size", f"inputs' contents ({_SAMPLES})")
        likes = _likes(mesh) if own and mesh is not None else [0] * transport.size
        found = [each[what] for each in every]
        if what == "kind":
            _check_kind(transport, found, kind)
        else:
            _check_alike(what, found, likes, _OWN if mesh is not None else _WHOLE)
    samples = None
    if mesh is not None:
        samples = tuple(every[mesh.rank({"dp": part})]["batch size"] for part in range(mesh.parts))
    return Agreed(high << 32 | low, samples, all(found[-1] for found in gathered))


def digest(kind: Named, call: Call) -> int:
    """A number, at least 1, that differs where calls do."""
    return 1 + _digest(repr((kind, call.batch, _checksums(call))))


def alike(transport: Transport | None, made: Named, compiled: Callable[[], Compiled]) -> Compiled:
    """``compiled()``, which must give the same program on every rank, or an error on every rank. Collective.

    Raises ValueError on all of them otherwise, naming what of `made` differs. An attribute of the module that is not
    the same everywhere is no matter unless `forward` reads it.
    """
    if transport is None or transport.size == 1:
        return compiled()
    try:
        found: Compiled | Exception = compiled()
    except Exception as error:
        found = error
    what = type(found).__name__ if isinstance(found, Exception) else _texts(found.program)
    every = transport.all_gather_numbers((_digest(what),), tuple(range(transport.size)))
    _check_kind(transport, [mine for (mine,) in every], made)
    if isinstance(found, Exception):
        raise found
    return found


def _texts(program: Program) -> str:
    return "\n".join([program.plan.fingerprint, program.captured.call, *(rank.source for rank in program.ranks)])


def _check_kind(transport: Transport, found: Sequence[int], named: Named) -> None:
    """Where the ranks found different things, gather what these are made of, and say what differs."""
    odd = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if odd is None:
        return
    texts = [(name, _text(value)) for name, value in named]
    every = transport.all_gather_object(texts, tuple(range(transport.size)))
    mine, other = (dict(every[rank]) for rank in (odd, 0))
    what = [
        f"{name} ({mine.get(name, 'nothing')[:_SHOWN]} and {other.get(name, 'nothing')[:_SHOWN]})"
        for name in {**mine, **other}
        if mine.get(name) != other.get(name)
    ]
    if what:
        raise ValueError(
            f"the ranks make different calls: rank {odd} and rank 0 differ in {', '.join(what[:3])}"
            f"{' and more' if what[3:] else ''}; {_SAME}"
        )
    raise ValueError(
        f"the ranks have different programs: forward does not do the same on ranks 0 and {odd}, because of an object "
        f"in an attribute or of something outside of the module; {_SAME}"
    )


def _text(value: Hashable) -> str:
    """A value as people write it; (type, value) stands for the value."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = value[1]
    return repr(value)


def _digest(text: str) -> int:
    """A number of 60 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 4


_SAMPLES, _SHARED = "samples", "what is not split"


def _likes(mesh: Mesh) -> list[int]:
    """For each rank the first that has the same place on dp."""
    return [mesh.rank({"dp": mesh.part(rank)}) for rank in range(mesh.size)]


def _check_alike(what: str, found: Sequence[int], likes: Sequence[int], rule: str) -> None:
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
