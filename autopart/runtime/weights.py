"""Tensors in safetensors files, read in parts: of a file, only what a rank holds is ever looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopart.ir.elements import Elements
from autopart.runtime.parts import Slot

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PAIRS = (torch.complex128, torch.complex32)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in files: its whole shape, its dtype (torch's name for it), and which elements are in which file.

    `pieces` are ``(file, elements)``. The file has exactly those elements under the tensor's name.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[str, Elements], ...]


def as_written(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as safetensors can hold it: complex numbers that it has no name for as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.dtype in _PAIRS else tensor


def _as_read(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """What was written of a tensor of a dtype, by torch's name for it."""
    return torch.view_as_complex(tensor) if dtype in map(_name, _PAIRS) else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Files:
    """Safetensors files in a folder, and what is in them by name; a module's tensors have `prefix` before theirs."""

    def __init__(self, folder: Path, stored: Mapping[str, Stored], prefix: str = "") -> None:
        self.folder, self.stored, self.prefix = folder, stored, prefix
        self._open: dict[str, Any] = {}

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Files:
        """A safetensors file, or a folder with ``model.safetensors.index.json`` or ``model.safetensors``.

        Raises FileNotFoundError or ValueError, naming `path`, where there is none.
        """
        path = Path(path)
        if path.is_file():
            return cls._whole(path.parent, [path.name])
        if (path / INDEX).is_file():
            names = json.loads((path / INDEX).read_text(encoding="utf-8")).get("weight_map")
            if not isinstance(names, dict):
                raise ValueError(f"weights: {path / INDEX} has no weight_map")
            return cls._whole(path, sorted(set(names.values())))
        if (path / SINGLE).is_file():
            return cls._whole(path, [SINGLE])
        raise FileNotFoundError(f"weights: {path} is neither a safetensors file nor a folder with {SINGLE} or {INDEX}")

    @classmethod
    def _whole(cls, folder: Path, names: Iterable[str]) -> Files:
        files = cls(folder, {})
        stored = {}
        for name in names:
            handle = files._handle(name)
            for key in handle.keys():  # noqa: SIM118  a handle is not a mapping
                shape = tuple(handle.get_slice(key).get_shape())
                stored[key] = Stored(shape, "", ((name, Elements.all(shape)),))
        files.stored = stored
        return files

    def names(self) -> list[str]:
        """The names of the module's tensors that are there."""
        return [key.removeprefix(self.prefix) for key in self.stored if key.startswith(self.prefix)]

    def find(self, names: Iterable[str]) -> str | None:
        """What a tensor with several names is called in the files, None if it is not there."""
        return next((self.prefix + name for name in names if self.prefix + name in self.stored), None)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the tensor `name` has this whole shape."""
        if self.stored[name].shape != shape:
            found = list(self.stored[name].shape)
            raise ValueError(f"{self.folder}: {name} has shape {found}, the module's has {list(shape)}")

    def fill(self, slot: Slot, name: str) -> None:
        """Read the elements of `slot` from the tensor `name`. Raises ValueError if shapes differ or one is missing."""
        self.check_shape(name, slot.shape)
        found = self.stored[name]
        read = 0
        for file, elements in found.pieces:
            for theirs, mine in elements.shared(slot.elements):
                handle = self._handle(file)
                # a tensor without dims has no slices
                values = handle.get_slice(name)[theirs] if theirs else handle.get_tensor(name)
                target = slot.tensor[mine]
                target.copy_(_as_read(values, found.dtype))
                read += target.numel()
        if read != slot.elements.count:
            wanted = slot.elements.count
            raise ValueError(f"{self.folder}: only {read} of the {wanted} elements of {name} for this rank are there")

    def tensor(self, name: str, slot: Slot) -> torch.Tensor:
        """A new CPU tensor of the elements of `slot`, of the tensor `name`."""
        made = torch.empty(slot.tensor.shape, dtype=getattr(torch, self.stored[name].dtype))
        self.fill(Slot(slot.name, slot.elements, made), name)
        return made

    def _handle(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.folder / file), framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / file}: not a safetensors file ({error})") from None
        return self._open[file]
