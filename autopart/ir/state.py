"""Where training state lives: parameters in units, each unit placed as a whole.

A unit is what one collective moves: the parameters of one segment that share dtype, trainability and placement, or one
parameter that several segments use. A sharded unit is cut along dim 0 of every parameter, as by ``torch.tensor_split``
(larger parts first; a part may have no rows), so a part keeps its parameter's ndim. On the wire a part is flat and
padded to the longest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch

from autopart.ir.elements import Elements
from autopart.ir.placement import Modes

BUCKET = 4 * 2**20
"""Bytes: a layer of width 600 in float32, about where a collective costs what it moves rather than that it is one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a place of the mesh axis `axis` has of a tensor of `shape`.

    Dim `dim` is seen as `outer` runs of equal length, one after the other; the place has the elements ``[start, stop)``
    of each run.
    """

    axis: str
    shape: tuple[int, ...]
    dim: int
    outer: int
    start: int
    stop: int

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return self.among(Elements.all(self.shape)).local

    def among(self, elements: Elements) -> Elements:
        """The piece of what some elements make up."""
        return elements.cut(self.dim, self.start, self.stop, outer=self.outer)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a whole tensor; a view where there is one run."""
        return self.among(Elements.all(self.shape)).of(whole)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its name in the module, with the shape that programs know.

    That is the module's, but where mesh axes split the tensors inside segments: there each of `pieces` is what a place
    has of the one before it, the first of the module's parameter, and `shape` is that of the last. Where pipeline ranks
    have a piece each (of the output layer's weight), these are parameters of their own, `part_of` the module's.
    """

    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()
    part_of: str = ""

    @property
    def name(self) -> str:
        """The name of the module's parameter."""
        return self.part_of or self.target

    @classmethod
    def of(cls, target: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: tuple[Piece, ...] = ()) -> Parameter:
        """A parameter of the module, of which there are `pieces` here, each of the one before it; without them, all."""
        return cls(target, pieces[-1].local if pieces else shape, dtype, pieces)

    @property
    def module_shape(self) -> tuple[int, ...]:
        """The shape of the parameter in the module."""
        return self.pieces[0].shape if self.pieces else self.shape

    @property
    def elements(self) -> Elements:
        """What the places of this program have of the module's parameter."""
        found = Elements.all(self.module_shape)
        for piece in self.pieces:
            found = piece.among(found)
        return found

    def piece_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Likewise, out of the module's parameter; a view where every dim has one run."""
        return self.elements.of(whole)

    @property
    def numel(self) -> int:
        """The number of elements of the whole."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole."""
        return self.numel * self.dtype.itemsize

    def rows(self, part: int, parts: int) -> tuple[int, int]:
        """The rows ``[start, stop)`` of dim 0 that part `part` of `parts` has; a 0-d parameter is wholly in part 0."""
        return _rows(self.shape, part, parts)

    def part_shape(self, part: int, parts: int) -> tuple[int, ...]:
        """The shape of a part (a 0-d parameter has none elsewhere than in part 0: its other parts have shape (0,))."""
        return _part(self.shape, part, parts)


def _rows(shape: tuple[int, ...], part: int, parts: int) -> tuple[int, int]:
    count = shape[0] if shape else 1
    size, larger = divmod(count, parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)


def _part(shape: tuple[int, ...], part: int, parts: int) -> tuple[int, ...]:
    start, stop = _rows(shape, part, parts)
    if not shape:
        return () if stop > start else (0,)
    return (stop - start, *shape[1:])


@lru_cache(maxsize=4096)
def _numel(shape: tuple[int, ...], part: int, parts: int) -> int:
    """The elements of a part; layers share them."""
    return prod(_part(shape, part, parts))


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are placed, gathered and reduced together.

    `stages` are the stages that use it, `columns` the pp ranks that hold those, in ascending order (without them, the
    numbers of the stages: a stage a rank).
    """

    name: str
    parameters: tuple[Parameter, ...]
    trainable: bool
    modes: Modes
    stages: tuple[int, ...]
    columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self.columns or self.stages)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every parameter of the unit."""
        return self.parameters[0].dtype

    @property
    def numel(self) -> int:
        """The number of elements of the whole unit."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole unit."""
        return self.numel * self.dtype.itemsize

    def holds(self, targets: Iterable[str]) -> bool:
        """Whether some of these parameters are in it."""
        return not {parameter.target for parameter in self.parameters}.isdisjoint(targets)

    def part_numel(self, part: int, parts: int) -> int:
        """The elements of one part."""
        return sum([_numel(parameter.shape, part, parts) for parameter in self.parameters])

    def padded(self, parts: int) -> int:
        """The elements of a part on the wire: those of the longest part, which is the first."""
        return self.part_numel(0, parts)

    def wire_bytes(self, parts: int) -> int:
        """The bytes of all parts on the wire: of the whole unit gathered, or to be reduced to parts."""
        return self.padded(parts) * parts * self.dtype.itemsize

    def gathered(self, parts: int) -> bool:
        """Whether the parameters are gathered before each use and dropped after it (FSDP)."""
        return parts > 1 and self.modes.gathered

    def updated_in_parts(self, parts: int) -> bool:
        """Whether each rank keeps whole parameters but updates only its part (ZeRO-1 and 2)."""
        return parts > 1 and self.trainable and self.modes.regathered

    def reduced_at_once(self, parts: int) -> bool:
        """Whether gradients are reduced to parts as each microbatch makes them (ZeRO-2, FSDP)."""
        return parts > 1 and self.trainable and self.modes.reduced_at_once

    def held_in_parts(self, parts: int) -> bool:
        """Whether the user's parameter (and so the optimizer's state) is a part on each rank."""
        return self.gathered(parts) or self.updated_in_parts(parts)


Units = str | Sequence[str]
"""The name of a unit, or those of several that travel together."""


def names_of(units: Units) -> tuple[str, ...]:
    """The names of one unit or of several."""
    return (units,) if isinstance(units, str) else tuple(units)


@dataclass(frozen=True, slots=True)
class State:
    """The state part of a program: every unit, and which tensors are read-only beside them.

    Units that segments use one after the other travel together, up to `bucket` bytes.
    """

    units: tuple[Unit, ...]
    buffers: tuple[str, ...]
    bucket: int = BUCKET
    _homes: Mapping[str, Unit] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        homes = {parameter.target: unit for unit in self.units for parameter in unit.parameters}
        object.__setattr__(self, "_homes", homes)

    def unit(self, name: str) -> Unit:
        """The unit of a name."""
        return next(unit for unit in self.units if unit.name == name)

    def having(self, pieces: Mapping[str, tuple[Piece, ...]]) -> State:
        """The same units with these pieces of the module's parameters, by their names; the others are whole."""

        def here(parameter: Parameter) -> Parameter:
            target = parameter.target
            return Parameter.of(target, parameter.module_shape, parameter.dtype, pieces.get(target, ()))

        return replace(
            self, units=tuple(replace(unit, parameters=tuple(map(here, unit.parameters))) for unit in self.units)
        )

    def on(self, column: int) -> tuple[Unit, ...]:
        """The units that pp rank `column` holds, in their order."""
        return tuple(unit for unit in self.units if column in unit.columns)

    def homes(self) -> Mapping[str, Unit]:
        """The unit of every parameter that some segment uses, by the parameter's name."""
        return self._homes


def used_units(targets: Iterable[str], homes: Mapping[str, Unit]) -> tuple[Unit, ...]:
    """The units of some parameters, each once, in order of first use."""
    return tuple({unit.name: unit for unit in map(homes.__getitem__, targets)}.values())
