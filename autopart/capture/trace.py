"""What both capture routes hand on: a joint FX graph at one batch size and what its inputs and outputs are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart import _torch
from autopart.capture.decompositions import table
from autopart.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Trace:
    """A joint graph at one batch size.

    `inputs` gives (kind, target, tensor) of each primal placeholder, in order; `outputs` the (kind, target) of each of the
    graph's first outputs, gradients follow. `result` and `tree` rebuild the user's return value (see `Captured`), with
    ``("output", i)`` for output i and ``("input", path)`` for an input handed back.
    """

    graph: torch.fx.GraphModule
    batch: int
    inputs: tuple[tuple[str, str, torch.Tensor], ...]
    outputs: tuple[tuple[str, str], ...]
    result: tuple[tuple[str, Any], ...]
    tree: Any
    training: bool


@dataclass(frozen=True, slots=True)
class Names:
    """Canonical names: parameters and buffers by identity, so that tied ones have one name."""

    parameters: Mapping[int, str]
    buffers: Mapping[int, str]
    tied: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Names:
        """The names in `module`, the first of a tied pair being its name."""
        parameters: dict[int, str] = {}
        storages: dict[Any, int] = {}
        tied: list[tuple[str, str]] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = storages.setdefault(_identity(parameter), id(parameter))
            parameters.setdefault(id(parameter), parameters.get(first, name))
            tied.append((name, parameters[id(parameter)]))
        buffers: dict[int, str] = {}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            buffers.setdefault(id(buffer), name)
        return cls(parameters, buffers, tuple(tied))


def _identity(tensor: torch.Tensor) -> Any:
    """Same storage, same layout: the same parameter, even behind two objects. A tensor without storage is only itself."""
    if tensor.numel() == 0 or tensor.is_meta or isinstance(tensor, _torch.FakeTensor):
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def is_container(value: Any) -> bool:
    """Whether a value is a plain container that the result may hold (Hugging Face's outputs are dictionaries)."""
    return isinstance(value, list | tuple | dict)


def flatten_result(value: Any) -> tuple[list[Any], Any]:
    """Leaves and tree of a return value; anything that is no plain container is a leaf."""
    leaves, tree = _torch.pytree.tree_flatten(value, is_leaf=lambda x: not is_container(x))
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


def joint(
    graph: torch.nn.Module, inputs: tuple[torch.Tensor, ...], module: torch.nn.Module
) -> torch.fx.GraphModule:
    """The joint aten graph of ``graph(*inputs)``, with autopart's decompositions."""
    try:
        return _torch.joint_graph(graph, inputs, table())
    except _torch.DATA_DEPENDENT as error:
        raise data_dependent(error, module) from error


def data_dependent(error: BaseException, module: torch.nn.Module) -> CaptureError:
    """The refusal of control flow that depends on tensor values, with the user's file and line."""
    return CaptureError(
        f"{where(error, module)}: the Python code of {type(module).__name__} needs the value of a tensor, which differs from "
        "batch to batch; use torch.where or masking instead of a branch, or move the decision out of forward"
    )


def where(error: BaseException, module: torch.nn.Module) -> str:
    """The user's file and line in an error: that of the innermost frame outside torch, else the module's class."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    chained: list[BaseException] = [e for e in (error.__cause__, error.__context__) if e is not None]
    for inner in chained:
        frames = [*frames, *traceback.extract_tb(inner.__traceback__)]  # type: ignore[assignment]
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return type(module).__name__


def is_user_file(path: str) -> bool:
    """Whether a file belongs to the user's program rather than to torch, autopart or Python itself."""
    return not any(part in path for part in ("/torch/", "/autopart/", "<frozen", "<string>", "/contextlib.py"))
