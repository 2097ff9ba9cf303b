"""`parallelize`: the user's class or module, given the methods and the forward of a parallelised one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopart import _torch
from autopart.api.options import Options
from autopart.api.session import NO_TARGET, Session
from autopart.cluster import Cluster
from autopart.ir.mesh import Mesh
from autopart.ir.placement import Placement
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.runtime import clipping, guards
from autopart.runtime.report import Report


class Parallel(torch.nn.Module):
    """What a parallelised module can do beside what the user wrote. Mixed in before the user's class."""

    _autopart: Session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One call: with a loss and grad enabled, the whole planned step runs and ``loss.backward()`` delivers."""
        return self._call(args, kwargs, NO_TARGET)

    def train_step(self, args: Any, kwargs: Mapping[str, Any] | None = None, *, target: Any = NO_TARGET) -> Any:
        """The loss ``loss_fn(model(*args, **kwargs), target)`` of a module that returns outputs.

        Raises ValueError without ``parallelize(loss_fn=...)``.
        """
        if self._autopart.options.loss_fn is None:
            raise ValueError("loss_fn: train_step needs parallelize(loss_fn=...), a function of (output, target)")
        args = args if isinstance(args, tuple) else (args,)
        return self._call(args, kwargs or {}, target)[0]

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        result = self._autopart.call(self, args, kwargs, target)
        if self._autopart.residence is not None:
            clipping.watch(self._autopart.residence)
            guards.watch(self._autopart.residence)
        return result

    @property
    def plan(self) -> Plan | None:
        """The plan, None before the first call."""
        return self._autopart.plan

    @property
    def program(self) -> Program | None:
        """The training program, None before the first training call."""
        return self._autopart.program

    def report(self) -> Report:
        """What the last step measured, beside what was predicted. Raises RuntimeError before the first call."""
        if self._autopart.report is None:
            raise RuntimeError("report: nothing has run yet; call the model first")
        return self._autopart.report

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; return it as it was."""
        residence = self._autopart.residence
        if residence is None:
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return clipping.clip(residence, self.parameters(), max_norm, norm_type)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The original ``state_dict()``: every key, whole tensors, on CPU, on every rank. Collective."""
        local: dict[str, Any] = torch.nn.Module.state_dict(self)
        residence = self._autopart.residence
        if residence is None:
            return {
                name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for name, value in local.items()
            }
        whole = residence.gather({n: p.data for n, p in residence.parameters.items()})
        tied = residence.tied
        return {
            name: whole[tied[name]].clone()
            if name in tied
            else value.detach().cpu().clone()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in local.items()
        }

    def full_grads(self) -> dict[str, torch.Tensor]:
        """The gradient of every parameter that has one, by its name, whole, on CPU, on every rank. Collective."""
        residence = self._autopart.residence
        if residence is None:
            return {n: p.grad.detach().cpu().clone() for n, p in self.named_parameters() if p.grad is not None}
        whole = residence.gather({n: p.grad for n, p in residence.parameters.items()})
        names = [name for name, _ in self.named_parameters()]
        return {name: whole[residence.tied[name]] for name in names if residence.tied[name] in whole}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own; on a rank that holds parts, whole tensors on CPU under its names (collective)."""
        if self._autopart.residence is None:
            return super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        return OrderedDict((prefix + name, value) for name, value in self.full_state_dict().items())

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """The parts that this rank holds, under the original names."""
        local: dict[str, torch.Tensor] = torch.nn.Module.state_dict(self)
        return local

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors under the original names; each rank keeps its parts.

        Raises RuntimeError as ``nn.Module`` does: for missing or unexpected names when `strict`, for other shapes
        always.
        """
        residence = self._autopart.residence
        if residence is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        expected: dict[str, Any] = torch.nn.Module.state_dict(self)
        missing = [name for name in expected if name not in state_dict]
        unexpected = [name for name in state_dict if name not in expected]
        problems = [f"Missing key(s): {', '.join(missing)}."] if strict and missing else []
        problems += [f"Unexpected key(s): {', '.join(unexpected)}."] if strict and unexpected else []
        shapes = {p.target: p.shape for unit in residence.state.units for p in unit.parameters}
        for name in set(expected) & set(state_dict):
            shape = shapes.get(residence.tied.get(name, name), tuple(expected[name].shape))
            if tuple(state_dict[name].shape) != tuple(shape):
                problems.append(
                    f"size mismatch for {name}: {tuple(state_dict[name].shape)}, the module has {tuple(shape)}."
                )
        if problems:
            raise RuntimeError(f"Error(s) in loading state_dict for {type(self).__name__}: " + " ".join(problems))
        with torch.no_grad():
            residence.load(
                {residence.tied[n]: state_dict[n] for n in expected if n in state_dict and n in residence.tied}
            )
            for name, buffer in self.named_buffers():
                if name in state_dict:
                    buffer.copy_(state_dict[name])
        return _torch.IncompatibleKeys(missing, unexpected)


def parallelize(
    model_or_class: Any = None,
    *,
    devices: int | None = None,
    cluster: Cluster | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batch: Mapping[str, int | None] | None = None,
    inputs: str = "global",
    capture: str = "compile",
    hooks: str = "refuse",
    plan: Plan | Program | None = None,
    verify: bool = True,
    mesh: Mapping[str, int] | Mesh | None = None,
    stages: int | Sequence[str] | None = None,
    placement: str | Placement | Mapping[str, str | Placement] | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    memory: str | int | None = None,
) -> Any:
    """Train an ordinary module on many devices with an unchanged loop.

    Use as ``@autopart.parallelize`` or ``@autopart.parallelize(devices=4)`` on a class, or as
    ``autopart.parallelize(model, devices=4)`` on a module, which is changed in place and returned.

    Under torchrun every process is a rank, and parameters become its parts at the first call. Without it, `devices`
    ranks run inside this process and the module's parameters stay whole. What is not pinned (`mesh`, `stages`,
    `placement`, `schedule`, `microbatches`) is solved for at the first call; `plan` pins everything; a Program there,
    which may have been edited, is verified and run. `loss_fn(output, target)` serves modules that return outputs
    (`train_step`). `batch` maps input names to their batch dim, or None for inputs that are not split. With `inputs`
    "global" every rank passes the whole batch; with "local" each data rank its own samples, as a distributed sampler
    gives them, and ranks of the same data rank the same: the loss is that of all of them, in data-rank order. `memory`
    is the limit per device, such as ``"16GiB"``. `capture` is "compile" (through torch.compile) or "direct".

    Raises TypeError or ValueError for bad arguments at once; CaptureError or PlanInfeasible at the first call.
    """
    options = Options(
        devices=devices,
        cluster=cluster,
        loss_fn=loss_fn,
        batch=batch,
        inputs=inputs,
        capture=capture,
        hooks=hooks,
        plan=plan,
        verify=verify,
        mesh=mesh,
        stages=stages,
        placement=placement,
        schedule=schedule,
        microbatches=microbatches,
        memory=memory,
    )
    if model_or_class is None:
        return lambda target: _parallelized(target, options)
    return _parallelized(model_or_class, options)


def _parallelized(target: Any, options: Options) -> Any:
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return _class_of(target, options)
    if isinstance(target, Parallel):
        raise TypeError(f"parallelize: this {type(target).__name__} is parallelised already")
    if isinstance(target, torch.nn.Module):
        plain = type(target)
        target._autopart = Session(plain, options)  # type: ignore[assignment]
        target.__class__ = _subclass(plain, {})
        return target
    raise TypeError(f"parallelize: expected an nn.Module or a class of them, not {type(target).__name__}")


def _class_of(plain: type[torch.nn.Module], options: Options) -> type[torch.nn.Module]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        self._autopart = Session(plain, options)

    return _subclass(plain, {"__init__": __init__})


def _subclass(plain: type[torch.nn.Module], more: dict[str, Any]) -> type[torch.nn.Module]:
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (Parallel, plain), {**names, **more})
