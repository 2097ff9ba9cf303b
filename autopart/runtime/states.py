"""The training state that lives on a rank: its parts of the parameters and of their gradients.

`parts` are the tensors that the optimizer updates: the user's parameters where a rank has its own, views of them where all
ranks share one process's whole model. Gradients are those of the current step; they are handed to the user's ``.grad`` by
`runtime.autograd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopart.ir.mesh import Mesh
from autopart.ir.state import Parameter, State, Unit


class States:
    """Parameters and gradients of one rank, by unit. Flat layouts are `Unit`'s: parts along dim 0, padded on the wire."""

    def __init__(self, state: State, mesh: Mesh, rank: int, whole: Mapping[str, torch.Tensor], *, own: bool) -> None:
        """From whole tensors by name. With `own` the rank keeps nothing but its parts; otherwise parts are views."""
        self.state = state
        self.degree = mesh.degree("dp")
        self.part = mesh.coordinate(rank).get("dp", 0)
        self.gradients: dict[str, list[torch.Tensor | None]] = {}
        self.whole: dict[str, list[torch.Tensor]] = {}
        self.parts: dict[str, torch.Tensor] = {}
        column = mesh.coordinate(rank).get("pp", 0)
        self.units = {unit.name: unit for unit in state.units if column in unit.stages}
        for unit in self.units.values():
            tensors = [whole[parameter.target] for parameter in unit.parameters]
            if not unit.gathered(self.degree):
                self.whole[unit.name] = tensors
            for parameter, tensor in zip(unit.parameters, tensors, strict=True):
                part = self.cut(unit, parameter, tensor)
                self.parts[parameter.target] = part.clone() if own and unit.gathered(self.degree) else part

    def cut(self, unit: Unit, parameter: Parameter, tensor: torch.Tensor, part: int | None = None) -> torch.Tensor:
        """The part of a whole tensor that a data rank (this one by default) holds, as a view."""
        if not unit.held_in_parts(self.degree):
            return tensor
        part = self.part if part is None else part
        start, stop = parameter.rows(part, self.degree)
        return tensor[start:stop] if parameter.shape else tensor if stop > start else tensor.reshape(1)[:0]

    def packed(self, unit: Unit) -> torch.Tensor:
        """This rank's parts of a unit, flat and padded."""
        flat = [self.parts[parameter.target].reshape(-1) for parameter in unit.parameters]
        return _padded(torch.cat(flat), unit.padded(self.degree))

    def unpacked(self, unit: Unit, gathered: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Whole parameters out of every data rank's packed parts."""
        rows = gathered.view(self.degree, unit.padded(self.degree))
        if all(p.shape and p.shape[0] % self.degree == 0 for p in unit.parameters):
            columns = rows.split([p.numel // self.degree for p in unit.parameters], dim=1)
            return tuple(c.reshape(p.shape) for c, p in zip(columns, unit.parameters, strict=True))
        pieces: list[list[torch.Tensor]] = [[] for _ in unit.parameters]
        for part, row in enumerate(rows):
            sizes = [torch.Size(p.part_shape(part, self.degree)).numel() for p in unit.parameters]
            for found, piece in zip(pieces, row[: sum(sizes)].split(sizes), strict=True):
                found.append(piece)
        return tuple(torch.cat(found).view(p.shape) for found, p in zip(pieces, unit.parameters, strict=True))

    def refill(self, unit: Unit, gathered: torch.Tensor) -> None:
        """Write every data rank's packed parts into the whole parameters that this rank keeps."""
        for tensor, fresh in zip(self.whole[unit.name], self.unpacked(unit, gathered), strict=True):
            tensor.copy_(fresh)

    def scattered(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Whole gradients in wire layout: every data rank's packed part, one after the other."""
        tensors = [
            torch.zeros(p.shape, dtype=p.dtype, device=self._device(unit)) if g is None else g
            for g, p in zip(grads, unit.parameters, strict=True)
        ]
        length = unit.padded(self.degree)
        rows = [
            _padded(torch.cat([self.cut(unit, p, g, r).reshape(-1) for g, p in zip(tensors, unit.parameters, strict=True)]), length)
            for r in range(self.degree)
        ]
        return torch.cat(rows)

    def gathered_part(self, unit: Unit, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's gradient parts out of its reduced piece."""
        shapes = [p.part_shape(self.part, self.degree) for p in unit.parameters]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]

    def add(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """Add to the step's gradients of a unit."""
        kept = self.gradients.get(unit)
        if kept is None:
            self.gradients[unit] = list(grads)
            return
        for position, grad in enumerate(grads):
            mine = kept[position]
            if grad is not None:
                kept[position] = grad if mine is None else mine.add_(grad)

    def _device(self, unit: Unit) -> torch.device:
        return self.parts[unit.parameters[0].target].device

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of parameters (whole ones where they are kept, else parts) and gradients held now."""
        parameters = sum(
            sum(t.nbytes for t in self.whole[name]) if name in self.whole else sum(self.parts[p.target].nbytes for p in unit.parameters)
            for name, unit in self.units.items()
        )
        gradients = sum(g.nbytes for grads in self.gradients.values() for g in grads if g is not None)
        return {"parameters": parameters, "gradients": gradients}


def _padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
