"""``load_state_dict`` on ranks that hold parts: as ``nn.Module`` does it, tried on shapes before anything changes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from autopart.runtime.parts import agreed, gathered
from autopart.runtime.residence import Residence


def load(
    model: torch.nn.Module,
    plain: type[torch.nn.Module],
    residence: Residence,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    assign: bool,
) -> Any:
    """Load whole tensors, each rank its parts; the missing and unexpected keys. Collective.

    Raises what ``plain.load_state_dict`` raises, on every rank, before anything changes; ValueError for `assign`, and
    where ranks bring different values.
    """
    keys = agreed(residence.transport, lambda: _tried(model, plain, residence, state_dict, strict, assign))
    found = gathered(residence.transport, _digests(state_dict))
    for rank, other in enumerate(found):
        odd = sorted(name for name in {*other, *found[0]} if other.get(name) != found[0].get(name))
        if odd:
            raise ValueError(
                f"load_state_dict: {odd[0]} of rank {rank} is not that of rank 0; every rank passes the same tensors"
            )
    with torch.no_grad():
        residence.load({residence.tied[n]: tensor for n, tensor in state_dict.items() if n in residence.tied})
    rest = {name: value for name, value in state_dict.items() if name not in residence.tied}
    plain.load_state_dict(model, rest, strict=False)
    return keys


def _tried(
    model: torch.nn.Module,
    plain: type[torch.nn.Module],
    residence: Residence,
    state_dict: Mapping[str, Any],
    strict: bool,
    assign: bool,
) -> Any:
    """What loading into a copy without memory returns, or raises."""
    if assign:
        raise ValueError("load_state_dict: assign=True would replace Parameters that are parts; leave it out")
    parallel = type(model)
    try:
        model.__class__ = plain
        trial = residence.whole_copy(model)
    finally:
        model.__class__ = parallel
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        keys = trial.load_state_dict(state_dict, strict=strict)
    renamed = sorted(set(residence.tied) - set(keys.missing_keys) - set(state_dict))
    if renamed:
        raise ValueError(
            f"load_state_dict: {renamed[0]} would come from a key that a hook renames; rename the keys before loading"
        )
    return keys


def _digests(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """A digest of at most 64 Ki elements of every tensor."""
    return {name: _digest(value) for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 65536)].contiguous().cpu()
    return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if sample.numel() else ""
