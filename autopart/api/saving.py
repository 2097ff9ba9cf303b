"""`save` and `load`: a parallelised module and its optimizer to a folder and back, each rank its own parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autopart.api.module import Parallel
from autopart.draws import Draws
from autopart.runtime import checkpoint, optimizers
from autopart.runtime.checkpoint import MODEL, Checkpoint
from autopart.runtime.materialise import on_meta
from autopart.runtime.parts import Holder, Slot, agreed, gathered
from autopart.runtime.transport import Transport


def save(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> None:
    """Write a checkpoint of a parallelised module, of its optimizer, and of `more` that the caller wants back.

    Collective: every rank calls it and writes the parts that it holds; nothing is gathered. `more` holds numbers, text,
    tensors and containers of them, each rank's its own (a step count, a scheduler's ``state_dict()``, a generator's
    state). The folder, which all ranks share, keeps the checkpoint that it had until the new one is complete.

    Raises TypeError or ValueError on every rank for what cannot be saved, OSError or RuntimeError where a rank cannot
    write.
    """
    parallel = _parallel(model)
    session = parallel._autopart
    ranks = session.join()
    holder, transport = session.holder(parallel), ranks.transport

    def check() -> None:
        if on_meta(model) or session.at_placement:
            raise ValueError("save: the model has not been called since it was built or loaded; call it once first")
        checkpoint.check_plain("more", more)
        if optimizer is not None:
            checkpoint.check_plain("optimizer", {str(i): group for i, group in enumerate(_groups(optimizer, holder))})

    agreed(transport, check)
    plan = session.plan
    about = {"ranks": ranks.size, "mesh": str(plan.mesh) if plan else "", "model": plan.fingerprint if plan else ""}
    local = {name: value for name, value in parallel.local_state_dict().items() if name not in holder.tied}
    parts = list(_model_parts(holder, local, first=transport is None or transport.rank == 0))
    rest: dict[str, Any] = {
        "more": gathered(transport, more),
        "draws": asdict(session.draws) if session.draws is not None else None,
        "extra": {name: value for name, value in local.items() if not isinstance(value, torch.Tensor)},
    }
    if optimizer is not None:
        optimizers.settle(optimizer)
        held = _held(optimizer, holder)
        like = optimizers.agreed_like(holder, held, transport)
        parts += _optimizer_parts(holder, held, like)
        rest["groups"], rest["values"] = _groups(optimizer, holder), _values(holder, held, like, transport)
    checkpoint.write(Path(folder), parts, rest, about, transport)


def load(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Read a checkpoint into a parallelised module and its optimizer; what was saved beside them (`more`) is returned.

    Collective. The plan and the number of ranks may be others than those that saved. Before the first call, parameters
    on meta and, where ranks will hold parts, the optimizer's state are read at that call, when it is known which parts
    are this rank's. `more` is what this rank saved, or rank 0 if there were fewer ranks.

    Raises FileNotFoundError or ValueError, on every rank and before anything changes, where there is no checkpoint or
    it is of another model or of other parameter groups.
    """
    parallel = _parallel(model)
    session = parallel._autopart
    session.renewed()
    ranks = session.join()
    holder, transport = session.holder(parallel), ranks.transport

    def opened() -> Checkpoint:
        found = checkpoint.read(Path(folder))
        _check(found, parallel, holder)
        if optimizer is not None:
            _check_groups(found, _groups(optimizer, holder))
        return found

    found = agreed(transport, opened)
    with torch.no_grad():
        _fill(found, parallel, holder)
    draws = found.rest.get("draws")  # random numbers go on from there, if torch's seed is the same
    session.draws = Draws(**draws) if draws is not None else None
    if on_meta(model):
        session.files = found.files
    if optimizer is not None:
        _load_options(optimizer, found)
        session.at_placement.clear()

        def restore() -> None:
            _load_state(optimizer, found, session.holder(model))

        if transport is not None and session.residence is None:
            session.at_placement.append(restore)
        else:
            restore()
    saved = found.rest["more"]
    mine: dict[str, Any] = saved[transport.rank if transport is not None and transport.rank < len(saved) else 0]
    return mine


def _parallel(model: torch.nn.Module) -> Parallel:
    if not isinstance(model, Parallel):
        raise TypeError(f"expected a parallelised module, not {type(model).__name__}; its state_dict() is whole anyway")
    return model


# The module


def _model_parts(holder: Holder, local: Mapping[str, Any], *, first: bool) -> Iterator[tuple[str, Slot]]:
    """What this rank saves of parameters and buffers."""
    for name in holder.named():
        if holder.counts(name):
            yield MODEL + name, holder.slot(name)
    for name, value in local.items():
        if first and isinstance(value, torch.Tensor):
            yield MODEL + name, Slot.whole(name, value)


def _aliases(holder: Holder, name: str) -> list[str]:
    return [name] + [alias for alias, first in holder.tied.items() if first == name]


