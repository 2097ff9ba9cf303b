"""A constructor that was asked for on the meta device: recorded, and run again for real, part by part.

The constructor runs on fake tensors, which say that they are on the CPU, so it does what it does in a plain build.
`Construction` records its operations; `replay` runs them in their order on the CPU, from the generator's state of then:
every random number is the one that a plain build with the same seed draws. A storage has memory from an operation that
gives all of it new values to the last one before the next such: what is alive at once is about one parameter, unless
the constructor itself mixes more. Random operations whose values are overwritten later run all the same, for the
generator's sake.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart import _torch

OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "log_normal_", "exponential_", "bernoulli_"})
"""Operators in place that give every element a value without looking at the old one."""


OWN_GENERATOR = "it draws from a generator of its own, whose state of then is not known"


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a window on a storage, which goes by its key."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """That of a fake tensor."""
        key, offset = _torch.storage_key(tensor), int(tensor.storage_offset())
        return cls(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same window on a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Constant:
    """A real tensor that took part, and its version then."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Step:
    """An operation: `results` are the views of new storages in its flat results, None elsewhere.

    `touched` are the storages that it reads or writes, `fresh` those of them that it gives new values as a whole.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    touched: frozenset[int]
    fresh: frozenset[int]
    dtype: torch.dtype  # the default one of the moment
    random: bool


@dataclass(frozen=True, slots=True)
class Final:
    """A parameter or buffer as the constructor left it, and the tensor on meta that stands for it."""

    tensor: torch.Tensor
    view: View
    version: int


class Construction:
    """What a constructor did. `trouble` says why it cannot be run again, "" if it can."""

    def __init__(self) -> None:
        self.generator = torch.get_rng_state()
        self.trouble = ""
        self._steps: list[Step] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no key is used twice
        self._finals: dict[str, Final] = {}

    @contextlib.contextmanager
    def recording(self, module: torch.nn.Module) -> Iterator[None]:
        """Record what the constructor of `module` does within; afterwards its tensors are on meta."""
        with warnings.catch_warnings(), _torch.truncated_normal_by(self._truncated_normal):
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            with torch.device("cpu"), _torch.fake_mode(), _Recorder(self):
                yield
        views = {name: View.of(tensor) for name, tensor in _held(module).items() if _torch.is_fake(tensor)}
        _to_meta(module)
        held = _held(module)
        self._finals = {name: Final(held[name], view, held[name]._version) for name, view in views.items()}

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record one operation, unless it computes nothing (a view)."""
        results = [x if _is_fake(x) else None for x in _torch.pytree.tree_leaves(out)]
        leaves = _torch.pytree.tree_leaves((args, kwargs))
        given = [x for x in leaves if _is_fake(x)]
        random = torch.Tag.nondeterministic_seeded in operator.tags
        if any(isinstance(x, torch.Generator) for x in leaves):
            self.trouble = OWN_GENERATOR
        if any(_torch.storage_key(x) not in self._storages for x in given):
            self.trouble = "it uses a tensor without values that was made before"
        new = tuple(None if x is None or _torch.storage_key(x) in self._storages else View.of(x) for x in results)
        if not any(new) and not _torch.is_mutable(operator):
            return
        found = [x for x in (*given, *results) if x is not None]
        self._storages |= {_torch.storage_key(x): x.untyped_storage() for x in found}
        overwrites = _name(operator) in OVERWRITING and _covers(args[0])
        seen_args, seen_kwargs = _torch.pytree.tree_map(_recorded, (args, kwargs))
        self._steps.append(
            Step(
                operator,
                seen_args,
                seen_kwargs,
                new,
                frozenset(map(_torch.storage_key, found)),
                frozenset({_torch.storage_key(args[0])} if overwrites else {v.key for v in new if v is not None}),
                torch.get_default_dtype(),
                random,
            )
        )

    def _truncated_normal(self, draw: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record a draw that goes on until its values are within bounds, as one operation."""
        if not _torch.is_fake(tensor):
            return draw(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            self.trouble = OWN_GENERATOR
        view = View.of(tensor)
        fresh = frozenset({view.key} if _covers(tensor) else ())
        step = Step(
            draw, (view, *args), kwargs, (None,), frozenset({view.key}), fresh, torch.get_default_dtype(), random=True
        )
        self._steps.append(step)
        return tensor

    def value(self, tensor: torch.Tensor) -> Any:
        """The number that a fake tensor stands for. Raises ValueError where it was drawn at random."""
        view = View.of(tensor)
        steps = self._needed({view.key})
        if any(step.random for step in steps):
            raise ValueError(
                "the constructor looks at a value that it drew at random, which is not known on meta; build the module "
                "on a real device, or draw with Python's random"
            )
        real: dict[int, torch.UntypedStorage] = {}
        with _torch.without_modes():
            for step in steps:
                self._run(step, real)
            return view.on(real[view.key]).item()

    def misses(self, name: str, tensor: torch.Tensor) -> str:
        """Why the initial value of a tensor on meta is not known, "" if it is."""
        final = self._finals.get(name)
        if final is None or final.view.size != tuple(tensor.shape) or not _same(final, tensor):
            return "was put there after the constructor had ended"
        if self.trouble:
            return f"was made by a constructor that cannot be run again: {self.trouble}"
        if tensor is final.tensor and tensor._version != final.version:
            return "was changed after the constructor had ended, which has no effect on meta"
        if not any(final.view.key in step.touched and not _only_memory(step) for step in self._steps):
            return "is never given a value by the constructor"
        return ""

    def replay(self, sinks: Sequence[tuple[str, Callable[[torch.Tensor], None]]], state: torch.Tensor) -> None:
        """Run the constructor again from the generator's `state`, handing each tensor's initial value to its sink.

        The value is whole, on the CPU, in the constructor's dtype, and is gone after the sink returns.
        """
        finals = [(self._finals[name].view, sink) for name, sink in sinks]
        steps = self._needed({view.key for view, _ in finals})
        over, last = _ends(steps)
        real: dict[int, torch.UntypedStorage] = {}
        before = torch.get_default_dtype()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
                torch.set_rng_state(state)
                for index, step in enumerate(steps):
                    self._run(step, real)
                    for view, sink in finals:
                        if last.get(view.key) == index:
                            sink(view.on(real[view.key]))
                    for key in over[index]:
                        del real[key]
        finally:
            torch.set_default_dtype(before)

    def copied(self, memo: Mapping[int, Any]) -> Construction:
        """That of a copy of the module, whose tensors `memo` knows by the identity of the first one's."""
        made = copy.copy(self)
        made._finals = {}
        for name, final in self._finals.items():
            other = memo.get(id(final.tensor))
            if other is not None and final.tensor._version == final.version:
                made._finals[name] = replace(final, tensor=other, version=other._version)
        return made

    def _needed(self, keys: set[int]) -> list[Step]:
        """The steps on which some storages depend; all of them if one of those is random."""
        needed, kept = set(keys), []
        for step in reversed(self._steps):
            if step.touched & needed:
                needed |= step.touched
                kept.append(step)
        return list(self._steps) if any(step.random for step in kept) else kept[::-1]

    def _run(self, step: Step, real: dict[int, torch.UntypedStorage]) -> None:
        made = {view.key for view in step.results if view is not None}
        for key in step.fresh - set(real) - made:
            real[key] = _memory(self._storages[key].nbytes())

        def to_real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return leaf.on(real[leaf.key])
            if isinstance(leaf, Constant):
                if leaf.tensor._version != leaf.version:
                    raise ValueError(
                        "weights: a tensor from which the constructor took initial values was changed since"
                    )
                return leaf.tensor
            return leaf

        torch.set_default_dtype(step.dtype)
        args, kwargs = _torch.pytree.tree_map(to_real, (step.args, step.kwargs))
        for view, result in zip(step.results, _torch.pytree.tree_leaves(step.operator(*args, **kwargs)), strict=True):
            if view is not None:
                real[view.key] = _stored_as(view, result, self._storages[view.key].nbytes())


class _Recorder(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, construction: Construction) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._construction = construction

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            return self._construction.value(args[0])
        out = func(*args, **(kwargs or {}))
        self._construction.note(func, args, kwargs or {}, out)
        return out


def _memory(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


def _is_fake(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and _torch.is_fake(leaf)


def _same(final: Final, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the one that the constructor left; conversions of dtype make other buffers of it."""
    converted = not isinstance(tensor, torch.nn.Parameter) and tensor.dtype != final.tensor.dtype
    return tensor is final.tensor or converted


def _to_meta(module: torch.nn.Module) -> None:
    """Put tensors on meta in place of fake ones, with the attributes that they were given."""
    own = {*vars(_torch.fake_mode().from_tensor(torch.empty(0))), "_is_param"}
    made: dict[int, torch.Tensor] = {}

    def on_meta(fake: torch.Tensor) -> torch.Tensor:
        if id(fake) not in made:
            size, stride = tuple(fake.shape), fake.stride()
            empty = torch.empty_strided(size, stride, dtype=fake.dtype, device="meta")
            if isinstance(fake, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=fake.requires_grad)
            empty.__dict__.update({name: value for name, value in vars(fake).items() if name not in own})
            made[id(fake)] = empty
        return made[id(fake)]

    for part in module.modules():
        for registry in (part._parameters, part._buffers, part.__dict__):
            registry |= {name: on_meta(t) for name, t in registry.items() if t is not None and _is_fake(t)}


def _recorded(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return View.of(leaf) if _torch.is_fake(leaf) else Constant(leaf, leaf._version)


def _covers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has every byte of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _name(operator: Any) -> str:
    packet = getattr(operator, "overloadpacket", None)
    return str(packet.__name__) if packet is not None else ""


def _only_memory(step: Step) -> bool:
    return _name(step.operator) in ("empty", "empty_like", "new_empty", "empty_strided")


def _ends(steps: Sequence[Step]) -> tuple[list[list[int]], dict[int, int]]:
    """After each step, the storages whose values are looked at no more; and the last step that touches each storage."""
    over: list[list[int]] = [[] for _ in steps]
    following: dict[int, Step] = {}
    last: dict[int, int] = {}
    for index in reversed(range(len(steps))):
        for key in sorted(steps[index].touched):
            last.setdefault(key, index)
            if key not in following or key in following[key].fresh:
                over[index].append(key)
            following[key] = steps[index]
    return over, last


def _stored_as(view: View, result: torch.Tensor, nbytes: int) -> torch.UntypedStorage:
    """The storage of a result, laid out as it was on meta."""
    storage = result.untyped_storage()
    same = tuple(result.shape), result.stride(), result.storage_offset(), storage.nbytes()
    if same == (view.size, view.stride, view.offset, nbytes):
        return storage
    storage = _memory(nbytes)
    view.on(storage).copy_(result)
    return storage
