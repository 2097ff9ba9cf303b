"""The strategies of `autopart.testing` draw what they say, and what they draw trains as on one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopart import schedules, testing
from autopart.ir.action import Schedule
from autopart.ir.mesh import Mesh
from tests.models import MLP


@given(mesh=testing.meshes(max_devices=6, max_stages=3))
def test_meshes_are_within_bounds(mesh: Mesh) -> None:
    assert 1 <= mesh.size <= 6 and mesh.degree("pp") <= 3 and {name for name, _ in mesh.axes} <= {"pp", "dp"}


@given(schedule=testing.schedules(max_ranks=3, max_microbatches=5))
def test_schedules_are_valid(schedule: Schedule) -> None:
    schedules.validate(schedule)
    assert schedule.ranks <= 3 and schedule.microbatches <= 5


@settings(max_examples=8)
@given(data=st.data())
def test_drawn_plans_and_batches_train_as_on_one_device(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = MLP().double()
    args = data.draw(testing.batches(model, (torch.randn(4, 8), torch.randn(4, 3)), max_samples=6))
    assert len(args[0]) == len(args[1]) <= 6
    plan = data.draw(testing.plans(model, args, max_devices=3))
    assert plan.mesh.size <= 3 and plan.batch == max(len(args[0]), 1)
    testing.assert_parity(model, args, plan=plan, steps=2)


def test_a_module_can_say_what_a_batch_looks_like() -> None:
    class Sampled(nn.Linear):
        def example_batch(self) -> tuple[torch.Tensor, ...]:
            return (torch.ones(3, 4),)

    @settings(max_examples=3)
    @given(data=st.data())
    def draws(data: st.DataObject) -> None:
        (x,) = data.draw(testing.batches(Sampled(4, 2)))
        assert x.shape[1:] == (4,)

    draws()
    with pytest.raises(ValueError, match="example_batch"):
        given(batch=testing.batches(nn.Linear(4, 2)))(lambda batch: None)()
