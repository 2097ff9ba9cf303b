"""Rolling: texts that differ in numbers only become one in a loop variable; a repeating sequence becomes a loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![A-Za-z_\d])\d+")


def affine(numbers: Sequence[int], places: Sequence[int], variable: str) -> str | None:
    """Source for the numbers as a linear function of the loop variable's values `places`; None if they are not one."""
    if all(n == numbers[0] for n in numbers):
        return str(numbers[0])
    step, rest = divmod(numbers[1] - numbers[0], places[1] - places[0])
    start = numbers[0] - step * places[0]
    if rest or any(n != start + step * p for n, p in zip(numbers, places, strict=True)):
        return None
    match step:
        case 1:
            return variable if start == 0 else f"{variable} {'+' if start > 0 else '-'} {abs(start)}"
        case -1:
            return f"{start} - {variable}"
        case _:
            product = f"{step} * {variable}"
            return product if start == 0 else f"{product} {'+' if start > 0 else '-'} {abs(start)}"


def template(texts: Sequence[str], places: Sequence[int], variable: str = "i") -> str | None:
    """One text for all of them, in terms of the loop variable; None if they differ in more than numbers linear in it.

    before: world.parameters("h.2"), world.parameters("h.3")     after: world.parameters(f"h.{i}")
    """
    if all(text == texts[0] for text in texts):
        return texts[0]
    pieces = [_NUMBER.split(text) for text in texts]
    padded = any(number != str(int(number)) for text in texts for number in _NUMBER.findall(text))
    if padded or any(piece != pieces[0] for piece in pieces):
        return None
    numbers = list(zip(*([int(n) for n in _NUMBER.findall(text)] for text in texts), strict=True))
    made = [pieces[0][0]]
    opening = -1
    for piece, column in zip(pieces[0][1:], numbers, strict=True):
        source = affine(column, places, variable)
        if source is None:
            return None
        before = "".join(made)
        quoted = before.count('"') % 2 == 1
        if quoted and not source.isdigit():
            opening = before.rindex('"')
            if before[opening - 1 : opening] != "f":
                made = [before[:opening] + "f" + before[opening:]]
            source = "{" + source + "}"
        made += [source, piece]
    return "".join(made)


def listed(names: Sequence[str]) -> str:
    """Source for a tuple of strings; three and more that differ in a number that counts up or down are one piece.

    before: embed, h.0, h.1, h.2      after: ("embed", *(f"h.{i}" for i in range(3)))
    """
    pieces, position = [], 0
    while position < len(names):
        end, piece = position + 1, f'"{names[position]}"'
        while end < len(names) and (longer := _counted(names[position : end + 1])) is not None:
            end += 1
            piece = longer if end - position > 2 else piece
        if end - position < 3:
            end, piece = position + 1, f'"{names[position]}"'
        pieces.append(piece)
        position = end
    return f"({', '.join(pieces)}{',' * (len(pieces) == 1)})"


def _counted(names: Sequence[str]) -> str | None:
    """Names as one piece of a tuple, if their last number counts up or down by 1 and nothing else changes."""
    numbers = [_NUMBER.findall(name) for name in names]
    if not all(numbers):
        return None
    places = [int(found[-1]) for found in numbers]
    step = places[1] - places[0]
    text = template([f'"{name}"' for name in names], places) if abs(step) == 1 else None
    if text is None or any(b - a != step for a, b in pairwise(places)):
        return None
    low, high = min(places), max(places) + 1
    span = f"range({low}, {high})" if low else f"range({high})"
    return f"*({text} for i in {span if step > 0 else f'reversed({span})'})"


@dataclass(frozen=True, slots=True)
class Loop(Generic[T]):
    """`items` repeated `count` times, the n-th time shifted by n times `stride`."""

    items: tuple[T, ...]
    count: int
    stride: int = 1


def periodic(items: Sequence[T], shift: Callable[[T, T], int | None]) -> list[T | Loop[T]]:
    """The sequence with its repetitions as loops: the longest coverage first found from the left, at least two rounds.

    ``shift(item, later)`` is by how much the second item is the first one shifted, None if it is not. All items of a
    round are shifted by the same number, at least 1, from round to round.
    """
    result: list[T | Loop[T]] = []
    position = 0
    while position < len(items):
        best = Loop(tuple(items[position : position + 1]), 1)
        for period in range(1, (len(items) - position) // 2 + 1):
            stride = shift(items[position], items[position + period])
            if stride is None or stride < 1:
                continue
            same = _same(items, position, period, stride, shift)
            rounds = 1 + same // period
            if rounds > 1 and rounds * period > best.count * len(best.items):
                best = Loop(tuple(items[position : position + period]), rounds, stride)
        result.append(best if best.count > 1 else items[position])
        position += best.count * len(best.items)
    return result


def _same(items: Sequence[T], start: int, period: int, stride: int, shift: Callable[[T, T], int | None]) -> int:
    """How many items from `start` on come again one period later, shifted by the stride."""
    count = 0
    while start + count + period < len(items):
        if shift(items[start + count], items[start + count + period]) != stride:
            break
        count += 1
    return count
