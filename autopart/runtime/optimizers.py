"""An optimizer whose parameters are parts: its state is parts too here, and whole in its ``state_dict()``.

Two things keep the user's ordinary lines right. Before a step, state that was loaded whole is cut to this rank's part.
From the first step on, ``optimizer.state_dict()`` is collective and gives what one device would: whole tensors, on the
CPU. A state tensor is cut like its parameter if it has its shape; others (step counters) are the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from autopart.runtime import holders
from autopart.runtime.parts import Holder, gathered
from autopart.runtime.residence import Residence
from autopart.runtime.transport import Transport

State = Mapping[str, Mapping[str, Any]]
"""What an optimizer keeps, by parameter name and then by key."""

# Optimizers belong to the process, and so do the hooks on them: for each, the state object that is known to be parts,
# how many models there were then, and whether its state dict is whole.
_KNOWN: weakref.WeakKeyDictionary[Optimizer, tuple[Any, int, bool]] = weakref.WeakKeyDictionary()


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in the order of the indices in ``state_dict()``, each once."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in found}.values())


def like_parameters(held: State, holder: Holder) -> frozenset[str]:
    """The keys whose tensors have, for every parameter, the shape of the part here or that of the whole."""
    unlike = set()
    for name, state in held.items():
        part = holder.slot(name)
        for key, value in state.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if shape not in (tuple(part.tensor.shape), part.shape):
                unlike.add(key)
    return frozenset({key for state in held.values() for key in state} - unlike)


def agreed_like(holder: Holder, held: State, transport: Transport | None) -> frozenset[str]:
    """The keys of tensors that are cut like their parameters (`like_parameters`), as all ranks find. Collective."""
    like = like_parameters(held, holder)
    keys = {key for state in held.values() for key in state}
    found = gathered(transport, (sorted(like), sorted(keys - like)))
    return frozenset({key for yes, _ in found for key in yes} - {key for _, no in found for key in no})


def packed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as in ``state_dict()``: indices for parameters."""
    index = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    return [{**group, "params": [index[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def settle(optimizer: Optimizer) -> None:
    """Make state that was loaded, or made, whole this rank's parts; from now on its ``state_dict()`` is whole."""
    known = _KNOWN.get(optimizer)
    if known is not None and known[0] is optimizer.state and known[1] == holders.count():
        return
    hooked = known is not None and known[2]
    for residence, named in _homes(optimizer):
        _cut(optimizer, residence, named)
        if not hooked:
            optimizer.register_state_dict_post_hook(_whole)
            hooked = True
    _KNOWN[optimizer] = optimizer.state, holders.count(), hooked


def _homes(optimizer: Optimizer) -> Iterator[tuple[Residence, dict[str, tuple[int, torch.Tensor]]]]:
    """The models that an optimizer's parameters are of, each with {name: (index, parameter)}, in its order."""
    parameters = parameters_of(optimizer)
    found: dict[Residence, dict[str, tuple[int, torch.Tensor]]] = {}
    for index, (parameter, held) in enumerate(zip(parameters, holders.holders_of(parameters), strict=True)):
        if held is not None:
            found.setdefault(held[0], {})[held[1]] = index, parameter
    return iter(found.items())


def _cut(optimizer: Optimizer, residence: Residence, named: Mapping[str, tuple[int, torch.Tensor]]) -> None:
    """Cut what is whole to this rank's parts; forget the state of parameters that are not here."""
    held = {name: optimizer.state[p] for name, (_, p) in named.items() if optimizer.state.get(p)}
    like = like_parameters(held, residence)
    for name, state in held.items():
        part = residence.slot(name)
        if not residence.here(name):
            del optimizer.state[named[name][1]]
            continue
        for key in like & set(state):
            if tuple(state[key].shape) != tuple(part.tensor.shape):
                state[key] = part.elements.of(state[key]).clone()


def _whole(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict that one device would have. Collective."""
    state = dict(state_dict["state"])
    for residence, named in _homes(optimizer):
        _cut(optimizer, residence, named)
        held = {name: optimizer.state[p] for name, (_, p) in named.items() if optimizer.state.get(p)}
        for name, whole in _brought_together(residence, held).items():
            state[named[name][0]] = whole
    return {**state_dict, "state": {index: state[index] for index in sorted(state)}}


def _brought_together(residence: Residence, held: State) -> dict[str, dict[str, Any]]:
    """Whole state by parameter name, out of what every rank holds."""
    like = sorted(agreed_like(residence, held, residence.transport))
    others = {
        name: {key: _on_cpu(value) for key, value in state.items() if key not in like}
        for name, state in held.items()
        if residence.counts(name)
    }
    every: dict[str, dict[str, Any]] = {}
    for found in reversed(residence.transport.all_gather_object(others, residence.everyone)):
        every |= found
    for key in like:
        for name, tensor in residence.gather({name: state.get(key) for name, state in held.items()}).items():
            every.setdefault(name, {})[key] = tensor
    return every


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
