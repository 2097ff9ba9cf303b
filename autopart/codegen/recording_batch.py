"""The batches of shapes that a rank's text is given: one, or several in a row for a loop whose steps overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopart.codegen.shapes import Samples, Spec, shown


class RecordingBatch:
    """A batch of shapes: `sizes` of this data rank's microbatches, `size` of the whole batch.

    `draws` has what each random operation is computed from. Where `local`, the inputs hold the samples of this data
    rank alone.
    """

    def __init__(
        self,
        inputs: Mapping[str, Callable[[int], Spec]],
        sizes: Sequence[int],
        size: int,
        draws: Mapping[str, Spec] | None = None,
        *,
        local: bool = False,
    ) -> None:
        self.inputs, self.size, self.samples, self.local = inputs, size, sum(sizes), local
        self.draws = draws or {}
        self.sizes = tuple(Samples(number, k) for k, number in enumerate(sizes))

    def input(self, name: str, k: int) -> Spec:
        """The piece of an input for microbatch k."""
        found = self.inputs[name](int(self.sizes[k]))
        return replace(found, microbatch=self.sizes[k].microbatch, source=("input", name))

    def cut(self, tangent: Spec, k: int, *, dim: int) -> Spec:
        """The piece of the gradient of an output for microbatch k."""
        rows, rest = divmod(tangent.shape[dim], self.size)
        if rest or not tangent.whole:
            raise TypeError(f"{shown([tangent])} is cut along dim {dim}, which has not the samples of the whole batch")
        shape = (*tangent.shape[:dim], rows * int(self.sizes[k]), *tangent.shape[dim + 1 :])
        return Spec(shape, tangent.dtype, self.sizes[k].microbatch, source=tangent.source)

    def random(self, name: str, k: int) -> Spec:
        """What a draw of microbatch k is computed from."""
        if name not in self.draws:
            raise TypeError(f"no random operation is called {name!r}")
        return replace(self.draws[name], microbatch=self.sizes[k].microbatch, source=("random", name))

    def whole(self, name: str) -> Spec:
        """The whole input; where it is local, its shape for this data rank's samples."""
        found = self.inputs[name](self.samples if self.local else self.size)
        return replace(found, own=self.local, source=("input", name))


class RecordingBatches(RecordingBatch):
    """Several batches like `one` after each other; microbatches are counted over all of them."""

    def __init__(self, one: RecordingBatch, batches: int) -> None:
        super().__init__(one.inputs, one.sizes * batches, one.size, one.draws)
        self.samples, self.batches, self.each = one.samples, batches, len(one.sizes)
        self.entering, self.count = range(0), 0

    def of(self, k: int) -> RecordingBatches:
        """The batch of microbatch k, which must have come."""
        if not 0 <= k < self.count:
            raise TypeError(f"microbatch {k} is of a batch that has not come")
        return self

    def once(self, function: Callable[..., Any], *args: Any) -> Any:
        """What depends on a whole batch."""
        return function(*args)

    def left(self, ahead: int) -> range:
        """The ticks after the last batch."""
        return range(self.count, self.count + ahead)

    def coming(self) -> Iterator[range]:
        """The batches come, one after the other: the microbatches of each."""
        for _ in range(self.batches):
            self.entering = range(self.count, self.count + self.each)
            self.count += self.each
            yield self.entering
