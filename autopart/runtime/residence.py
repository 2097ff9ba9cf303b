"""The user's parameters as parts: cut to what a rank holds, and brought together again on request."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any

import torch

from autopart.errors import AutopartError
from autopart.ir.elements import Elements
from autopart.ir.mesh import Mesh
from autopart.ir.state import Parameter, State, Unit
from autopart.runtime.parts import Slot
from autopart.runtime.states import States, counts, cut, elements
from autopart.runtime.transport import Transport


class Spread(Enum):
    """How a parameter lies on the ranks, in words that go before its name."""

    WHOLE = "every rank has"
    PARTS = "each rank has a part of"
    PIECES = "each place of a mesh axis has a piece of"
    SOMEWHERE = "not every rank has"


class Residence:
    """Where a module's parameters are on this rank, whose program has `state`.

    Other ranks' states may have other pieces of the same parameters. Making it is collective: parameters and buffers
    take rank 0's values, and each parameter's data become this rank's part. The Parameter objects stay, so an optimizer
    made before keeps working. One on meta becomes real here, part by part, and holds nothing yet
    (`runtime.materialise` fills it). Raises AutopartError where pieces do not make up their parameter.
    """

    def __init__(
        self, model: torch.nn.Module, transport: Transport, mesh: Mesh, state: State, tied: Mapping[str, str]
    ) -> None:
        self.transport, self.mesh, self.state, self.tied = transport, mesh, state, dict(tied)
        self.part = mesh.coordinate(transport.rank).get("dp", 0)
        self.column = mesh.coordinate(transport.rank).get("pp", 0)
        self.degree = mesh.width(self.column)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.whole: dict[str, torch.Tensor] = {}
        self.trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        self.everyone = tuple(range(transport.size))
        self._homes: dict[str, tuple[Unit, Parameter]] = {}
        for unit in state.units:
            for p in unit.parameters:  # of one that pp ranks have a part of each, this rank's
                if p.name not in self._homes or self.column in unit.columns:
                    self._homes[p.name] = unit, p
        transport.prepare(self._groups())
        self._check_pieces()
        for buffer in model.buffers():
            if not buffer.is_meta:
                buffer.data = self._from_first(buffer.data)
        for name, mine in self.named().items():
            if not mine.is_meta:
                mine.data = self._from_first(mine.data)
            elif name not in self._homes:
                become(mine, torch.empty_like(mine, device=transport.device))
            if name in self._homes:
                self._place(*self._homes[name])

    def _groups(self) -> list[tuple[int, ...]]:
        """Every group that programs over this state use, in one order on every rank."""
        groups = [self.mesh.group(rank, axis) for axis in self.mesh.names for rank in self.everyone]
        for columns in dict.fromkeys(unit.columns for unit in self.state.units if len(unit.columns) > 1):
            for rank in self.everyone:
                place = self.mesh.coordinate(rank)
                if place.get("dp", 0) < self.mesh.width(columns[0]):  # columns that share a unit are of one width
                    groups.append(tuple(sorted(self.mesh.rank({**place, "pp": column}) for column in columns)))
        return [group for group in dict.fromkeys(groups) if len(group) > 1]

    def _check_pieces(self) -> None:
        """Raise AutopartError unless the ranks that count have as many elements as each parameter. Collective."""
        if not self.mesh.inside:
            return
        mine = {name: self._elements(name).count for name in self._homes if self.counts(name)}
        every = self.transport.all_gather_object(mine, self.everyone)
        for name, (_, parameter) in self._homes.items():
            there, wanted = sum(found.get(name, 0) for found in every), prod(parameter.module_shape)
            if there != wanted:
                raise AutopartError(f"parameter {name}: its pieces have {there} elements in all, but it has {wanted}")

    def _from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.transport.device)
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self.transport.broadcast(tensor, 0, self.everyone)
        return tensor

    def _place(self, unit: Unit, parameter: Parameter) -> None:
        """Make the user's Parameter what this rank has of it; remember the whole where it is kept."""
        mine = self.parameters[parameter.name]
        made = self._held(unit, parameter, mine)
        mine.grad = None
        if mine.is_meta:
            become(mine, made)
        else:
            mine.data = made

    def _held(self, unit: Unit, parameter: Parameter, mine: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter: values of `mine`, or memory for them where that is on meta."""
        if self.column not in unit.columns or unit.gathered(self.degree):
            return self._made(self._elements(parameter.name), mine)
        whole = self.whole[parameter.target] = self._made(parameter.elements, mine)
        return cut(unit, parameter, whole, self.part, self.degree)

    def _made(self, here: Elements, mine: torch.Tensor) -> torch.Tensor:
        """Some elements of the tensor `mine`, which keep no memory of others."""
        if here.everything and not mine.is_meta:
            return mine.data
        made = torch.empty(here.local, dtype=mine.dtype, device=self.transport.device)
        if not mine.is_meta:
            Slot("", here, made).fill(mine.data)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Residence:
        """That of a copy of the module, whose parameters `memo` knows."""
        made = copy.copy(self)
        made.parameters = {name: copy.deepcopy(parameter, memo) for name, parameter in self.parameters.items()}
        made.whole = {name: tensor.clone() for name, tensor in self.whole.items()}
        for name, (unit, parameter) in self._homes.items():
            if parameter.target in made.whole:
                made.parameters[name].data = cut(unit, parameter, made.whole[parameter.target], self.part, self.degree)
        return made

    def check(self, model: torch.nn.Module) -> None:
        """Raise ValueError where the module's parameters are no longer those that were cut."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters.values())
        dtypes = {p.name: p.dtype for unit in self.state.units for p in unit.parameters}
        for name in dict.fromkeys([*parameters, *self.parameters]):
            mine = parameters.get(name)
            if mine is None or mine is not self.parameters.get(name):
                what = "is another tensor than"
            elif mine.dtype != dtypes.get(self.tied.get(name, name), mine.dtype):
                what = f"is {mine.dtype}, which it was not"
            elif trains and mine.requires_grad != self.trained[name]:
                what = f"{'requires' if mine.requires_grad else 'does not require'} grad, unlike"
            else:
                continue
            raise ValueError(
                f"parameter {name} {what} at the first call, when it was placed on the ranks; change the module before "
                "that, or parallelize a new one that loads this one's full_state_dict()"
            )

    def states(self) -> States:
        """The state for one step."""
        parts = {parameter.target: self.parameters[name].data for name, (_, parameter) in self._homes.items()}
        return States(self.state, self.mesh, self.transport.rank, parts, self.whole)

    # What is here of each parameter (`runtime.parts.Holder`)

    def named(self) -> dict[str, torch.nn.Parameter]:
        """The user's Parameters by their first names."""
        return {name: self.parameters[name] for name in dict.fromkeys(self.tied.values())}

    def slot(self, name: str) -> Slot:
        """What the user's Parameter has here."""
        data = self.parameters[name].data
        if name not in self._homes:
            return Slot.whole(name, data)
        return Slot(name, self._elements(name), data)

    def _elements(self, name: str) -> Elements:
        """What the user's Parameter has here, of one that some segment uses."""
        return elements(*self._homes[name], self.mesh, self.transport.rank)

    def slots(self) -> list[Slot]:
        """Where values of parameters belong on this rank: what it keeps beside the user's Parameters, else those."""
        kept = {
            name: Slot(name, parameter.elements, self.whole[parameter.target])
            for name, (_, parameter) in self._homes.items()
            if parameter.target in self.whole
        }
        every = [kept.get(name) or self.slot(name) for name in self.named()]
        return [slot for slot in every if slot.elements.count]

    def here(self, name: str) -> bool:
        """Whether a stage of this rank uses a parameter (its part may have no elements)."""
        return name not in self._homes or self.column in self._homes[name][0].columns

    def counts(self, name: str) -> bool:
        """Whether this rank is the one whose elements stand for themselves: the first of those that have them."""
        found = self._homes.get(name)
        return self.transport.rank == 0 if found is None else counts(*found, self.mesh, self.transport.rank)

    def spread(self, name: str) -> Spread:
        """How a parameter lies on the ranks of the world."""
        if name not in self._homes:
            return Spread.WHOLE
        unit, parameter = self._homes[name]
        if parameter.pieces:
            return Spread.PIECES
        if unit.held_in_parts(self.mesh.width(unit.columns[0])):
            return Spread.PARTS
        return Spread.WHOLE if set(range(self.mesh.degree("pp"))) <= set(unit.columns) else Spread.SOMEWHERE

    # What is known together (collective)

    def sum_over_world(self, number: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """The sum (or the largest) of a number over all ranks."""
        every = self.transport.all_gather_object(float(number), self.everyone)
        total = max(every, key=lambda x: (x != x, x)) if largest else sum(every)
        return torch.tensor(total, dtype=torch.float64, device=self.transport.device)

    def gather(self, held: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Whole CPU tensors out of what every rank holds of each parameter (values or gradients); collective.

        A parameter of which no rank that owns it holds anything is left out. Dtypes are those of what is held.
        """
        mine = {
            name: (tensor.dtype, self._elements(name))
            for name in self._homes
            if (tensor := held.get(name)) is not None and self.counts(name)
        }
        known = self.transport.all_gather_object(mine, self.everyone)
        result: dict[str, torch.Tensor] = {}
        for name in self.named():
            tensor = held.get(name)
            if name in self._homes:
                parts = [(rank, *found[name]) for rank, found in enumerate(known) if name in found]
                if parts:
                    result[name] = self._joined(tensor, parts).cpu()
            elif tensor is not None:
                result[name] = tensor.detach().cpu().clone()
        return result

    def _joined(self, mine: torch.Tensor | None, parts: Sequence[tuple[int, torch.dtype, Elements]]) -> torch.Tensor:
        """A whole tensor out of parts, each with the rank that has it; `mine` is this rank's, if it has one."""
        _, dtype, some = parts[0]
        whole = torch.empty(some.shape, dtype=dtype, device=self.transport.device)
        for rank, _, here in parts:
            if rank == self.transport.rank:
                assert mine is not None
                part = mine.detach().contiguous().clone()
            else:
                part = torch.empty(here.local, dtype=dtype, device=self.transport.device)
            if part.numel():
                self.transport.broadcast(part, rank, self.everyone)
                Slot("", here, part).put(whole)
        return whole

    def load(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Write whole tensors, by parameter name, into what this rank holds of them."""
        for slot in self.slots():
            if slot.name in whole:
                slot.fill(whole[slot.name])

    def whole_copy(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module with parameters of whole shapes on meta, for tracing and for trying things out: no memory."""
        memo: dict[int, object] = {}
        for name, mine in self.parameters.items():
            found = self._homes.get(self.tied.get(name, name))
            if found is not None and id(mine) not in memo:
                empty = torch.empty(found[1].module_shape, dtype=mine.dtype, device="meta")
                memo[id(mine)] = torch.nn.Parameter(empty, requires_grad=mine.requires_grad)
        session = model.__dict__.pop("_autopart")
        try:
            return copy.deepcopy(model, memo)
        finally:
            model.__dict__["_autopart"] = session


def become(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Make a tensor on meta the real one `made`: the same Python object, so optimizers and modules keep it."""
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
