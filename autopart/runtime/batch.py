"""The batch as a rank's program sees it: the whole of it, and this rank's microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autopart.draws import Draws
from autopart.ir.mesh import pieces


class Batch:
    """Inputs by their path in the call, cut as by ``torch.tensor_split``: over data ranks, then over microbatches."""

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        dims: Mapping[str, int],
        size: int,
        parts: int,
        part: int,
        microbatches: int,
        draws: Draws,
    ) -> None:
        self.size = size
        shares = pieces(size, parts)
        self.sizes = pieces(shares[part], microbatches)
        self._inputs, self._dims, self._draws = inputs, dims, draws
        self._starts = [sum(shares[:part]) + sum(self.sizes[:k]) for k in range(microbatches)]

    def input(self, name: str, k: int) -> torch.Tensor:
        """The piece of an input for microbatch `k`; an input that is not split comes whole."""
        tensor = self._inputs[name]
        if name not in self._dims:
            return tensor
        return tensor.narrow(self._dims[name], self._starts[k], self.sizes[k]).contiguous()

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

    def share(self, part: int, parts: int) -> int:
        """The number of samples of a data rank."""
        return pieces(self.size, parts)[part]

    def whole(self, name: str) -> torch.Tensor:
        """The input for the whole batch."""
        return self._inputs[name]