def _check(found: Checkpoint, model: Parallel, holder: Holder) -> None:
    """Refuse a checkpoint of another model."""
    local = {n: t for n, t in model.local_state_dict().items() if n not in holder.tied and isinstance(t, torch.Tensor)}
    shapes = {name: holder.slot(name).shape for name in holder.named()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in local.items()}
    where = found.files.folder.parent
    if unexpected := sorted(set(found.files.names()) - set(local) - set(holder.tied)):
        raise ValueError(f"{where}: the checkpoint holds {unexpected[0]}, which the module does not have")
    for name, shape in shapes.items():
        key = found.files.find(_aliases(holder, name))
        if key is None:
            raise ValueError(f"{where}: the checkpoint does not hold {name}")
        found.files.check_shape(key, shape)


def _fill(found: Checkpoint, model: Parallel, holder: Holder) -> None:
    """Read what is real: parameters' parts, buffers, and what else the module keeps in its state dict."""
    buffers = [Slot.whole(name, t) for name, t in model.named_buffers(remove_duplicate=False)]
    for slot in (*holder.slots(), *buffers):
        key = found.files.find(_aliases(holder, slot.name))
        if key is not None and not slot.tensor.is_meta:
            found.files.fill(slot, key)
    if found.rest["extra"]:
        model._autopart.plain.load_state_dict(model, found.rest["extra"], strict=False)


# The optimizer


def _names(optimizer: torch.optim.Optimizer, holder: Holder) -> dict[int, str]:
    """The names of an optimizer's parameters, by identity. Raises ValueError for one that is not the module's."""
    names = {id(parameter): name for name, parameter in holder.named().items()}
    for number, parameter in enumerate(optimizers.parameters_of(optimizer)):
        if id(parameter) not in names:
            raise ValueError(
                f"optimizer: its parameter {number}, of shape {list(parameter.shape)}, is not one of the module's; "
                "save each module with an optimizer over its own parameters"
            )
    return names


def _groups(optimizer: torch.optim.Optimizer, holder: Holder) -> list[dict[str, Any]]:
    """The parameter groups, with names for parameters."""
    names = _names(optimizer, holder)
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def _held(optimizer: torch.optim.Optimizer, holder: Holder) -> dict[str, dict[str, Any]]:
    names = _names(optimizer, holder)
    return {names[id(p)]: optimizer.state[p] for p in optimizers.parameters_of(optimizer) if optimizer.state.get(p)}


def _optimizer_parts(
    holder: Holder, held: Mapping[str, Mapping[str, Any]], like: frozenset[str]
) -> Iterator[tuple[str, Slot]]:
    for name, state in held.items():
        part = holder.slot(name)
        for key in like & set(state):
            if holder.counts(name):
                yield f"optimizer/{key}/{name}", Slot(name, part.elements, state[key])


def _values(
    holder: Holder, held: Mapping[str, Mapping[str, Any]], like: frozenset[str], transport: Transport | None
) -> dict[str, dict[str, Any]]:
    """What is no part of a tensor, by parameter name, from the ranks that save the parameter."""
    mine = {
        name: {key: value for key, value in state.items() if key not in like}
        for name, state in held.items()
        if holder.counts(name)
    }
    every: dict[str, dict[str, Any]] = {}
    for found in reversed(gathered(transport, mine)):
        every |= found
    return every


def _check_groups(found: Checkpoint, groups: list[dict[str, Any]]) -> None:
    where = found.files.folder.parent
    if "groups" not in found.rest:
        raise ValueError(f"{where}: the checkpoint was saved without an optimizer")
    saved = [group["params"] for group in found.rest["groups"]]
    mine = [group["params"] for group in groups]
    if len(saved) != len(mine):
        raise ValueError(f"{where}: the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(mine)}")
    for number, (one, other) in enumerate(zip(saved, mine, strict=True)):
        if odd := sorted(set(one) ^ set(other)):
            side = "the checkpoint's" if odd[0] in one else "this"
            raise ValueError(f"{where}: in parameter group {number}, {odd[0]} is in {side} optimizer only")


def _load_options(optimizer: torch.optim.Optimizer, found: Checkpoint) -> None:
    """Give the groups the options that were saved; forget the state."""
    saved = [{**group, "params": list(group["params"])} for group in found.rest["groups"]]
    groups = [
        {**given, "params": packed["params"]}
        for given, packed in zip(saved, optimizers.packed_groups(optimizer), strict=True)
    ]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


def _load_state(optimizer: torch.optim.Optimizer, found: Checkpoint, holder: Holder) -> None:
    """Read the state of every parameter that is here."""
    names = _names(optimizer, holder)
    stored: dict[str, dict[str, str]] = {}
    for path in found.files.stored:
        if path.startswith("optimizer/"):
            _, key, name = path.split("/", 2)
            stored.setdefault(name, {})[key] = path
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(optimizers.parameters_of(optimizer)):
        name = names[id(parameter)]
        if holder.here(name) and (name in stored or name in found.rest["values"]):
            part = holder.slot(name)
            state[index] = dict(found.rest["values"].get(name, {}))
            state[index] |= {key: found.files.tensor(path, part) for key, path in stored.get(name, {}).items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizers.packed_groups(optimizer)})
