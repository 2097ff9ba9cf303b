"""Checkpoints: every rank writes its own parts under the whole tensors' names, so any plan can read them back.

A folder has ``checkpoint.json``, which names a subfolder and says which elements of which tensor are in which of its
files: one safetensors file a rank, and ``rest.pt`` for what is no part of a tensor (options, step counters, the user's
own). A part is written as ``[file, runs of dim 0, runs of dim 1, ...]`` with runs ``[start, stop]`` in ascending order
(`ir.elements`); version 1 had ``[file, start, stop]``, rows of dim 0. The JSON is replaced last and at once, so a save
that is killed leaves the checkpoint before it as it was.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopart.ir.elements import Elements, Runs
from autopart.runtime.parts import Slot, agreed, gathered
from autopart.runtime.transport import Transport
from autopart.runtime.weights import Files, Stored, as_written

INDEX, REST, MODEL = "checkpoint.json", "rest.pt", "model/"
SCHEMA, VERSION = "autopart.checkpoint", 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was opened: its tensors, the rest (a dict), and what made it (`about`, as in the JSON)."""

    files: Files
    rest: dict[str, Any]
    about: dict[str, Any]


def write(
    folder: Path,
    parts: Iterable[tuple[str, Slot]],
    rest: Mapping[str, Any],
    about: Mapping[str, Any],
    transport: Transport | None,
) -> None:
    """Save this rank's `parts` by name; of `rest` and `about`, those of rank 0. Collective.

    Raises the same error on every rank where one cannot write, and the checkpoint that was there stays.
    """
    rank = 0 if transport is None else transport.rank
    token = gathered(transport, secrets.token_hex(8))[0]
    data = folder / token

    def write_parts() -> dict[str, Stored]:
        data.mkdir(parents=True, exist_ok=True)
        return _write_parts(data / f"rank{rank}.safetensors", parts)

    def commit() -> None:
        if rank != 0:
            return
        for file in {file for stored in tensors.values() for file, _ in stored.pieces}:
            if not (data / file).is_file():
                raise FileNotFoundError(f"{data / file} was written but is not here: all ranks must share {folder}")
        _synced(data / REST, _serialised(rest))
        index = {"schema": SCHEMA, "version": VERSION, **about, "data": token}
        index["tensors"] = {name: _to_json(stored) for name, stored in sorted(tensors.items())}
        _synced(folder / f"{INDEX}.{token}", json.dumps(index, indent=1).encode())
        os.replace(folder / f"{INDEX}.{token}", folder / INDEX)
        _remove_others(folder, token)

    tensors = _merged(gathered(transport, agreed(transport, write_parts)))
    agreed(transport, commit)


def read(folder: Path) -> Checkpoint:
    """Open a checkpoint. Raises FileNotFoundError where there is none, ValueError for one that cannot be read."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: there is no checkpoint ({INDEX}) in this folder") from None
    if not isinstance(index, dict) or index.get("schema") != SCHEMA or index.get("version") not in (1, VERSION):
        raise ValueError(f"{folder / INDEX}: not a checkpoint that this autopart reads ({SCHEMA} version {VERSION})")
    stored = {name: _of_json(item, index["version"]) for name, item in index.pop("tensors").items()}
    data = folder / index.pop("data")
    rest = torch.load(data / REST, map_location="cpu", weights_only=True)
    return Checkpoint(Files(data, stored, MODEL), rest, index)


def check_plain(what: str, values: Mapping[str, Any]) -> None:
    """Raise TypeError for a value that could not be read back without running code of the file's."""
    for name, value in values.items():
        try:
            torch.load(io.BytesIO(_serialised(value)), weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{what}: {name} is or holds something that a checkpoint cannot have; pass numbers, text, tensors, and "
                f"lists, tuples and dicts of them ({str(error).splitlines()[0]})"
            ) from None


def _write_parts(path: Path, parts: Iterable[tuple[str, Slot]]) -> dict[str, Stored]:
    """Write what each slot has to one file; where it is, by name."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, Stored] = {}
    for name, slot in parts:
        dtype = str(slot.tensor.dtype).removeprefix("torch.")
        if slot.elements.count:
            tensors[name] = as_written(_alone(slot.tensor))
        found[name] = Stored(slot.shape, dtype, ((path.name, slot.elements),) if slot.elements.count else ())
    if tensors:
        save_file(tensors, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return found


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, contiguous, with a storage of its own size."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _merged(every: Sequence[Mapping[str, Stored]]) -> dict[str, Stored]:
    """What all ranks wrote, pieces in the order of the ranks."""
    merged: dict[str, Stored] = {}
    for found in every:
        for name, stored in found.items():
            before = merged[name].pieces if name in merged else ()
            merged[name] = Stored(stored.shape, stored.dtype, (*before, *stored.pieces))
    return merged


def _to_json(stored: Stored) -> dict[str, Any]:
    pieces = [[file, *elements.runs] for file, elements in stored.pieces]
    return {"shape": stored.shape, "dtype": stored.dtype, "pieces": pieces}


def _of_json(item: Mapping[str, Any], version: int) -> Stored:
    shape = tuple(item["shape"])
    pieces = [
        (file, Elements.all(shape).cut(0, *where) if version == 1 else Elements(shape, _tuples(where)))
        for file, *where in item["pieces"]
    ]
    return Stored(shape, item["dtype"], tuple(pieces))


def _tuples(runs: list[list[list[int]]]) -> tuple[Runs, ...]:
    return tuple(tuple((start, stop) for start, stop in dim) for dim in runs)


def _serialised(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove_others(folder: Path, token: str) -> None:
    """Remove the data of checkpoints before this one, and of saves that were killed."""
    for path in folder.iterdir():
        if path.is_dir() and path.name != token and re.fullmatch(r"[0-9a-f]{16}", path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(rf"{re.escape(INDEX)}\.[0-9a-f]{{16}}", path.name):
            path.unlink(missing_ok=True)
