"""Every private or version-dependent torch name that autopart uses, in one place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CheckpointFound",
    "IncompatibleKeys",
    "OpOverload",
    "TorchDispatchMode",
    "autograd_backend",
    "data_dependent",
    "decompositions",
    "dynamo_graph",
    "dynamo_refusals",
    "exporting",
    "fake_mode",
    "has_global_hooks",
    "in_backward",
    "intercept_loops",
    "is_fake",
    "is_mutable",
    "is_traced",
    "joint_graph",
    "masks_as_given",
    "no_global_hooks",
    "operator",
    "pytree",
    "quiet",
    "storage_key",
    "truncated_normal_by",
    "without_checkpoints",
    "without_modes",
]

OpOverload = torch._ops.OpOverload
"""An aten operator as it stands in a graph, such as ``aten.mm.default``."""

# The tracers of torch take a second to import: each is imported where it is used.


def dynamo_refusals() -> tuple[type[Exception], ...]:
    """What torch.compile raises for code that it cannot put into one graph."""
    from torch._dynamo.exc import TorchRuntimeError, Unsupported, UserError

    return Unsupported, UserError, TorchRuntimeError


def data_dependent() -> tuple[type[Exception], ...]:
    """What tracing on fake tensors raises where Python needs the value of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


def decompositions(operators: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of some operators."""
    from torch._decomp import get_decompositions

    found: dict[Any, Callable[..., Any]] = dict(get_decompositions(operators))
    return found


def fake_mode() -> Any:
    """A mode in which tensors have shapes but no data; real ones met in it are let in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    # A deep copy of a fake tensor copies its attributes; in a mode of its own it would have no views.
    mode.__deepcopy__ = lambda memo: mode
    return mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_mutable(operator: Any) -> bool:
    """Whether an aten operator writes to one of its operands."""
    return bool(operator._schema.is_mutable)


def operator(op: Any) -> OpOverload | None:
    """The operator that is meant by an operator, a packet with one overload, a custom op or a name (``"mine::op"``).

    None if it is none of these.
    """
    from torch._library.custom_ops import CustomOpDef

    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        name, _, overload = op.partition(".")
        space, _, name = name.partition("::")
        packet = getattr(getattr(torch.ops, space), name, None) if space and name else None
        op = getattr(packet, overload, None) if overload else packet
    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads: list[str] = op.overloads()  # type: ignore[no-untyped-call]
        op = getattr(op, overloads[0]) if len(overloads) == 1 else None
    return op if isinstance(op, OpOverload) else None


def storage_key(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from any other that is alive, on meta too, where no address does."""
    key: int = tensor.untyped_storage()._cdata
    return key


def joint_graph(
    module: torch.nn.Module, args: tuple[Any, ...], decompositions: dict[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """The joint forward+backward aten graph of ``module(*args)``; forward only where nothing requires grad.

    Placeholders and the output node carry descriptors in ``meta["desc"]``. The graph's `forward` takes two lists.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    held = (*module.parameters(), *module.buffers(), *args)
    # Tensors that the code holds itself (plain attributes, literals) are let into the trace as constants.
    fake = torch._guards.detect_fake_mode(held) or fake_mode()
    context = torch._guards.TracingContext(fake)
    with contextlib.ExitStack() as stack, torch._guards.tracing(context), _use_lazy_graph_module(True):
        exported = aot_export_joint_with_descriptors(stack, module, args, decompositions=decompositions)
        graph: torch.fx.GraphModule = exported.graph_module
        return graph


class CheckpointFound(Exception):
    """Raised by a call of ``torch.utils.checkpoint.checkpoint`` in `without_checkpoints`."""


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """In which checkpointed code raises `CheckpointFound`, which a trace of the module itself would read through."""
    from torch.utils import checkpoint as module

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointFound

    refusing = {
        "CheckpointFunction": type("CheckpointFunction", (), {"apply": staticmethod(refuse)}),
        "_checkpoint_without_reentrant_generator": refuse,
    }
    before = {name: getattr(module, name) for name in refusing}
    try:
        for name, value in refusing.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Tensor operations run for real, whatever dispatch modes are on."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextlib.contextmanager
def truncated_normal_by(draw: Callable[..., Any]) -> Iterator[None]:
    """``torch.nn.init.trunc_normal_`` calls ``draw(original, tensor, ...)``: it looks at the values that it drew."""
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = functools.partial(draw, original)
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor seen while a joint graph is traced was computed by it, or given to it."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FunctionalTensor)


def dynamo_graph(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    backend: Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]],
) -> Any:
    """Call `function` under torch.compile, whole and with every size fixed, handing its one graph to `backend`."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    patch = config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        specialize_float=True,
        allow_rnn=True,
        ignore_logging_functions=_logger_methods(),
    )
    with patch:
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)


def autograd_backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """A region of torch.compile with its gradients: `forward` and `backward` compile the two aten graphs of it.

    Each is given a graph and its inputs, and returns a function of those inputs to a tuple.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def boxed(compiler: Callable[..., Any]) -> Callable[..., Any]:
        return lambda gm, given: make_boxed_func(compiler(gm, given))

    made: Any = aot_autograd(
        fw_compiler=boxed(forward),
        bw_compiler=boxed(backward),
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    region: Callable[..., Any] = made(graph, inputs)
    return region


def _logger_methods() -> set[Any]:
    """Logger methods that dynamo may skip: a library's warnings do not belong to its mathematics."""
    import logging

    methods = {logging.Logger.warning, logging.Logger.info, logging.Logger.debug, logging.Logger.error, print}
    once = getattr(logging.Logger, "warning_once", None)
    return methods | ({once} if once is not None else set())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the stack traces that torch logs where tracing fails: the error itself is raised."""
    import logging

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """torch's "is exporting" flags set: libraries then skip code that looks at tensor values."""
    names = ("_is_compiling_flag", "_is_exporting_flag", "_is_non_strict_tracing_flag")
    before = {name: getattr(torch.compiler, name) for name in names if hasattr(torch.compiler, name)}
    try:
        for name in before:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.compiler, name, value)


