"""The training state that lives on a rank: its parts of the parameters and of their gradients.

`parts` are the tensors that the optimizer updates: the user's parameters where a rank has its own, views of them
where all ranks share one process's whole model. Gradients are those of the current step; they are handed to the
user's ``.grad`` by `runtime.autograd`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from autopart.ir.elements import Elements
from autopart.ir.mesh import Mesh
from autopart.ir.state import Parameter, State, Unit
from autopart.runtime.flat import flat, flat_padded, unflat
from autopart.runtime.parts import Slot


class States:
    """Parameters and gradients of one rank, by unit. Flat layouts: parts along dim 0, padded on the wire."""

    def __init__(
        self, state: State, mesh: Mesh, rank: int, parts: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> None:
        """From this rank's `parts` by parameter name, and the `whole` parameters that it keeps beside them."""
        self.mesh, self.rank = mesh, rank
        self.degree = mesh.width(mesh.coordinate(rank).get("pp", 0))
        self.part = mesh.coordinate(rank).get("dp", 0)
        self.units = {unit.name: unit for unit in held(state, mesh, rank)}
        self.gradients: dict[str, list[torch.Tensor | None]] = {}
        self._sums: dict[str, set[int]] = {}
        self.parts = {p.target: parts[p.target] for unit in self.units.values() for p in unit.parameters}
        self.whole = {
            unit.name: [whole[p.target] for p in unit.parameters]
            for unit in self.units.values()
            if not unit.gathered(self.degree)
        }

    @classmethod
    def viewing(cls, state: State, mesh: Mesh, rank: int, whole: Mapping[str, torch.Tensor]) -> States:
        """Parts that are views of whole tensors, for ranks that share one process's model.

        A piece of several runs is a copy: the optimizer of such a process updates the whole.
        """
        at, units = mesh.coordinate(rank), held(state, mesh, rank)
        part, parts_of = at.get("dp", 0), mesh.width(at.get("pp", 0))
        here = {p.target: p.piece_of(whole[p.name]) for unit in units for p in unit.parameters}
        parts = {p.target: cut(unit, p, here[p.target], part, parts_of) for unit in units for p in unit.parameters}
        return cls(state, mesh, rank, parts, here)

    def packed(self, units: Sequence[Unit]) -> torch.Tensor:
        """This rank's parts of some units, flat, those of each padded."""
        return flat_padded(
            ([self.parts[p.target] for p in unit.parameters], unit.padded(self.degree)) for unit in units
        )

    def unpacked(self, units: Sequence[Unit], gathered: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Whole parameters of each unit out of every data rank's packed parts."""
        rows = torch.split(gathered.view(self.degree, -1), [unit.padded(self.degree) for unit in units], dim=1)
        return [self._whole(unit, own) for unit, own in zip(units, rows, strict=True)]

    def _whole(self, unit: Unit, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if all(p.shape and p.shape[0] % self.degree == 0 for p in unit.parameters):
            columns = torch.split(rows, [p.numel // self.degree for p in unit.parameters], dim=1)
            # Dense, which some kernels take for granted (native_group_norm): a column of single elements is not.
            return tuple(c.contiguous().view(p.shape) for c, p in zip(columns, unit.parameters, strict=True))
        every = [unflat(row, self._part_shapes(unit, part)) for part, row in enumerate(rows)]
        pieces = zip(*every, strict=True)
        return tuple(flat(found).view(p.shape) for found, p in zip(pieces, unit.parameters, strict=True))

    def refill(self, unit: Unit, gathered: torch.Tensor) -> None:
        """Write every data rank's packed parts into the whole parameters that this rank keeps."""
        for tensor, fresh in zip(self.whole[unit.name], self.unpacked([unit], gathered)[0], strict=True):
            tensor.copy_(fresh)

    def scattered(self, units: Sequence[Unit], grads: Sequence[Sequence[torch.Tensor | None]]) -> torch.Tensor:
        """Whole gradients of some units in wire layout: packed parts of all data ranks, one rank after the other."""
        device = self.parts[units[0].parameters[0].target].device
        whole = [
            [
                (p, torch.zeros(p.shape, dtype=p.dtype, device=device) if g is None else g)
                for p, g in zip(unit.parameters, own, strict=True)
            ]
            for unit, own in zip(units, grads, strict=True)
        ]
        return flat_padded(
            ([cut(unit, p, tensor, rank, self.degree) for p, tensor in own], unit.padded(self.degree))
            for rank in range(self.degree)
            for unit, own in zip(units, whole, strict=True)
        )

    def add_parts(self, units: Sequence[Unit], joined: torch.Tensor) -> None:
        """Add this rank's gradient parts of some units, out of its reduced piece, to those of the step."""
        for unit, own in zip(units, torch.split(joined, [unit.padded(self.degree) for unit in units]), strict=True):
            self.add(unit.name, unflat(own, self._part_shapes(unit, self.part)))

    def _part_shapes(self, unit: Unit, part: int) -> list[tuple[int, ...]]:
        return [parameter.part_shape(part, self.degree) for parameter in unit.parameters]

    def add(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Add to the step's gradients of a unit.

        A gradient as the program made it may be another parameter's too, or still be on its way to another rank, so the
        first sum is a new tensor; later ones are in place.
        """
        kept, fresh = self.gradients.setdefault(unit, [None] * len(grads)), self._sums.setdefault(unit, set())
        for position, grad in enumerate(grads):
            mine = kept[position]
            if grad is None or mine is None:
                kept[position] = mine if grad is None else grad
            elif position in fresh:
                mine.add_(grad)
            else:
                kept[position] = mine + grad
                fresh.add(position)

    def take(self, unit: Unit) -> list[torch.Tensor | None]:
        """The gradients accumulated for a unit, which are forgotten here."""
        self._sums.pop(unit.name, None)
        return self.gradients.pop(unit.name, [None] * len(unit.parameters))

    def take_filled(self, unit: Unit) -> list[torch.Tensor]:
        """Likewise, with zeros for gradients that there are none of."""
        parts = [self.parts[parameter.target] for parameter in unit.parameters]
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parts, self.take(unit), strict=True)]

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the accumulated gradients by a number; the products are new tensors."""
        for unit, grads in self.gradients.items():
            self.gradients[unit] = [None if g is None else g * factor.to(g) for g in grads]
            self._sums[unit] = {position for position, grad in enumerate(grads) if grad is not None}

    def made(self) -> Iterator[tuple[Unit, Parameter, torch.Tensor]]:
        """The accumulated gradients, each with its parameter and unit."""
        for unit in self.units.values():
            for parameter, grad in zip(unit.parameters, self.gradients.get(unit.name, ()), strict=False):
                if grad is not None:
                    yield unit, parameter, grad

    def drop(self, target: str) -> None:
        """Forget the accumulated gradient of one parameter."""
        for unit in self.units.values():
            for position, parameter in enumerate(unit.parameters):
                if parameter.name == target and unit.name in self.gradients:
                    self.gradients[unit.name][position] = None
                    self._sums[unit.name].discard(position)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of parameters (whole ones where they are kept, else parts) and gradients held now."""
        parameters = sum(
            sum(t.nbytes for t in self.whole[name])
            if name in self.whole
            else sum(self.parts[p.target].nbytes for p in unit.parameters)
            for name, unit in self.units.items()
        )
        gradients = sum(g.nbytes for grads in self.gradients.values() for g in grads if g is not None)
        return {"parameters": parameters, "gradients": gradients}


def held(state: State, mesh: Mesh, rank: int) -> tuple[Unit, ...]:
    """The units that a rank holds a part of."""
    return state.on(mesh.coordinate(rank).get("pp", 0))


def elements(unit: Unit, parameter: Parameter, mesh: Mesh, rank: int) -> Elements:
    """What the user's Parameter has on a rank, of which `parameter` is the one in `unit`."""
    here = mesh.coordinate(rank)
    column = here.get("pp", 0)
    if column not in unit.columns:
        return parameter.elements.cut(0, 0, 0)
    if not unit.held_in_parts(mesh.width(column)):
        return parameter.elements
    return parameter.elements.cut(0, *parameter.rows(here.get("dp", 0), mesh.width(column)))


def counts(unit: Unit, parameter: Parameter, mesh: Mesh, rank: int) -> bool:
    """Whether what a rank has stands for itself in the world: each element does on the first rank that has it."""
    apart = {piece.axis for piece in parameter.pieces}
    if unit.held_in_parts(mesh.width(unit.columns[0])):
        apart.add("dp")
    home = {"pp": unit.columns[0]}
    return all(place == home.get(axis, 0) for axis, place in mesh.coordinate(rank).items() if axis not in apart)


def whole_gradients(every: Sequence[States]) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter, out of the reduced ones of all ranks; a single part is as it is."""
    parts: dict[str, list[Slot]] = {}
    for states in every:
        for unit, parameter, grad in states.made():
            if counts(unit, parameter, states.mesh, states.rank):
                here = elements(unit, parameter, states.mesh, states.rank)
                parts.setdefault(parameter.name, []).append(Slot(parameter.name, here, grad))
    return {name: _joined(slots) for name, slots in parts.items()}


def _joined(slots: Sequence[Slot]) -> torch.Tensor:
    first = slots[0].tensor
    if len(slots) == 1:
        return first
    whole = torch.empty(slots[0].shape, dtype=first.dtype, device=first.device)
    for slot in slots:
        slot.put(whole)
    return whole


def cut(unit: Unit, parameter: Parameter, tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """The part of a whole tensor that data rank `part` of `parts` holds, as a view; all if the unit is not cut."""
    if not unit.held_in_parts(parts):
        return tensor
    start, stop = parameter.rows(part, parts)
    return tensor[start:stop] if parameter.shape else tensor if stop > start else tensor.reshape(1)[:0]
