"""Capture without torch.compile: the module itself is traced, which is faster but for deep stacks of equal blocks.

It takes fake parameters, too.

Module names come from hooks that annotate the nodes made inside a module's forward; the annotation reaches backward
nodes too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from autopart import _torch
from autopart.capture.annotate import SourceLines, module_names
from autopart.capture.call import Call
from autopart.capture.guard import changes, reassigned_buffer
from autopart.capture.trace import (
    Names,
    Trace,
    Traced,
    copied,
    find_loss,
    flatten_result,
    held_tensor,
    joint,
    keeps_gradients,
    plain_leaf,
    where,
)
from autopart.errors import CaptureError


class _Flat(torch.nn.Module):
    """The call on flat tensors: inputs in, distinct result tensors out; the return value's shape is kept aside."""

    def __init__(self, module: torch.nn.Module, call: Call, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call_ = call
        self.run = run
        self.outputs: tuple[str, ...] = ()
        self.result: tuple[tuple[str, Any], ...] = ()
        self.tree: Any = None
        self.training = False

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fresh = iter(tensors)
        leaves = [next(fresh) if isinstance(x, torch.Tensor) else x for x in self.call_.leaves]
        paths = {id(x): p for x, p in zip(leaves, self.call_.paths, strict=True) if isinstance(x, torch.Tensor)}
        args, kwargs = _torch.pytree.tree_unflatten(leaves, self.call_.spec)
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        with SourceLines():
            value = self.run(self.module, args, kwargs)
        if name := reassigned_buffer(self.module, buffers):
            raise changes(self.module, f"the buffer {name}")
        loss = find_loss(value, lambda x: bool(x.requires_grad))
        starts = loss is not None and loss.requires_grad and torch.is_grad_enabled()
        found, self.tree = flatten_result(value, loss)
        held = {id(x) for x in (*self.module.parameters(), *self.module.buffers())}
        outputs: dict[int, torch.Tensor] = {}
        result: list[tuple[str, Any]] = []
        for leaf in found:
            if not isinstance(leaf, torch.Tensor):
                result.append(plain_leaf(leaf))
            elif id(leaf) in paths:
                result.append(("input", paths[id(leaf)]))
            elif id(leaf) in held or not _torch.is_traced(leaf):
                raise held_tensor()
            else:
                outputs.setdefault(id(leaf), leaf)
                result.append(("output", list(outputs).index(id(leaf))))
        deferred = not starts and keeps_gradients(self.module, self.call_)
        deferred = deferred and any(x.requires_grad for x in outputs.values())
        self.training = starts or deferred
        self.outputs = tuple("loss" if x is loss and not deferred else "output" for x in outputs.values())
        self.result = tuple(result)
        if deferred:
            return tuple(copied(x) if x.requires_grad else x.detach() for x in outputs.values())
        return tuple(x if x is loss and starts else x.detach() for x in outputs.values())


def trace(
    module: torch.nn.Module, call: Call, loss_fn: Callable[..., Any] | None, target: bool, names: Names
) -> Traced:
    """Trace one call. With `target`, the call's last positional argument goes to `loss_fn`, not to the module."""

    def run(inner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if loss_fn is None:
            return inner(*args, **kwargs)
        output = inner(*(args[:-1] if target else args), **kwargs)
        return (loss_fn(output, args[-1]) if target else loss_fn(output)), output

    flat = _Flat(module, call, run)
    tensors = tuple(tensor for _, tensor in call.tensors)
    held = dict(flat.named_parameters(remove_duplicate=False)) | dict(flat.named_buffers(remove_duplicate=False))
    regions = _torch.without_checkpoints() if torch.is_grad_enabled() else contextlib.nullcontext()
    try:
        with regions, _torch.exporting(), torch.fx.traceback.preserve_node_meta(), module_names(module):
            graph = joint(flat, tensors, module)
    except _torch.CheckpointFound as error:
        raise CaptureError(
            f"{where(error, module)}: torch.utils.checkpoint is not seen by capture='direct'; use capture='compile', "
            "or leave it out and name the modules in recompute="
        ) from error
    inputs = tuple(_input(node.meta["desc"], held, call, names) for node in graph.graph.nodes if _primal(node))
    return Traced.of(Trace(graph, call.batch, inputs, flat.outputs, flat.result, flat.tree, flat.training))


def _primal(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and type(node.meta["desc"]).__name__ != "TangentAOTInput"


def _input(descriptor: Any, held: dict[str, torch.Tensor], call: Call, names: Names) -> tuple[str, str, torch.Tensor]:
    """What a placeholder is; a tied parameter has a placeholder for each of its names."""
    match type(descriptor).__name__:
        case "ParamAOTInput":
            parameter = held[descriptor.target]
            return "parameter", names.parameters[id(parameter)], parameter
        case "BufferAOTInput":
            buffer = held[descriptor.target]
            return "buffer", names.buffers[id(buffer)], buffer
        case _:
            path, tensor = call.tensors[descriptor.idx]
            return "input", path, tensor
