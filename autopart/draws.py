"""Stateless random numbers: every element is a hash of (seed, call, operation, its index in the unsplit tensor).

Three operators draw a piece of a tensor: ``autopart::uniform`` in (0, 1), ``autopart::normal`` and
``autopart::bernoulli`` (bool). Their `draw` says which numbers and which piece (`Draws.of`); `dim` is the dim that
holds the samples, None if all microbatches draw the same. A traced draw has None for both until it is named.

The hash is a keyed permutation of 32 bits: the three rounds of Chris Wellons' triple32 (public domain, from
github.com/skeeto/hash-prospector), with a word of the key added before each. Two draws are two permutations, not two
places in one sequence. All of it is int32 arithmetic, which wraps alike on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""Of triple32: the shift and the multiplier of each round; a last shift by 14 follows."""

BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Random bits of a uniform number: half a step away from 0 and from 1, it still has a place in the dtype."""

SPREAD = 0x9E3779B1
"""By which the high half of an index is multiplied: odd, with its bits spread."""

ON_CPU, ELSEWHERE = 1 << 16, 1 << 24
"""Elements hashed at a time: what stays in a core's cache, and what keeps an accelerator busy."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What a call draws from: `seed` is torch's, `call` counts the module's training calls since it last changed."""

    seed: int
    call: int

    def of(self, op: str, first: int = 0, samples: int = 1, whole: int = 1) -> torch.Tensor:
        """The `draw` of operation `op` for samples `first` to ``first + samples`` out of `whole`: int64, on CPU."""
        text = f"{self.seed} {self.call} {op}".encode()
        digest = hashlib.blake2b(text, digest_size=12).digest()
        key = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
        return torch.tensor([*key, first, samples, whole], dtype=torch.int64)


def following(last: Draws | None, seed: int) -> Draws:
    """What a training call draws from, given what the one before drew from and torch's seed now."""
    return Draws(seed, last.call + 1 if last is not None and last.seed == seed else 0)


