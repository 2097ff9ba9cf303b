"""Where a step meets the user's autograd graph: gradients of inputs, and outputs of a step without a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autopart.capture.call import Call
from autopart.ir.captured import Captured
from autopart.ir.graph import descendants
from autopart.ir.program import Program
from autopart.runtime.autograd import Pairs
from autopart.runtime.deferred import Unchanged, agree, deferred
from autopart.runtime.transport import Transport


def check_local(captured: Captured) -> None:
    """Refuse, where each data rank passes its own samples, what would be given whole to every rank."""
    whole = "a module that returns no loss" if captured.deferred else "an input that requires grad"
    if captured.deferred or any(out.kind == "input_grad" for out in captured.outputs):
        raise ValueError(
            f"inputs: with 'local' every data rank has its own samples, and {whole} is not supported: outputs and "
            "gradients of inputs would be those of all ranks; return the loss, detach the inputs, or pass the whole "
            "batch on every rank (inputs='global')"
        )


def input_gradients(captured: Captured, call: Call, outputs: Mapping[str, torch.Tensor]) -> Pairs:
    """Each of the call's tensors that has a gradient, with it."""
    tensors = dict(call.tensors)
    return [(tensors[out.target], outputs[out.name]) for out in captured.outputs if out.kind == "input_grad"]


def deferred_outputs(
    model: torch.nn.Module,
    program: Program,
    call: Call,
    outputs: Mapping[str, torch.Tensor],
    transport: Transport | None,
    rest: Callable[[Mapping[str, torch.Tensor]], Pairs],
) -> dict[str, torch.Tensor]:
    """The differentiable outputs by value name; `rest` goes from their gradients, whole and by tangent name, on."""
    captured = program.captured
    names = {out.target: out.name for out in captured.outputs if out.kind == "output"}
    tangents = [(item.value.name, outputs[names[item.target]]) for item in captured.of_kind("tangent")]
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Mapping[str, torch.Tensor]] = {"grad": parameters, "input_grad": dict(call.tensors)}
    graded = dict.fromkeys((out.kind, out.target) for out in captured.outputs if out.kind in tensors)
    leaves = [tensors[kind][target] for kind, target in graded]
    unchanged = Unchanged(_read_again(model, program, call))

    def backward(grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        unchanged.check()
        used = {name for (name, _), grad in zip(tangents, grads, strict=True) if grad is not None}
        reached = graded if len(used) == len(tangents) else with_gradient(captured, used)
        given = {
            name: torch.zeros_like(output) if grad is None else grad.contiguous()
            for (name, output), grad in zip(tangents, grads, strict=True)
        }
        if transport is not None:
            agree(transport, given)
        made = {id(leaf): gradient for leaf, gradient in rest(given)}
        return [made.get(id(leaf)) if key in reached else None for leaf, key in zip(leaves, graded, strict=True)]

    found = deferred([output for _, output in tangents], leaves, backward)
    made: dict[str, torch.Tensor] = {}
    for item, output in zip(captured.of_kind("tangent"), found, strict=True):
        made.setdefault(names[item.target], output)
    return made


def with_gradient(captured: Captured, tangents: set[str]) -> set[tuple[str, str]]:
    """(kind, target) of what gets a gradient when the outputs of these tangents alone are used; None goes elsewhere."""
    moved = descendants(captured.nodes, tangents)
    return {(out.kind, out.target) for out in captured.outputs if out.name in moved}


def _read_again(model: torch.nn.Module, program: Program, call: Call) -> dict[str, torch.Tensor]:
    """What the backward reads of the module and of the call, by a name for people."""
    segments = program.staged.segmented.segments
    fixed = {name for segment in segments for name in segment.backward_fixed}
    held = {item.target for item in program.captured.of_kind("buffer") if item.value.name in fixed}
    held |= {target for segment in segments for target in segment.backward_parameters}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found = {f"the input {path}": tensor for path, tensor in call.tensors}
    return found | {name: tensor for name, tensor in named if name in held}
