"""Stateless random numbers: every element is a hash of (seed, call, operation, its index in the unsplit tensor).

Three operators draw a piece of a tensor: ``autopart::uniform`` in (0, 1), ``autopart::normal`` and
``autopart::bernoulli`` (bool). Their `draw` says which numbers, and of which samples (`Draws.of`); `dim` is the dim
that holds the samples, None if all microbatches draw the same. A traced draw has None for both until it is named.
`part` says how the rest is cut, four numbers a cut, the first one first: ``dim, start, length, whole``, of a dim of so
many runs of `whole` elements, of each of which `length` are drawn, from `start` on. Only what is drawn is computed.

The hash is a keyed permutation of 32 bits: the three rounds of Chris Wellons' triple32 (public domain, from
github.com/skeeto/hash-prospector), with a word of the key added before each. Two draws are two permutations, not two
places in one sequence. All of it is int32 arithmetic, which wraps alike on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""Of triple32: the shift and the multiplier of each round; a last shift by 14 follows."""

BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Random bits of a uniform number: half a step away from 0 and from 1, it still has a place in the dtype."""

SPREAD = 0x9E3779B1
"""By which the high half of an index is multiplied: odd, with its bits spread."""

Number = TypeVar("Number", int, torch.Tensor)

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
    draw: torch.Tensor, size: Sequence[int], dim: int | None = None, part: Sequence[int] = (),
    *, dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Uniform numbers strictly between 0 and 1: ``(n + 1/2) / 2**BITS[dtype]`` for a random n."""
    bits = BITS[dtype]
    out = torch.empty(tuple(size), dtype=dtype, device=device)
    for view, words in _hashed(draw, out, dim, part, 2 if bits > 32 else 1):
        if bits > 32:
            high, low = (word.to(torch.int64).bitwise_and_(0xFFFFFFFF) for word in words)
            n = high.bitwise_left_shift_(bits - 32).bitwise_or_(low.bitwise_right_shift_(64 - bits))
        else:
            n = words[0].bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)
        wide = n.to(torch.promote_types(dtype, torch.float32))
        view.copy_(wide.add_(0.5).mul_(2.0**-bits))
    return out


