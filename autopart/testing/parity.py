"""`assert_parity`: a program trains exactly as the plain module does on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart import _torch
from autopart.api import compile, parallelize, plan
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.testing.world import LocalWorld

OptimizerOf = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What some training steps left behind: losses, each step's gradients and norm, the final parameters; all whole."""

    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    norms: tuple[float, ...]
    parameters: Mapping[str, torch.Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The default optimizer of `assert_parity`."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def assert_parity(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | Program | None = None,
    steps: int = 3,
    optimizer: OptimizerOf = adamw,
    max_norm: float = 0.5,
    tolerance: float | None = None,
    capture: str = "direct",
    batch: Mapping[str, int | None] | None = None,
    batches: Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None,
    **pins: Any,
) -> None:
    """Assert that training under a plan equals training the plain module on one device, in float64.

    Every rank of a local world has its own copy of the module, its own parts and its own optimizer. Compared are the
    loss, the raw gradient of every parameter and the clipped norm of each of `steps` steps, and every parameter after
    them; per tensor ``||a - b|| <= tolerance * max(||b||, largest ||b|| / 1000)``. The tolerance is 1e-9, or 1e-6
    where the model itself computes in float32 although its parameters are float64. `plan` may be a Program (an edited
    one, say); without it, `pins` go to `autopart.plan`. `batch` names batch dims that are not 0, as `parallelize` takes
    it. ``batches(step)`` gives other data than `args` and `kwargs` for each step, of any batch size.

    Raises AssertionError naming the first thing that differs, with both values.
    """
    model, args, kwargs = _double(copy.deepcopy(model)), _double(args), _double(dict(kwargs or {}))
    program = plan if isinstance(plan, Program) else _compiled(model, args, kwargs, plan, capture, batch, pins)
    if tolerance is None:
        narrow = {value.dtype for value in program.captured.values()} & {torch.float32, torch.bfloat16, torch.float16}
        tolerance = 1e-6 if narrow else 1e-9

    def data(step: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return (args, kwargs) if batches is None else _double(batches(step))

    expected = train(copy.deepcopy(model), data, steps, optimizer, max_norm)

    def rank_main(rank: int) -> Trajectory:
        mine = parallelize(copy.deepcopy(model), plan=program, verify=False, capture=capture, batch=batch)
        return train(mine, data, steps, optimizer, max_norm)

    for rank, found in enumerate(LocalWorld(program.plan.mesh.size).run(rank_main)):
        compare(found, expected, tolerance, f"rank {rank}")


def train(
    model: Any,
    data: Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]],
    steps: int,
    optimizer_of: OptimizerOf,
    max_norm: float,
) -> Trajectory:
    """Train a plain or a parallelised module and keep what happened."""
    optimizer = optimizer_of(model.parameters())
    losses, gradients, norms = [], [], []
    for step in range(steps):
        args, kwargs = data(step)
        loss = _loss(model(*args, **kwargs))
        torch.autograd.backward(loss)
        gradients.append(_gradients(model))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    parameters = {name: state[name].detach().clone() for name, _ in model.named_parameters()}
    return Trajectory(tuple(losses), tuple(gradients), tuple(norms), parameters)


def compare(found: Trajectory, expected: Trajectory, tolerance: float, who: str) -> None:
    """Raise AssertionError at the first difference between two trajectories."""
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(a - b) <= tolerance * max(abs(b), 1e-12), (
            f"{who}: loss of step {step} is {a!r}, one device has {b!r}"
        )
        assert_close(found.gradients[step], expected.gradients[step], tolerance, f"{who}: step {step}: gradient of")
        c, d = found.norms[step], expected.norms[step]
        assert abs(c - d) <= tolerance * d, f"{who}: gradient norm of step {step} is {c!r}, one device has {d!r}"
    # Adam divides by the gradient's size, so a rounding error of a tiny gradient is one of the step: look at the
    # parameters with the tolerance of what was added up over the steps.
    assert_close(found.parameters, expected.parameters, tolerance, f"{who}: after {len(found.losses)} steps: parameter")


def assert_close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> None:
    """Raise AssertionError unless both hold the same names with close tensors (see `assert_parity`)."""
    assert set(found) == set(expected), f"{what}: only one side has {sorted(set(found) ^ set(expected))}"
    largest = max((float(tensor.norm()) for tensor in expected.values()), default=0.0)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, f"{what} {name} has shape {found[name].shape}, not {tensor.shape}"
        distance, scale = float((found[name] - tensor).norm()), max(float(tensor.norm()), 1e-3 * largest)
        assert distance <= tolerance * scale, (
            f"{what} {name} differs by {distance / scale:.1e} (allowed {tolerance:.0e})"
        )


def _compiled(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Plan | None,
    capture: str,
    batch: Mapping[str, int | None] | None,
    pins: Mapping[str, Any],
) -> Program:
    made = plan(model, args, kwargs, capture=capture, batch=batch, **pins) if given is None else given
    return compile(model, made, args, kwargs, capture=capture, batch=batch)


def _gradients(model: Any) -> Mapping[str, torch.Tensor]:
    if hasattr(model, "full_grads"):
        return dict(model.full_grads())
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _loss(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    found = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    loss: torch.Tensor = value[0] if found is None else found
    return loss


def _double(value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return value.double()
    return _torch.pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value
    )