@contextlib.contextmanager
def masks_as_given() -> Iterator[None]:
    """`nn.Transformer` without its look at the values of a mask: whether it is causal is only a hint for a kernel.

    Without the hint every layer applies the mask that it is given, with the same result.
    """
    module: Any = torch.nn.modules.transformer
    before = module._detect_is_causal_mask
    module._detect_is_causal_mask = _hinted
    try:
        yield
    finally:
        module._detect_is_causal_mask = before


def _hinted(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def intercept_loops(*, clip: Callable[..., Any], norm: Callable[..., Any], unscale: Callable[..., Any]) -> bool:
    """Make ``clip_grad_norm_``, ``get_total_norm`` and GradScaler's check call ``clip(original, ...)`` and so on; once.

    The first two are wrappers around a function in a closure cell. The cell is what changes, so that a name imported
    from torch long ago sees it too. Returns whether this was the first time.
    """
    scaler: Any = torch.amp.GradScaler
    original = scaler._unscale_grads_
    if hasattr(original, "autopart_original"):
        return False

    def _unscale_grads_(self: Any, *args: Any) -> Any:
        return unscale(original, self, *args)

    _unscale_grads_.autopart_original = original  # type: ignore[attr-defined]
    scaler._unscale_grads_ = _unscale_grads_
    for public, handler in ((torch.nn.utils.clip_grad_norm_, clip), (torch.nn.utils.get_total_norm, norm)):
        cell = next(c for c in public.__closure__ or () if callable(c.cell_contents))
        cell.cell_contents = functools.partial(handler, cell.cell_contents)
    return True


def _global_hooks() -> list[dict[int, Any]]:
    """The registries of hooks that run on every module."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return [getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds]


def has_global_hooks() -> bool:
    """Whether there are hooks that run on every module."""
    return any(_global_hooks())


@contextlib.contextmanager
def no_global_hooks() -> Iterator[None]:
    """Without the hooks that run on every module."""
    kept = [(hooks, dict(hooks)) for hooks in _global_hooks()]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def in_backward() -> bool:
    """Whether autograd's backward is running on this thread, as it is while a checkpointed forward is run again."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys
"""What ``load_state_dict`` returns: the missing and the unexpected keys."""
