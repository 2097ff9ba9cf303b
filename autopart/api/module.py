"""`parallelize`: the user's class or module, given the methods and the forward of a parallelised one."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopart.api.options import Options
from autopart.api.plain import check_root_hooks
from autopart.api.session import Session
from autopart.capture import NO_TARGET
from autopart.cluster import Cluster
from autopart.ir.action import Schedule
from autopart.ir.mesh import Mesh, Sizes
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.runtime import loading
from autopart.runtime.construction import Construction
from autopart.runtime.report import Report
from autopart.solver.presets import Pinned


class Parallel(torch.nn.Module):
    """What a parallelised module can do beside what the user wrote. Mixed in before the user's class."""

    _autopart: Session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One call: with a loss and grad enabled, the whole planned step runs and ``loss.backward()`` delivers.

        In training without a loss the forwards run; the backwards do in ``backward()`` of what is made of the outputs.
        """
        return self._call(args, kwargs, NO_TARGET)

    def train_step(self, args: Any, kwargs: Mapping[str, Any] | None = None, *, target: Any = NO_TARGET) -> Any:
        """The loss ``loss_fn(model(*args, **kwargs), target)`` of a module that returns outputs.

        Raises ValueError without ``parallelize(loss_fn=...)``.
        """
        if self._autopart.options.loss_fn is None:
            raise ValueError("loss_fn: train_step needs parallelize(loss_fn=...), a function of (output, target)")
        check_root_hooks(self, self._autopart.options.hooks)
        args = args if isinstance(args, tuple) else (args,)
        return self._call(args, kwargs or {}, target)[0]

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        return self._autopart.call(self, args, kwargs, target)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Training calls inside keep their gradients unreduced; the first one outside reduces all that waits, once.

        Whether a call is inside is decided when the module is called. Until the `backward()` of the first call outside,
        `.grad` lacks what waits: an optimizer's step, a norm or a scaler raises RuntimeError. ``zero_grad()`` drops it.
        Ranks keep whole gradients of their stages meanwhile, under every placement.
        """
        delivery = self._autopart.delivery
        before, delivery.waiting = delivery.waiting, True
        try:
            yield
        finally:
            delivery.waiting = before

    @property
    def plan(self) -> Plan | None:
        """The plan, None before the first call."""
        return self._autopart.plan

    @property
    def program(self) -> Program | None:
        """The training program, None before the first training call."""
        return self._autopart.programs.training

    def report(self) -> Report:
        """What the last step measured, beside what is predicted of such a step: of training or evaluation, at its size.

        Raises RuntimeError before the first call.
        """
        report, predicted = self._autopart.delivery.report, self._autopart.delivery.predicted()
        if report is None or predicted is None:
            raise RuntimeError("report: nothing has run yet; call the model first")
        return report.beside(predicted)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; return it as it was."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def full_state_dict(self) -> dict[str, Any]:
        """The original ``state_dict()``: every key, whole tensors, on CPU, on every rank. Collective."""
        self._autopart.check_flushed()
        local: dict[str, Any] = super().state_dict()
        residence = self._autopart.residence
        whole = {} if residence is None else residence.gather({n: p.data for n, p in residence.parameters.items()})
        tied = {} if residence is None else residence.tied
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
        self._autopart.check_flushed()
        if self._autopart.residence is None:
            return super().state_dict(*args, **kwargs)
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        made = given.get("destination")
        made = OrderedDict() if made is None else made
        made.update((given.get("prefix", "") + name, value) for name, value in self.full_state_dict().items())
        return made

    def local_state_dict(self) -> dict[str, Any]:
        """The parts that this rank holds, under the original names."""
        self._autopart.check_flushed()
        local: dict[str, Any] = super().state_dict()
        return local

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors under the original names; each rank keeps its parts. Collective once parameters are parts.

        Returns the missing and the unexpected keys. Raises RuntimeError on every rank, before anything changes, for
        those when `strict`, and for other shapes always. Raises ValueError for `assign` once parameters are parts, and
        where ranks bring different values.
        """
        self._autopart.renewed()
        residence = self._autopart.residence
        if residence is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        return loading.load(self, self._autopart.plain, residence, state_dict, strict=strict, assign=assign)

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is parallelised and cannot be pickled: it belongs to its process and its world; "
            "save model.state_dict() (on every rank; write it on one), or use autopart.save(folder, model, optimizer)"
        )


def parallelize(
    model_or_class: Any = None,
    *,
    devices: int | None = None,
    cluster: Cluster | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batch: Mapping[str, int | None] | None = None,
    semantics: str = "exact",
    inputs: str = "global",
    capture: str = "compile",
    hooks: str = "refuse",
    outputs: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    plan: Plan | Program | None = None,
    verify: bool = True,
    mesh: Sizes | Mesh | None = None,
    stages: int | Sequence[str] | None = None,
    placement: Pinned = None,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    memory: str | int | None = None,
    recompute: bool | Sequence[str] | None = None,
    offload: bool = False,
    chunks: Mapping[str, int] | None = None,
) -> Any:
    """Train an ordinary module on many devices with an unchanged loop.

    Use as ``@autopart.parallelize`` or ``@autopart.parallelize(devices=4)`` on a class, or as
    ``autopart.parallelize(model, devices=4)`` on a module, which is changed in place and returned.

    Under torchrun every process is a rank, and parameters become its parts at the first call. Without it, `devices`
    ranks run inside this process and the module's parameters stay whole. What is not pinned (`mesh`, `stages`,
    `placement`, `schedule`, `microbatches`, `recompute`) is solved for at the first call; `plan` pins everything; a
    Program there, which may have been edited, is verified and run. `loss_fn(output, target)` serves modules that
    return outputs (`train_step`). `batch` maps input names to their batch dim, or None for inputs that are not split.
    With `inputs` "global" every rank passes the whole batch; with "local" each data rank its own samples, as a
    distributed sampler gives them, and ranks of the same data rank the same: the loss is that of all of them, in data-
    rank order. `schedule` is a name, with options such as ``"interleaved(chunks=3)"``, a Schedule, or a CSV of actions,
    a line a pipeline rank; it says how many of the `stages` a rank holds. "auto" is the one that is predicted to be
    fastest of those that fit. `memory` is the limit per device, such as ``"16GiB"``. `recompute` says what the backward
    computes again instead of keeping it: modules by name, or True for all; by default what has to be for a stage
    to fit, False for nothing. A `mesh` with an axis ``tp``, ``cp`` or ``ep`` splits the tensors inside layers;
    `placement` may then pin parameters there, such as ``{"*.up.weight": {"tp": autopart.Shard(0)}}``. A mesh that is
    not pinned may have a ``tp`` where a `cluster` is given. What the model puts into ``torch.utils.checkpoint`` is
    recomputed in any case. `offload` is refused as yet: `autopart.plan` alone counts with states on the host.
    `chunks` names modules whose tokens are computed chunk after chunk, in forward and backward, so that what is large
    in them is there for one chunk at a time: ``{"lm_head": 8, "h.*.mlp": 4}``; the output layer with its loss.
    `semantics` is "exact" (the whole batch on one device; what couples its samples, as a BatchNorm does, takes one
    microbatch, and is refused with several) or "accumulate" (a BatchNorm sees a microbatch of one data rank, as in
    gradient accumulation). ``outputs="all"`` gives every rank the outputs beside the loss, whole (with inputs "local"
    those of its own samples); otherwise they are None where not made. `weights` is a safetensors file, or a folder of
    them, from which parameters on meta are read, each rank its part, at the first call; without it a class whose
    constructor ran under ``torch.device("meta")`` gets the initial values of a plain build with the same seed.
    `capture` is "compile" (through torch.compile) or "direct".

    Raises TypeError or ValueError for bad arguments at once; CaptureError or PlanInfeasible at the first call.
    """
    options = Options(
        devices=devices,
        cluster=cluster,
        loss_fn=loss_fn,
        batch=batch,
        semantics=semantics,
        inputs=inputs,
        capture=capture,
        hooks=hooks,
        outputs=outputs,
        weights=weights,
        plan=plan,
        verify=verify,
        mesh=mesh,
        stages=stages,
        placement=placement,
        schedule=schedule,
        microbatches=microbatches,
        memory=memory,
        recompute=recompute,
        offload=offload,
        chunks=chunks,
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
        target._autopart = Session(plain, options, target)  # type: ignore[assignment]
        target.__class__ = _subclass(plain, {})
        return target
    raise TypeError(f"parallelize: expected an nn.Module or a class of them, not {type(target).__name__}")


def _class_of(plain: type[torch.nn.Module], options: Options) -> type[torch.nn.Module]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if torch.get_default_device().type == "meta":
            construction = Construction()
            with construction.recording(self):
                plain.__init__(self, *args, **kwargs)
        else:
            construction = None
            plain.__init__(self, *args, **kwargs)
        self._autopart = Session(plain, options, self, construction)

    return _subclass(plain, {"__init__": __init__})


def _subclass(plain: type[torch.nn.Module], more: dict[str, Any]) -> type[torch.nn.Module]:
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (Parallel, plain), {**names, **more})