def uniform(
    draw: torch.Tensor, size: Sequence[int], dim: int | None = None, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uniform numbers strictly between 0 and 1: ``(n + 1/2) / 2**BITS[dtype]`` for a random n."""
    bits = BITS[dtype]
    out = torch.empty(tuple(size), dtype=dtype, device=device)
    for part, words in _hashed(draw, out, dim, 2 if bits > 32 else 1):
        if bits > 32:
            high, low = (word.to(torch.int64).bitwise_and_(0xFFFFFFFF) for word in words)
            n = high.bitwise_left_shift_(bits - 32).bitwise_or_(low.bitwise_right_shift_(64 - bits))
        else:
            n = words[0].bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)
        wide = n.to(torch.promote_types(dtype, torch.float32))
        part.copy_(wide.add_(0.5).mul_(2.0**-bits))
    return out


def normal(
    draw: torch.Tensor, size: Sequence[int], dim: int | None = None, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Standard normal numbers, by the inverse of their distribution at a uniform float64 number."""
    flat = uniform(draw, size, dim, dtype=torch.float64, device=device)
    return flat.mul_(2).sub_(1).erfinv_().mul_(2**0.5).to(dtype)


def bernoulli(
    draw: torch.Tensor, p: float, size: Sequence[int], dim: int | None = None, *, device: torch.device
) -> torch.Tensor:
    """True with probability `p`, in steps of 2**-32."""
    out = torch.empty(tuple(size), dtype=torch.bool, device=device)
    below = round(p * 2**32) - 2**31
    if not -(2**31) < below < 2**31:
        return out.fill_(p > 0.5)
    for part, words in _hashed(draw, out, dim, 1):
        torch.lt(words[0], below, out=part)
    return out


def _hashed(
    draw: torch.Tensor, out: torch.Tensor, dim: int | None, count: int
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Views that make up `out`, each with `count` int32 random words an element.

    The piece is `outer` runs of consecutive elements of the whole tensor, the first of them at `start`.
    """
    if out.is_meta:  # shapes alone
        return
    *key, first, samples, whole = draw.tolist()
    shape = out.shape
    outer, run, start, stride = 1, out.numel(), 0, 0
    if dim is not None and run:
        outer, sample = prod(shape[:dim]), shape[dim] // samples * prod(shape[dim + 1 :])
        run, start, stride = samples * sample, first * sample, whole * sample
    runs = out.view(outer, run)
    limit = ON_CPU if out.device.type == "cpu" else ELSEWHERE
    columns, rows = min(run, limit), max(1, limit // max(run, 1))
    for row in range(0, outer, rows):
        for column in range(0, run, limit):
            part = runs[row : row + rows, column : column + columns]
            at = start + row * stride + column
            yield part, tuple(_words(part, at, stride, (*key[i:], *key[:i])) for i in range(count))


def _words(part: torch.Tensor, first: int, stride: int, key: Sequence[int]) -> torch.Tensor:
    """The hashes of rows of consecutive indices, each row `stride` after the one before."""
    rows, columns = part.shape
    column = torch.arange(columns, dtype=torch.int32, device=part.device)
    if rows == 1:
        x = column.add_(_int32(first + key[0])).view(1, columns)
    else:
        x = column + _int32s(_starts(part, first, stride) + key[0])
    spare = torch.empty_like(x)
    for (shift, factor), add in zip(ROUNDS, (_with_high(part, first, stride, key[1]), _int32(key[2]), 0), strict=True):
        _fold(x, spare, shift).mul_(_int32(factor)).add_(add)
    return _fold(x, spare, 14)


def _with_high(part: torch.Tensor, first: int, stride: int, word: int) -> torch.Tensor | int:
    """A word of the key with the high half of each index mixed in, which is 0 for most tensors."""
    rows, columns = part.shape
    low, high = first >> 32, (first + (rows - 1) * stride + columns - 1) >> 32
    if low == high:
        return _int32(word + high * SPREAD)
    index = _starts(part, first, stride) + torch.arange(columns, device=part.device)
    return _int32s(index.bitwise_right_shift_(32).mul_(SPREAD).add_(word))


def _starts(part: torch.Tensor, first: int, stride: int) -> torch.Tensor:
    """The index of the first element of each row: int64 [rows, 1]."""
    return torch.arange(part.shape[0], device=part.device).mul_(stride).add_(first).view(-1, 1)


def _fold(x: torch.Tensor, spare: torch.Tensor, shift: int) -> torch.Tensor:
    """``x ^= x >> shift``, shifting zeros in; `spare` is overwritten."""
    torch.bitwise_right_shift(x, shift, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))


def _int32(number: int) -> int:
    """The number that has the same low 32 bits and fits in an int32."""
    return (number + 2**31) % 2**32 - 2**31


def _int32s(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.add_(2**31).bitwise_and_(0xFFFFFFFF).sub_(2**31).to(torch.int32)


def _register() -> Any:
    """Make the operators known to torch, on real tensors and on those that have shapes only."""
    library: Any = torch.library.Library("autopart", "DEF")  # type: ignore[no-untyped-call]
    piece = "SymInt[] size, int? dim=None, *"
    schemas = {
        uniform: f"uniform(Tensor? draw, {piece}, ScalarType dtype, Device device) -> Tensor",
        normal: f"normal(Tensor? draw, {piece}, ScalarType dtype, Device device) -> Tensor",
        bernoulli: f"bernoulli(Tensor? draw, float p, {piece}, Device device) -> Tensor",
    }

    def shaped(_: Any, size: Any, dim: Any = None, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def flags(_: Any, p: float, size: Any, dim: Any = None, *, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=torch.bool, device=device)

    for function, schema in schemas.items():
        name = library.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopart::{name}", flags if function is bernoulli else shaped, lib=library)
        # A trace must keep the draws that nothing uses: the names of later ones count them.
        torch.fx.node.has_side_effect(getattr(torch.ops.autopart, name).default)
    return library


_LIBRARY = _register()
