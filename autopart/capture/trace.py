"""What both capture routes hand on: a joint FX graph at one batch size and what its inputs and outputs are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart import _torch
from autopart.capture.annotate import is_user_file
from autopart.capture.call import Call
from autopart.capture.decompositions import table
from autopart.capture.randomness import opened
from autopart.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Trace:
    """A joint graph at one batch size.

    Where there is no loss, the outputs that require grad are `copied`.

    `inputs` gives (kind, target, tensor) of each primal placeholder, in order; `outputs` the kind, "loss" or "output",
    of each of the graph's first outputs, gradients follow. `result` and `tree` rebuild the user's return value (see
    `Captured`), with ``("output", i)`` for output i and ``("input", path)`` for an input handed back.
    """

    graph: torch.fx.GraphModule
    batch: int
    inputs: tuple[tuple[str, str, torch.Tensor], ...]
    outputs: tuple[str, ...]
    result: tuple[tuple[str, Any], ...]
    tree: Any
    training: bool


@dataclass(frozen=True, slots=True)
class Traced:
    """One call traced at one batch size: by one trace, or where `blocks` are equal by one with three of them and one
    with four (see `repeat`).

    `blocks` are the paths of their modules. `whole` makes the one trace of all of them.
    """

    traces: tuple[Trace, ...]
    blocks: tuple[str, ...]
    whole: Callable[[], Trace]

    @classmethod
    def of(cls, trace: Trace) -> Traced:
        """What is one trace."""
        return cls((trace,), (), lambda: trace)


@dataclass(frozen=True, slots=True)
class Names:
    """Canonical names: parameters and buffers by identity, so that tied ones have one name.

    `tensors` has each parameter once, in the module's order; `tied` maps every name to its canonical one. `modules`
    maps the further names of a module that has several to its first.
    """

    parameters: Mapping[int, str]
    buffers: Mapping[int, str]
    tensors: Mapping[str, torch.Tensor]
    tied: tuple[tuple[str, str], ...]
    modules: Mapping[str, str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Names:
        """The names in `module`, the first of a tied pair being its name.

        Raises CaptureError where parameters share memory without being the same tensor (one a view of the other).
        """
        parameters: dict[int, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        first: dict[Any, str] = {}
        tied: list[tuple[str, str]] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            canonical = first.setdefault(identity(parameter), name)
            parameters[id(parameter)] = canonical
            tensors.setdefault(canonical, parameter)
            tied.append((name, canonical))
        _refuse_overlap(tensors)
        buffers: dict[int, str] = {}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            buffers.setdefault(id(buffer), name)
        firsts = {id(part): name for name, part in module.named_modules()}
        everywhere = module.named_modules(remove_duplicate=False)
        modules = {name: firsts[id(part)] for name, part in everywhere if firsts[id(part)] != name}
        return cls(parameters, buffers, tensors, tuple(tied), modules)


def identity(tensor: torch.Tensor) -> Any:
    """Same storage, same layout: the same parameter, even behind two objects.

    A tensor without storage is only itself.
    """
    if not _has_memory(tensor):
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.is_meta and not _torch.is_fake(tensor)


def _refuse_overlap(tensors: Mapping[str, torch.Tensor]) -> None:
    """Two views of one memory are updated together by an optimizer, but not when they lie on two ranks."""
    spans = []
    for name, tensor in tensors.items():
        if _has_memory(tensor):
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), name))
    for (_, end, one), (start, _, two) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise CaptureError(
                f"the parameters {one} and {two} share memory but are not the same tensor (a transpose or a slice); "
                "tie them by using one Parameter in both places, and transpose or slice it in forward"
            )


def is_container(value: Any) -> bool:
    """Whether a value is a plain container that the result may hold (Hugging Face's outputs are dictionaries)."""
    return isinstance(value, list | tuple | dict)


def flatten_result(value: Any, loss: Any) -> tuple[list[Any], Any]:
    """Leaves and tree of a return value; anything that is no plain container is a leaf.

    Raises CaptureError where that hides the loss, or everything.
    """
    leaves, tree = _torch.pytree.tree_flatten(value, is_leaf=lambda x: not is_container(x))
    hidden = loss is not None and not any(leaf is loss for leaf in leaves)
    opaque = not is_container(value) and not isinstance(value, torch.Tensor) and plain_leaf(value)[1] is not value
    if hidden or opaque:
        raise CaptureError(
            f"forward returns a {type(value).__name__}, which cannot be taken apart and rebuilt; return a tensor, or "
            "a tuple, list or dict of tensors"
        )
    return leaves, tree


def find_loss(value: Any, grads: Callable[[Any], bool]) -> Any:
    """The loss in a return value, None if there is none: the value itself, ``.loss``/``["loss"]``, or a first element.

    `grads` says whether a tensor requires grad in the traced program.
    """

    def scalar(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dim() == 0

    if scalar(value):
        return value
    named = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    if scalar(named):
        return named
    if isinstance(value, list | tuple) and value and scalar(value[0]) and grads(value[0]):
        return value[0]
    return None


def keeps_gradients(module: torch.nn.Module, call: Call) -> bool:
    """Whether outputs stay differentiable where there is no loss: in training, or for inputs that require grad."""
    return torch.is_grad_enabled() and (module.training or bool(call.wanted()))


def copied(output: torch.Tensor) -> torch.Tensor:
    """An output that is no view of another and contiguous, as its gradient will be when it comes from outside."""
    return output.clone(memory_format=torch.contiguous_format)


def plain_leaf(leaf: Any) -> tuple[str, Any]:
    """A leaf of the result that is no tensor: a number, text or None comes back, another object (a cache) as None."""
    return "literal", leaf if isinstance(leaf, bool | int | float | str) else None


def held_tensor() -> CaptureError:
    """The refusal of a result that the call did not compute."""
    return CaptureError(
        "forward returns a tensor that the call neither computed nor was given (a parameter, a buffer or another "
        "tensor that the module holds); return a copy of it, such as tensor.clone(), or leave it out of the result"
    )


def joint(graph: torch.nn.Module, inputs: tuple[torch.Tensor, ...], module: torch.nn.Module) -> torch.fx.GraphModule:
    """The joint aten graph of ``graph(*inputs)``, with autopart's decompositions."""
    try:
        with opened():
            return _torch.joint_graph(graph, inputs, table())
    except _torch.data_dependent() as error:
        raise data_dependent(error, module) from error


def data_dependent(error: BaseException, module: torch.nn.Module) -> CaptureError:
    """The refusal of control flow that depends on tensor values, with the user's file and line."""
    return CaptureError(
        f"{where(error, module)}: the Python code of {type(module).__name__} needs the value of a tensor, which "
        "differs from batch to batch; use torch.where or masking instead of a branch, or move the decision out of "
        "forward"
    )


def where(error: BaseException, module: torch.nn.Module) -> str:
    """The user's file and line in an error (the innermost line outside torch), else the module's class."""
    import traceback

    found: list[tuple[str, int | None]] = []
    chain: BaseException | None = error
    while chain is not None:
        found += [(frame.filename, frame.lineno) for frame in traceback.extract_tb(chain.__traceback__)]
        found += [(frame.filename, frame.lineno) for frame in getattr(chain, "real_stack", None) or ()]
        # Where a graph is interpreted, the user's lines are in the text only.
        found += [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(chain))]
        chain = chain.__cause__ or chain.__context__
    user = [f"{file}:{line}" for file, line in found if is_user_file(file)]
    return user[-1] if user else type(module).__name__
