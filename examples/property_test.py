"""Your own model, property-tested: under any plan it must train as it does on one device. No GPU, no processes.

Run it with pytest (`pytest examples/property_test.py`) or alone (`python examples/property_test.py`).
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopart import testing


class Regressor(nn.Module):
    """A residual model with two losses, one weighted: the kind of thing that hand-made parallelism gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()) for _ in range(4))
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        error = self.last(hidden) - target
        return error.square().mean() + 0.1 * error.abs().mean()


EXAMPLES = 10


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_trains_as_on_one_device(data: st.DataObject) -> None:
    """Loss, gradients and parameters after some steps are the plain module's, whatever the plan and the batch."""
    model = Regressor().double()
    args = data.draw(testing.batches(model, (torch.randn(4, 6), torch.randn(4, 3))))
    plan = data.draw(testing.plans(model, args))
    testing.assert_parity(model, args, plan=plan)


if __name__ == "__main__":
    test_trains_as_on_one_device()
    print(f"{EXAMPLES} plans, each the same as one device")
