"""`assert_parity`: a program trains exactly as the plain module does on one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart import _torch
from autopart.api import compile, parallelize
from autopart.api.compiler import built, sampled
from autopart.capture import read
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.testing.reference import reference_random
from autopart.testing.world import LocalWorld

OptimizerOf = Callable[[Any], torch.optim.Optimizer]
LossOf = Callable[[Any], torch.Tensor]
Weight = Callable[[tuple[Any, ...], Mapping[str, Any]], float]
"""What of a call the share of its loss is counted in: samples, or valid targets."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What some training steps left behind: losses, each step's gradients and norm, the state at the end; all whole."""

    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    norms: tuple[float, ...]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class Sliced:
    """A plain module fed in slices, data rank by data rank and microbatch by microbatch, one loss for all of them.

    Each loss has the share ``weight(args, kwargs)`` of its slice in that of the whole call: by default the number of
    samples; a loss normalised by valid targets wants their number, a sum over the batch a constant. The microbatches of
    a data rank update buffers one after the other; over the data ranks, all of which start alike, floating ones are
    averaged, others the largest.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ranks: int,
        microbatches: int,
        weight: Weight | None = None,
        batch: Mapping[str, int | None] | None = None,
    ) -> None:
        self.module, self.ranks, self.microbatches, self.weight, self.batch = module, ranks, microbatches, weight, batch
        self.parameters, self.named_parameters = module.parameters, module.named_parameters
        self.state_dict, self.named_buffers = module.state_dict, module.named_buffers

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The weighted loss of one call."""
        whole, total, ended = self._weight(args, kwargs), torch.zeros(()), []
        for rank_args, rank_kwargs in self._cut(args, kwargs, self.ranks):
            buffers = dict(self.module.named_buffers())
            for piece_args, piece_kwargs in self._cut(rank_args, rank_kwargs, self.microbatches):
                buffers = {name: buffer.clone() for name, buffer in buffers.items()}
                value = torch.func.functional_call(self.module, buffers, piece_args, piece_kwargs)
                if share := self._weight(piece_args, piece_kwargs) / whole:
                    total = total + _loss(value) * share
            ended.append(buffers)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                every = torch.stack([buffers[name] for buffers in ended])
                buffer.copy_(every.mean(0) if buffer.is_floating_point() else every.amax(0))
        return total

    def _weight(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        return float(
            read(self.module, args, kwargs, batch=self.batch).batch
            if self.weight is None
            else self.weight(args, kwargs)
        )

    def _cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[tuple[Any, Any]]:
        """The call in `count` pieces, larger ones first."""
        call = read(self.module, args, kwargs, batch=self.batch)
        columns = [
            [leaf] * count if dim is None else torch.tensor_split(leaf, count, dim)
            for leaf, dim in zip(call.leaves, call.dims, strict=True)
        ]
        return [_torch.pytree.tree_unflatten(list(row), call.spec) for row in zip(*columns, strict=True)]


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
    semantics: str = "exact",
    weight: Weight | None = None,
    loss: LossOf | None = None,
    **pins: Any,
) -> None:
    """Assert that training under a plan equals training the plain module on one device, in float64.

    Every rank of a local world has its own copy of the module, its own parts and its own optimizer. Compared are the
    loss, the raw gradient of every parameter and the clipped norm of each of `steps` steps, and every parameter after
    them; per tensor ``||a - b|| <= tolerance * max(||b||, largest ||b|| / 1000)``. The tolerance is 1e-9, or 1e-6
    where the model itself computes in float32 although its parameters are float64. Random operations draw on one device
    what they draw in parts (`reference_random`). `plan` may be a Program (an edited one, say); without it, `pins` go to
    `autopart.plan`. `batch` names batch dims that are not 0, as `parallelize` takes it. ``batches(step)`` gives other
    data than `args` and `kwargs` for each step, of any batch size. `loss` makes the loss of what a module without one
    returns.

    With semantics "accumulate" the other side is the plain module fed slice by slice (see `Sliced`, also for `weight`).
    Buffers are compared too then, and where samples are coupled.

    Raises AssertionError naming the first thing that differs, with both values; ValueError for random operations under
    "accumulate", where a plain module that is fed a slice does not know which part of a draw is the slice's.
    """
    model, args, kwargs = _double(copy.deepcopy(model)), _double(args), _double(dict(kwargs or {}))
    meaning: dict[str, Any] = {"capture": capture, "batch": batch, "semantics": semantics}
    program = plan if isinstance(plan, Program) else _compiled(model, args, kwargs, plan, meaning, pins)
    tolerance = _tolerance(program) if tolerance is None else tolerance
    plain = _on_one_device(model, program, semantics, weight, batch)

    def data(step: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return (args, kwargs) if batches is None else _double(batches(step))

    with reference_random() if program.captured.of_kind("random") else contextlib.nullcontext():
        expected = train(plain, data, steps, optimizer, max_norm, loss)

    def rank_main(rank: int) -> Trajectory:
        mine = parallelize(copy.deepcopy(model), plan=program, verify=False, **meaning)
        return train(mine, data, steps, optimizer, max_norm, loss)

    for rank, found in enumerate(LocalWorld(program.plan.mesh.size).run(rank_main)):
        compare(found, expected, tolerance, f"rank {rank}")
        if semantics == "accumulate" or program.captured.coupled:
            assert_close(found.buffers, expected.buffers, tolerance, f"rank {rank}: after {steps} steps: buffer")


def train(
    model: Any,
    data: Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]],
    steps: int,
    optimizer_of: OptimizerOf,
    max_norm: float,
    loss_of: LossOf | None = None,
) -> Trajectory:
    """Train a plain or a parallelised module and keep what happened."""
    optimizer = optimizer_of(model.parameters())
    losses, gradients, norms = [], [], []
    for step in range(steps):
        args, kwargs = data(step)
        loss = (loss_of or _loss)(model(*args, **kwargs))
        torch.autograd.backward(loss)
        gradients.append(_gradients(model))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    parameters = {name: state[name].detach().clone() for name, _ in model.named_parameters()}
    buffers = {name: state[name].detach().clone() for name, _ in model.named_buffers() if name in state}
    return Trajectory(tuple(losses), tuple(gradients), tuple(norms), parameters, buffers)


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
    largest = max(map(norm, expected.values()), default=0.0)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, f"{what} {name} has shape {found[name].shape}, not {tensor.shape}"
        distance, scale = float((found[name] - tensor).double().norm()), max(norm(tensor), 1e-3 * largest)
        assert distance <= tolerance * scale, (
            f"{what} {name} differs by {distance / scale:.1e} (allowed {tolerance:.0e})"
        )


