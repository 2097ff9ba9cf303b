"""Parameters and buffers on meta made real, part by part: from files, or as the constructor would have made them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from autopart.capture.trace import Names
from autopart.runtime.construction import Construction
from autopart.runtime.parts import Slot, gathered
from autopart.runtime.residence import become
from autopart.runtime.transport import Transport
from autopart.runtime.weights import Files

ELSEWHERE = "is not known, as its constructor ran elsewhere"
ADVICE = (
    "pass weights= (a safetensors file or folder), or let autopart see the constructor run: decorate the class, or "
    "call autopart.parallelize(Class, ...)(arguments) under torch.device('meta')"
)


class Materials:
    """Where the value of everything that a module has on meta will come from: checked when it is made, used once.

    Everything comes from `files` where they have it. Buffers that they lack, and all of it without `files`, come from
    the `construction`. Raises ValueError for a tensor without a value, for one of another shape, and for a tensor in
    `files` that the module lacks.
    """

    def __init__(self, model: torch.nn.Module, files: Files | None, construction: Construction | None) -> None:
        self._files, self._construction = files, construction
        self._aliases, self._on_meta = _named(model)
        _refuse_attributes(model)
        if files is not None:
            known = {alias for names in self._aliases.values() for alias in names}
            if unexpected := sorted(set(files.names()) - known):
                raise ValueError(f"weights: {files.folder} holds {unexpected[0]}, which the module does not have")
        for name, tensor in self._on_meta.items():
            self._check(name, tensor)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if self._files is not None:
            found = self._files.find(self._aliases[name])
            if found is not None:
                self._files.check_shape(found, tuple(tensor.shape))
                return
            if isinstance(tensor, torch.nn.Parameter):
                raise ValueError(f"weights: {self._files.folder} does not hold {name}, which is on meta")
        why = ELSEWHERE if self._construction is None else self._construction.misses(name, tensor)
        if why:
            raise ValueError(f"{name} is on meta, and its initial value {why}; {ADVICE}")

    def fill(self, slots: Sequence[Slot], device: torch.device, transport: Transport | None) -> None:
        """Write values into the `slots` of parameters that were on meta; make buffers real, and write theirs.

        Collective: initial values are those of rank 0's generator.
        """
        wanted = [slot for slot in slots if slot.name in self._on_meta]
        for name, tensor in self._on_meta.items():
            if not isinstance(tensor, torch.nn.Parameter):
                become(tensor, torch.empty_like(tensor, device=device))
                wanted.append(Slot.whole(name, tensor))
        state = gathered(transport, self._construction.generator if self._construction is not None else None)[0]
        sinks: list[tuple[str, Callable[[torch.Tensor], None]]] = []
        with torch.no_grad():
            for slot in wanted:
                found = self._files.find(self._aliases[slot.name]) if self._files is not None else None
                if found is not None and self._files is not None:
                    self._files.fill(slot, found)
                else:
                    sinks.append((slot.name, slot.fill))
            if self._construction is not None and self._missing():
                self._construction.replay(sinks, state)

    def _missing(self) -> bool:
        """Whether anything at all comes from the constructor, on whatever rank."""
        return any(self._files is None or self._files.find(self._aliases[name]) is None for name in self._on_meta)


def on_meta(model: torch.nn.Module) -> bool:
    """Whether a module has a parameter or buffer on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def make_whole(model: torch.nn.Module, device: torch.device) -> None:
    """Give every parameter on meta memory for the whole of it, where all ranks share this process."""
    for parameter in model.parameters():
        if parameter.is_meta:
            become(parameter, torch.empty_like(parameter, device=device))


def _named(model: torch.nn.Module) -> tuple[dict[str, tuple[str, ...]], dict[str, torch.Tensor]]:
    """Every name of each parameter and buffer by its first one; and those on meta by their first name."""
    first = dict(Names.of(model).tied)
    seen: dict[int, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        first[name] = seen.setdefault(id(buffer), name)
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    for name, canonical in first.items():
        aliases[canonical].append(name)
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {n: tuple(names) for n, names in aliases.items()}, {n: held[n] for n in aliases if held[n].is_meta}


def _refuse_attributes(model: torch.nn.Module) -> None:
    """Raise ValueError for a tensor on meta that is a plain attribute: nothing says where its value comes from."""
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                where = f"{path}.{name}" if path else name
                raise ValueError(
                    f"{where} is a tensor on meta that is neither a parameter nor a buffer; register it as a buffer, "
                    "or make it on a real device"
                )