def normal(
    draw: torch.Tensor, size: Sequence[int], dim: int | None = None, part: Sequence[int] = (),
    *, dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Standard normal numbers, by the inverse of their distribution at a uniform float64 number."""
    flat = uniform(draw, size, dim, part, dtype=torch.float64, device=device)
    return flat.mul_(2).sub_(1).erfinv_().mul_(2**0.5).to(dtype)


def bernoulli(
    draw: torch.Tensor, p: float, size: Sequence[int], dim: int | None = None, part: Sequence[int] = (),
    *, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """True with probability `p`, in steps of 2**-32."""
    out = torch.empty(tuple(size), dtype=torch.bool, device=device)
    below = round(p * 2**32) - 2**31
    if not -(2**31) < below < 2**31:
        return out.fill_(p > 0.5)
    for view, words in _hashed(draw, out, dim, part, 1):
        torch.lt(words[0], below, out=view)
    return out


@dataclass(frozen=True, slots=True)
class _Loop:
    """A dim of the piece: `size` elements, which are `stride` apart in the whole tensor but for `cuts`.

    A cut is ``start, length, whole``; the first was made first.
    """

    size: int
    stride: int
    cuts: tuple[tuple[int, int, int], ...]

    def places(self, index: Number) -> Number:
        """How far elements of these numbers are from the first of the whole tensor; a tensor of them is not kept."""
        size = self.size
        for start, length, whole in reversed(self.cuts):
            if size > length:
                index = index // length * whole + index % length
                size = size // length * whole
            else:
                size = whole
            if start:
                index += start
        return index if self.stride == 1 else index * self.stride


def _loops(size: Sequence[int], cuts: Sequence[tuple[int, int, int, int]]) -> tuple[_Loop, ...]:
    """A piece as few loops, outer to inner: a dim that is whole is one with the dim before it."""
    found: list[_Loop] = []
    stride = inner = 1
    for dim in reversed(range(len(size))):
        own = [(start * inner, length * inner, whole * inner) for at, start, length, whole in cuts if at == dim]
        here = whole_size = size[dim] * inner
        for _, length, whole in reversed(own):
            whole_size = whole_size // length * whole
        if own:
            found.append(_Loop(here, stride, tuple(own)))
            stride, inner = stride * whole_size, 1
        else:
            inner = here
    return tuple(reversed(found if inner == 1 else [*found, _Loop(inner, stride, ())]))


def _hashed(
    draw: torch.Tensor, out: torch.Tensor, dim: int | None, part: Sequence[int], count: int
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Views that make up `out`, each with `count` int32 random words an element."""
    if out.is_meta or not out.numel():  # shapes alone
        return
    *key, first, samples, whole = draw.tolist()
    cuts = [(part[i], part[i + 1], part[i + 2], part[i + 3]) for i in range(0, len(part), 4)]
    if dim is not None:
        rows = out.shape[dim]
        for at, _, length, run in reversed(cuts):
            rows = rows // length * run if at == dim else rows
        each = rows // samples
        cuts = [(dim, first * each, rows, whole * each), *cuts]
    limit = ON_CPU if out.device.type == "cpu" else ELSEWHERE
    for view, block in _blocks(out, _loops(out.shape, cuts), limit):
        yield view, tuple(block.words((*key[i:], *key[:i])) for i in range(count))


@dataclass(frozen=True, slots=True)
class _Block:
    """A matrix of elements: the place of each in the whole tensor is that of its row and of its column together.

    `down` is int64 [rows, 1], `across` int64 [columns]; `first` and `last` are the places of the first and the last
    element, between which all others are.
    """

    down: torch.Tensor
    across: torch.Tensor
    first: int
    last: int

    def words(self, key: Sequence[int]) -> torch.Tensor:
        """The hashes of the elements: int32 [rows, columns]."""
        x = _int32s(self.down + key[0]) + _int32s(self.across)
        spare = torch.empty_like(x)
        for (shift, factor), add in zip(ROUNDS, (self._with_high(key[1]), _int32(key[2]), 0), strict=True):
            _fold(x, spare, shift).mul_(_int32(factor)).add_(add)
        return _fold(x, spare, 14)

    def _with_high(self, word: int) -> torch.Tensor | int:
        """A word of the key with the high half of each place mixed in, which is 0 for most tensors."""
        low, high = self.first >> 32, self.last >> 32
        if low == high:
            return _int32(word + high * SPREAD)
        return _int32s((self.down + self.across).bitwise_right_shift_(32).mul_(SPREAD).add_(word))


def _blocks(out: torch.Tensor, loops: Sequence[_Loop], limit: int) -> Iterator[tuple[torch.Tensor, _Block]]:
    """Views of at most `limit` elements that make up `out`, with where these are."""
    inner = len(loops)
    while inner and prod(loop.size for loop in loops[inner - 1 :]) <= limit:
        inner -= 1
    inner = min(inner, max(len(loops) - 1, 0))
    rows, columns = loops[:inner], loops[inner:]
    height, width = (prod(loop.size for loop in part) for part in (rows, columns))
    matrix, wide = out.view(height, width), min(width, limit)
    high = max(1, limit // wide)
    for left in range(0, width, wide):
        right = min(left + wide, width)
        across = _places(columns, torch.arange(left, right, device=out.device))
        for top in range(0, height, high):
            bottom = min(top + high, height)
            down = _places(rows, torch.arange(top, bottom, device=out.device)).view(-1, 1)
            first = _places(rows, top) + _places(columns, left)
            last = _places(rows, bottom - 1) + _places(columns, right - 1)
            yield matrix[top:bottom, left:right], _Block(down, across, first, last)


def _places(loops: Sequence[_Loop], number: Number) -> Number:
    """Where the elements of these numbers are in the whole tensor, as far as these loops go; they ascend."""
    if not loops:
        return number  # 0, the only one
    *outer, loop = loops
    if not outer:
        return loop.places(number)
    return _places(outer, number // loop.size) + loop.places(number % loop.size)


def _fold(x: torch.Tensor, spare: torch.Tensor, shift: int) -> torch.Tensor:
    """``x ^= x >> shift``, shifting zeros in; `spare` is overwritten."""
    torch.bitwise_right_shift(x, shift, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))


def _int32(number: int) -> int:
    """The number that has the same low 32 bits and fits in an int32."""
    return (number + 2**31) % 2**32 - 2**31


def _int32s(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.int32)  # which keeps the low 32 bits


def _register() -> Any:
    """Make the operators known to torch, on real tensors and on those that have shapes only."""
    library: Any = torch.library.Library("autopart", "DEF")  # type: ignore[no-untyped-call]
    piece = "SymInt[] size, int? dim=None, SymInt[] part=[], *"
    schemas = {
        uniform: f"uniform(Tensor? draw, {piece}, ScalarType dtype, Device device) -> Tensor",
        normal: f"normal(Tensor? draw, {piece}, ScalarType dtype, Device device) -> Tensor",
        bernoulli: f"bernoulli(Tensor? draw, float p, {piece}, Device device) -> Tensor",
    }

    def shaped(
        _: Any, size: Any, dim: Any = None, part: Any = (), *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def flags(_: Any, p: float, size: Any, dim: Any = None, part: Any = (), *, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=torch.bool, device=device)

    for function, schema in schemas.items():
        name = library.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopart::{name}", flags if function is bernoulli else shaped, lib=library)
        # A trace must keep the draws that nothing uses: the names of later ones count them.
        torch.fx.node.has_side_effect(getattr(torch.ops.autopart, name).default)
    return library


_LIBRARY = _register()
