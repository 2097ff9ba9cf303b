"""torch's random operators in terms of autopart's draws: one recipe an operator, for capture and for eager reference.

A recipe is called like the operator, after the `draw` that its numbers come from: None while a graph is traced, where
the draws are named later. NotImplemented, and no recipe at all, mean that the operator is refused by its name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from autopart import draws
from autopart.errors import CaptureError

Draw = torch.Tensor | None
Recipe = Callable[..., Any]

aten = torch.ops.aten
drawn = torch.ops.autopart


def _uniform(draw: Draw, size: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    dtype, device = dtype or torch.get_default_dtype(), device or torch.get_default_device()
    if dtype not in draws.BITS:
        return NotImplemented
    return drawn.uniform(draw, size, dtype=dtype, device=device)


def _normal(draw: Draw, size: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    dtype, device = dtype or torch.get_default_dtype(), device or torch.get_default_device()
    if dtype not in draws.BITS:
        return NotImplemented
    return drawn.normal(draw, size, dtype=dtype, device=device)


def _native_dropout(draw: Draw, x: torch.Tensor, p: float, train: bool | None) -> Any:
    keep = 1 - p if train is not False else 1.0
    mask = drawn.bernoulli(draw, keep, x.shape, device=x.device)
    # In the tensor's own dtype first: a product of a float and a bool tensor is ten times slower.
    return x * (mask.to(x.dtype) * (1 / keep if keep else 0.0)), mask


def _bernoulli_p(draw: Draw, x: torch.Tensor, p: float = 0.5) -> Any:
    return drawn.bernoulli(draw, p, x.shape, device=x.device).to(x.dtype)


def _bernoulli(draw: Draw, p: torch.Tensor) -> Any:
    return _bernoulli_each(draw, p, p)


def _bernoulli_each(draw: Draw, x: torch.Tensor, p: torch.Tensor) -> Any:
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (drawn.uniform(draw, x.shape, dtype=wide, device=x.device) < p).to(x.dtype)


def _created(make: Recipe) -> Recipe:
    """Of an operator that takes a size, such as ``rand``."""

    def recipe(draw: Draw, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return make(draw, size, dtype, device)

    return recipe


def _alike(make: Recipe) -> Recipe:
    """Of an operator that takes a tensor to be like, such as ``rand_like``."""

    def recipe(draw: Draw, x: torch.Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return make(draw, x.shape, dtype or x.dtype, device or x.device)

    return recipe


def _integers(draw: Draw, low: int, high: int, size: Any, dtype: Any, device: Any) -> Any:
    device = device or torch.get_default_device()
    u = drawn.uniform(draw, size, dtype=torch.float64, device=device)
    steps = torch.floor(u * (high - low))
    return (steps + low if low else steps).to(dtype or torch.int64)


def _randint(draw: Draw, high: int, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _integers(draw, 0, high, size, dtype, device)


def _randint_low(draw: Draw, low: int, high: int, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _integers(draw, low, high, size, dtype, device)


def _randint_like(draw: Draw, x: torch.Tensor, high: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _integers(draw, 0, high, x.shape, dtype or x.dtype, device or x.device)


def _randint_like_low(
    draw: Draw, x: torch.Tensor, low: int, high: int, *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return _integers(draw, low, high, x.shape, dtype or x.dtype, device or x.device)


def _uniform_between(draw: Draw, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    u = _uniform(draw, x.shape, x.dtype, x.device)
    return u if u is NotImplemented or (low, high) == (0.0, 1.0) else u * (high - low) + low


def _normal_like(draw: Draw, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> Any:
    z = _normal(draw, x.shape, x.dtype, x.device)
    return z if z is NotImplemented or (mean, std) == (0.0, 1.0) else z * std + mean


def _normal_of(draw: Draw, mean: Any, std: Any = 1.0) -> Any:
    """`mean` and `std` are tensors, or one of them is."""
    shapes = [x.shape for x in (mean, std) if isinstance(x, torch.Tensor)]
    size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    like = mean if isinstance(mean, torch.Tensor) else std
    z = _normal(draw, size, like.dtype, like.device)
    return z if z is NotImplemented else z * std + mean


def _normal_sized(
    draw: Draw, mean: float, std: float, size: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    z = _normal(draw, size, dtype, device)
    return z if z is NotImplemented else z * std + mean


def _exponential(draw: Draw, x: torch.Tensor, rate: float = 1.0) -> Any:
    u = _uniform(draw, x.shape, x.dtype, x.device)
    if u is NotImplemented:
        return u
    return -torch.log(u) if rate == 1 else -torch.log(u) / rate


RECIPES: Mapping[Any, Recipe] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.Tensor: _bernoulli_each,
    aten.rand.default: _created(_uniform),
    aten.rand_like.default: _alike(_uniform),
    aten.randn.default: _created(_normal),
    aten.randn_like.default: _alike(_normal),
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.uniform.default: _uniform_between,
    aten.normal_functional.default: _normal_like,
    aten.normal.float_float: _normal_sized,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.exponential.default: _exponential,
}
"""By operator. What writes into a tensor (``bernoulli_``) has the recipe of the one that returns it."""

IN_PLACE: Mapping[Any, Any] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default,
}
"""The operators that eager code uses and capture does not, with what capture sees instead."""


def decompositions() -> dict[Any, Recipe]:
    """The recipes as decompositions for tracing, whose draws are not named yet."""
    return {op: functools.partial(_traced, recipe) for op, recipe in RECIPES.items()}


def _traced(recipe: Recipe, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    return recipe(None, *args, **kwargs) if generator is None else NotImplemented


class _Opened(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if p > 0:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        if func in RECURRENT:
            packed = isinstance(args[1], torch.Tensor) and not isinstance(args[3], bool)
            layers, p, train = args[5:8] if packed else args[4:7]
            if layers > 1 and p > 0 and train:
                if packed:
                    raise CaptureError(
                        f"{func.__name__} with dropout between its layers on a packed sequence is not "
                        "supported; pass a padded one, or set its dropout to 0"
                    )
                return _layer_by_layer(func, *args)
        return func(*args, **kwargs)


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _layer_by_layer(
    func: Callable[..., Any],
    x: torch.Tensor,
    states: Any,
    weights: Any,
    biases: bool,
    layers: int,
    p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """A recurrent network a layer at a time, with a dropout between layers (which torch's own decomposition forgets).

    `states` are the first states of all layers: a pair of tensors for an LSTM, else one tensor.
    """
    pair = not isinstance(states, torch.Tensor)
    firsts = tuple(states) if pair else (states,)
    directions, each = 1 + bidirectional, len(weights) // layers
    lasts = []
    for layer in range(layers):
        x = torch.nn.functional.dropout(x, p, train) if layer else x
        mine = tuple(first[layer * directions : (layer + 1) * directions] for first in firsts)
        own = weights[layer * each : (layer + 1) * each]
        x, *last = func(x, mine if pair else mine[0], own, biases, 1, 0.0, train, bidirectional, batch_first)
        lasts.append(last)
    return (x, *(torch.cat(parts) for parts in zip(*lasts, strict=True)))


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Meanwhile, what would draw inside of a fused kernel is computed in parts, so that its draws are seen.

    Attention with dropout is computed by its formula, a recurrent network with dropout layer by layer.
    """
    with _Opened():
        yield
