"""The batch as a rank's program sees it: its size, this data rank's samples, and the microbatches of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from autopart.draws import Draws
from autopart.ir.mesh import pieces


class Batch:
    """Inputs by their path in the call, cut over data ranks, then, as by ``torch.tensor_split``, over microbatches.

    `shares` are the samples of every data rank, `part` is this one's place among them. The inputs hold the whole
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
    ) -> None:
        self.shares, self.samples, self.size = tuple(shares), shares[part], sum(shares)
        sizes = pieces(self.samples, microbatches)
        self.sizes = dict(enumerate(sizes, first))
        self._inputs, self._dims, self._draws = inputs, dims, draws
        before = sum(shares[:part])
        self._starts = {first + k: before + sum(sizes[:k]) for k in range(microbatches)}
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
