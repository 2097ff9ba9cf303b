"""The training state that lives on a rank: its parts of the parameters and of their gradients.

`parts` are the tensors that the optimizer updates: the user's parameters where a rank has its own, views of them
where all ranks share one process's whole model. Gradients are those of the current step; they are handed to the
user's ``.grad`` by `runtime.autograd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopart.ir.mesh import Mesh
from autopart.ir.state import Parameter, State, Unit
from autopart.runtime.flat import flat, unflat

Gradients = Mapping[str, Sequence[torch.Tensor | None]]
"""Gradients by unit, in the order of the unit's parameters; None where there is none."""


class States:
    """Parameters and gradients of one rank, by unit. Flat layouts: parts along dim 0, padded on the wire."""

    def __init__(
        self, state: State, mesh: Mesh, rank: int, parts: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> None:
        """From this rank's `parts` by parameter name, and the `whole` parameters that it keeps beside them."""
        self.degree = mesh.degree("dp")
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
        """Parts that are views of whole tensors, for ranks that share one process's model."""
        part = mesh.coordinate(rank).get("dp", 0)
        parts = {
            p.target: cut(unit, p, whole[p.target], part, mesh.degree("dp"))
            for unit in held(state, mesh, rank)
            for p in unit.parameters
        }
        return cls(state, mesh, rank, parts, whole)

    def packed(self, units: Sequence[Unit]) -> torch.Tensor:
        """This rank's parts of some units, flat, those of each padded."""
        each = [flat((self.parts[p.target] for p in unit.parameters), unit.padded(self.degree)) for unit in units]
        return each[0] if len(each) == 1 else torch.cat(each)

    def unpacked(self, units: Sequence[Unit], gathered: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Whole parameters of each unit out of every data rank's packed parts."""
        rows = torch.split(gathered.view(self.degree, -1), [unit.padded(self.degree) for unit in units], dim=1)
        return [self._whole(unit, own) for unit, own in zip(units, rows, strict=True)]

    def _whole(self, unit: Unit, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if all(p.shape and p.shape[0] % self.degree == 0 for p in unit.parameters):
            columns = torch.split(rows, [p.numel // self.degree for p in unit.parameters], dim=1)
            return tuple(c.reshape(p.shape) for c, p in zip(columns, unit.parameters, strict=True))
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

        def part(unit: Unit, own: Sequence[torch.Tensor | None], rank: int) -> torch.Tensor:
            whole = (
                torch.zeros(p.shape, dtype=p.dtype, device=device) if g is None else g
                for p, g in zip(unit.parameters, own, strict=True)
            )
            cuts = (cut(unit, p, t, rank, self.degree) for p, t in zip(unit.parameters, whole, strict=True))
            return flat(cuts, unit.padded(self.degree))

        each = list(zip(units, grads, strict=True))
        return torch.cat([part(unit, own, rank) for rank in range(self.degree) for unit, own in each])

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

    def drop(self, target: str) -> None:
        """Forget the accumulated gradient of one parameter."""
        for unit in self.units.values():
            for position, parameter in enumerate(unit.parameters):
                if parameter.target == target and unit.name in self.gradients:
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


def owners(unit: Unit, mesh: Mesh) -> list[int]:
    """The ranks whose parts make up a unit, in order: those of its first pp rank, one if the unit is not cut."""
    degree = mesh.degree("dp")
    parts = degree if unit.held_in_parts(degree) else 1
    return [mesh.rank({"pp": unit.columns[0], "dp": part}) for part in range(parts)]


def cut(unit: Unit, parameter: Parameter, tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """The part of a whole tensor that data rank `part` of `parts` holds, as a view; all if the unit is not cut."""
    if not unit.held_in_parts(parts):
        return tensor
    start, stop = parameter.rows(part, parts)
    return tensor[start:stop] if parameter.shape else tensor if stop > start else tensor.reshape(1)[:0]
