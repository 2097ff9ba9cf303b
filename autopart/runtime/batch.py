"""The batch as a rank's program sees it: its size, this data rank's samples, and the microbatches of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from autopart.draws import Draws
from autopart.ir.mesh import Span, spans_of


class Batch:
    """Inputs by their path in the call, cut over data ranks, then, as by ``torch.tensor_split``, over microbatches.

    `shares` are the samples of every part of the batch, `part` is this rank's place among them, and `spans` are the
    samples that it has in each microbatch: by default those of its part, as they are cut. The inputs hold the whole
    batch, or, where `local`, this data rank's share of it. Microbatches are counted from `first`.
    """

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        dims: Mapping[str, int],
        shares: Sequence[int],
        part: int,
        microbatches: int,
        draws: Draws,
        *,
        local: bool = False,
        first: int = 0,
        spans: Sequence[Span] = (),
    ) -> None:
        self.shares, self.size = tuple(shares), sum(shares)
        self._inputs, self._dims, self._draws = inputs, dims, draws
        before = sum(shares[:part])
        spans = spans or spans_of(before, shares[part], microbatches)
        self.samples = sum(count for _, count in spans)
        self.sizes = {first + k: count for k, (_, count) in enumerate(spans)}
        self._starts = {first + k: start for k, (start, _) in enumerate(spans)}
        self._first = before if local else 0  # the sample of the whole batch with which the inputs begin

    def input(self, name: str, k: int) -> torch.Tensor:
        """The piece of an input for microbatch `k`; an input that is not split comes whole."""
        tensor = self._inputs[name]
        if name not in self._dims:
            return tensor
        return tensor.narrow(self._dims[name], self._starts[k] - self._first, self.sizes[k]).contiguous()

    def cut(self, tangent: torch.Tensor, k: int, *, dim: int) -> torch.Tensor:
        """The piece of the gradient of an output, whose samples are along `dim`, for microbatch `k`."""
        rows = tangent.shape[dim] // self.size
        return tangent.narrow(dim, rows * self._starts[k], rows * self.sizes[k]).contiguous()

    def random(self, name: str, k: int) -> torch.Tensor:
        """What the random numbers of the operation `name` are computed from, for microbatch `k`."""
        return self._draws.of(name, self._starts[k], self.sizes[k], self.size)

    def given(self) -> Iterable[torch.Tensor]:
        """The caller's tensors, whole."""
        return self._inputs.values()

    def whole(self, name: str) -> torch.Tensor:
        """The input as it was passed: for the whole batch, or for all samples of this data rank."""
        return self._inputs[name]
