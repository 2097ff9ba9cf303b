"""What a segment costs, symbolically in the microbatch size, and as plain numbers at one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy

EXPRESSIONS = (
    "forward_flops",
    "backward_flops",
    "forward_bytes",
    "backward_bytes",
    "saved_bytes",
    "boundary_bytes",
    "recomputed_bytes",
    "input_flops",
    "input_bytes",
    "stash_bytes",
    "forward_exchange",
    "backward_exchange",
    "input_exchange",
    "forward_swept",
    "backward_swept",
    "input_swept",
)
"""The fields of a cost that depend on the microbatch size."""

REST = "output"
"""What a segment is called that is in no module, behind the last one: a loss, say. A call without it has no place where
a stage could begin there.
"""

PICO = 10**12
"""Units of time in a second: integers, so that nothing depends on the order of sums."""

PRECISIONS = (None, "mixed")
"""What AdamW keeps: two moments in the parameter's dtype; "mixed": for parameters of 16 bits, two moments and a copy of
the parameter in 32 bits."""


def optimizer_bytes(nbytes: int, itemsize: int, precision: str | None) -> int:
    """Bytes of optimizer state for `nbytes` of trainable parameters, `itemsize` an element."""
    return nbytes // itemsize * 12 if precision == "mixed" and itemsize < 4 else 2 * nbytes


@lru_cache(maxsize=1)
def batch_symbol() -> sympy.Symbol:
    """The symbol ``b`` of every cost: the number of samples in a microbatch, a positive integer."""
    import sympy

    return sympy.Symbol("b", integer=True, positive=True)


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that several segments use; `nbytes` are part of the parameter bytes of each of them."""

    name: str
    nbytes: int
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """The cost of one microbatch in one segment; expressions are in `batch_symbol()` (plain numbers are fine too).

    Parameter bytes are whole, before any sharding; a parameter that other segments use too is counted here as well and
    listed in `tied`, so that a stage with several of its users counts it once.
    """

    name: str
    forward_flops: sympy.Expr
    backward_flops: sympy.Expr
    forward_bytes: sympy.Expr  # read and written by the forward
    backward_bytes: sympy.Expr  # read and written by the backward
    parameter_bytes: int  # trainable and frozen
    trainable_bytes: int
    saved_bytes: sympy.Expr  # activations kept from forward to backward
    boundary_bytes: sympy.Expr  # values that flow in from earlier segments
    tied: tuple[Tied, ...] = ()
    recomputed_bytes: sympy.Expr = 0  # activations that the backward makes again, alive while it runs
    input_flops: sympy.Expr = 0  # those of the backward's that are for the inputs (I), the rest for the weights (W)
    input_bytes: sympy.Expr = 0  # likewise of its bytes
    stash_bytes: sympy.Expr = 0  # activations and gradients kept from I to W
    forward_exchange: sympy.Expr = 0  # picoseconds that the places of an axis inside it exchange values
    backward_exchange: sympy.Expr = 0
    input_exchange: sympy.Expr = 0  # those of the backward's that are I's
    forward_swept: sympy.Expr = 0  # those of its bytes that operators move which do not contract: sweeps
    backward_swept: sympy.Expr = 0
    input_swept: sympy.Expr = 0

    def __post_init__(self) -> None:
        if not 0 <= self.trainable_bytes <= self.parameter_bytes:
            raise ValueError(
                f"segment {self.name!r}: trainable_bytes must lie between 0 and parameter_bytes"
                f" ({self.parameter_bytes}), not {self.trainable_bytes}"
            )
        for place, extra in _others(_expressions(self)):
            raise ValueError(
                f"segment {self.name!r}: {EXPRESSIONS[place]} depends on {extra}; only batch_symbol() is known"
            )

    def at(self, batch: int) -> SegmentNumbers:
        """The plain numbers for a microbatch of `batch` samples."""
        values = _compiled(_expressions(self))(batch)
        numbers = dict(zip(EXPRESSIONS, map(ceil, values), strict=True))
        return SegmentNumbers(
            name=self.name,
            parameter_bytes=self.parameter_bytes,
            trainable_bytes=self.trainable_bytes,
            tied=self.tied,
            **numbers,
        )


@dataclass(frozen=True, slots=True)
class SegmentNumbers:
    """A `SegmentCost` at one microbatch size: whole FLOPs and bytes."""

    name: str
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    boundary_bytes: int
    parameter_bytes: int
    trainable_bytes: int
    tied: tuple[Tied, ...] = ()
    recomputed_bytes: int = 0
    input_flops: int = 0
    input_bytes: int = 0
    stash_bytes: int = 0
    forward_exchange: int = 0
    backward_exchange: int = 0
    input_exchange: int = 0
    forward_swept: int = 0
    backward_swept: int = 0
    input_swept: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"segment {self.name!r}: {field.name} must not be negative, got {value}")


_expressions: Callable[[SegmentCost], tuple[Any, ...]] = attrgetter(*EXPRESSIONS)


@lru_cache(maxsize=4096)
def _others(expressions: tuple[Any, ...]) -> tuple[tuple[int, frozenset[object]], ...]:
    """The symbols of some expressions but that of the batch, with the place of each that has others."""
    found = [frozenset(getattr(each, "free_symbols", ())) - {batch_symbol()} for each in expressions]
    return tuple((place, extra) for place, extra in enumerate(found) if extra)


@lru_cache(maxsize=4096)
def _compiled(expressions: tuple[Any, ...]) -> Callable[[int], tuple[float, ...]]:
    """One function for all expressions; equal segments share it."""
    import sympy

    function: Callable[[int], tuple[float, ...]] = sympy.lambdify(batch_symbol(), expressions, modules="math")
    return function
