"""Deep copies of a model that were made before its parameters became parts, as an average of weights is."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from autopart.runtime.transport import Transport


class Copies:
    """The model that a session belongs to, and the copies made of it; none is kept alive by this."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = weakref.ref(model)
        self.made: list[weakref.ref[torch.nn.Module]] = []

    def copied(self, memo: dict[int, Any]) -> Copies:
        """Those of the copy of the model that is being made by ``copy.deepcopy``, whose `memo` knows it."""
        twin = memo[id(self.model())]  # deepcopy notes it before it copies attributes, this one among them
        self.made.append(weakref.ref(twin))
        return Copies(twin)

    def take(self, transport: Transport) -> list[torch.nn.Module]:
        """The copies that every rank still has and that have the model's parameters; collective, once."""
        model, made = self.model(), [ref() for ref in self.made]
        self.made = []
        assert model is not None
        mine = {i for i, twin in enumerate(made) if twin is not None and _names(twin) == _names(model)}
        every = transport.all_gather_object(mine, tuple(range(transport.size)))
        return [twin for i, twin in enumerate(made) if twin is not None and all(i in found for found in every)]


def _names(model: torch.nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, p.shape, p.dtype) for name, p in model.named_parameters(remove_duplicate=False)]
