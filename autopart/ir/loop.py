"""Loops: a run of a function's nodes that is run chunk after chunk, so that what it makes is never there whole.

before: logits = x @ w; loss = cross_entropy(logits, labels)
after:  for each chunk of the tokens:  part = x[chunk] @ w; loss += cross_entropy(part, labels[chunk])

A function's nodes say what it computes, chunks or not: a loop only says how some of them are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from autopart.ir.graph import Dim, Size

Path = tuple[int | str, ...]
"""Where an argument is in a node: its position, or its name if a keyword; then places inside tuples."""


@dataclass(frozen=True, slots=True)
class Along:
    """A value with a part for each chunk: dim `dim`, of ``outer x length x rest`` elements, is cut in its middle.

    `part` is the name of the part at hand, in the loop.
    """

    name: str
    part: str
    dim: int
    outer: Dim = 1
    rest: Dim = 1


@dataclass(frozen=True, slots=True)
class Sized:
    """A size in the arguments of node number `node` of the function: `times` elements for each one of a chunk."""

    node: int
    path: Path
    times: Dim


@dataclass(frozen=True, slots=True)
class Loop:
    """Nodes `start` to `stop` - 1 of a function, run for at most `count` chunks of `length`, as even as can be.

    Equal chunks, but for the last: ``ceil(length / count)`` each. `cuts` are the values from before the loop that it
    takes chunk by chunk, `joined` those of which it makes a part a chunk, `summed` pairs each sum over the chunks with
    the name of what a chunk adds. `inner` are the values in between (dim, and elements for each one of a chunk), and
    `sizes` the arguments that go with the length of a chunk. `names` are what the text calls the beginning of a chunk,
    its length and that of most. `module` is the user's, for messages and comments.
    """

    start: int
    stop: int
    length: Dim
    count: int
    cuts: tuple[Along, ...]
    joined: tuple[Along, ...]
    summed: tuple[tuple[str, str], ...]
    inner: tuple[tuple[str, int, Dim], ...]
    sizes: tuple[Sized, ...]
    names: tuple[str, str, str]
    module: str

    @property
    def made(self) -> tuple[str, ...]:
        """What is there whole after the loop."""
        return (*(along.name for along in self.joined), *(name for name, _ in self.summed))

    def longest(self, batch: int) -> int:
        """The length of the longest chunk at a microbatch of `batch` samples."""
        return -(-self._whole(batch) // self.count)

    def lengths(self, batch: int) -> tuple[int, ...]:
        """The lengths of all chunks at a microbatch of `batch` samples."""
        whole, most = self._whole(batch), max(1, self.longest(batch))
        return tuple(min(most, whole - start) for start in range(0, whole, most))

    def _whole(self, batch: int) -> int:
        return int(self.length.at(batch)) if isinstance(self.length, Size) else self.length


@dataclass(frozen=True, slots=True)
class Portion(Size):
    """A size inside a loop: `times` elements for each one of the chunk at hand, whose length the text calls `called`.

    As a plain size it is what the longest chunk has, up to a fraction of it where that depends on the batch.
    """

    times: Dim = 1
    called: str = "n"
    loop: Loop | None = None

    @classmethod
    def of(cls, loop: Loop, times: Dim) -> Portion:
        """The size in a loop."""
        each, most = loop.length, loop.longest(1)
        if isinstance(each, Size):  # then nothing else in the dim moves with the batch
            assert isinstance(times, int)
            bound = Size(Fraction(each.per_sample * times) / loop.count, -(-each.constant * times // loop.count))
        elif isinstance(times, Size):
            bound = Size(times.per_sample * most, times.constant * most)
        else:
            bound = Size(0, times * most)
        return cls(bound.per_sample, bound.constant, times=times, called=loop.names[1], loop=loop)

    def at(self, batch: int) -> int:
        """The number in the longest chunk, at a microbatch of `batch` samples."""
        assert self.loop is not None
        times = int(self.times.at(batch)) if isinstance(self.times, Size) else self.times
        return times * self.loop.longest(batch)

    def text(self, batch: str) -> str:
        """Python source for the number."""
        if self.times == 1:
            return self.called
        if isinstance(self.times, int):
            return f"{self.times} * {self.called}"
        plain = self.times.constant == 0 and self.times.over == 1
        each = self.times.text(batch)
        return f"{each if plain else f'({each})'} * {self.called}"