def norm(tensor: torch.Tensor) -> float:
    """The 2-norm, of whole numbers too."""
    return float(tensor.double().norm())


def _compiled(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Plan | None,
    meaning: Mapping[str, Any],
    pins: Mapping[str, Any],
) -> Program:
    """The program under a given plan, or under that which the pins leave; the call is captured once."""
    if given is not None:
        return compile(model, given, args, kwargs, **meaning)
    return built(sampled(model, args, kwargs, **meaning, microbatches=pins.get("microbatches")), **pins)


def _on_one_device(
    model: torch.nn.Module,
    program: Program,
    semantics: str,
    weight: Weight | None,
    batch: Mapping[str, int | None] | None,
) -> Any:
    """A plain copy, fed in slices where each is to compute as if it were the batch."""
    if semantics != "accumulate":
        return copy.deepcopy(model)
    degree, microbatches = program.plan.mesh.parts, program.plan.microbatches
    if (random := program.captured.of_kind("random")) and degree * microbatches > 1:
        raise ValueError(
            f"semantics: with 'accumulate' random operations ({random[0].target}) cannot be compared, since one device "
            "that is fed slice by slice draws for each as for a whole batch; set their probabilities to 0"
        )
    return Sliced(copy.deepcopy(model), degree, microbatches, weight, batch)


def _tolerance(program: Program) -> float:
    """What rounding allows: more where the model itself leaves float64."""
    narrow = {value.dtype for value in program.captured.values()} & {torch.float32, torch.bfloat16, torch.float16}
    return 1e-6 if narrow else 1e-9


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
