"""What the user's module looks like after the user's Python ran: as before."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from torch import nn

from autopart.capture.guard import fake_instead_of_meta, untouched
from autopart.errors import CaptureError


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.steps = 3
    made.nested = [{"a": (deque([1]), {2})}, defaultdict(list), Counter("aa"), OrderedDict(z=1)]
    made.nested.append(made.nested)  # a cycle
    return made


def test_attributes_and_containers_are_put_back() -> None:
    made = module()
    nested, inner, weight = made.nested, made.nested[0]["a"], made[0].weight
    with pytest.raises(CaptureError, match="changes "), untouched(made):
        made.steps += 1
        made.fresh = torch.ones(2)
        del made[1].eps
        inner[0].append(5)
        inner[1].add(9)
        nested[0]["b"] = 1
        nested[1]["k"].append(2)
        nested[2]["a"] = 0
        nested.pop(0)
        made[0].weight = nn.Parameter(torch.zeros(2, 2))
        made[0].register_buffer("extra", torch.zeros(1))
        made.add_module("more", nn.Linear(1, 1))
        made.eval()
    assert made.steps == 3 and not hasattr(made, "fresh") and made[1].eps == 1e-5
    assert (made.nested is nested and nested[0] == {"a": ({1}, {2})}) or nested[0]["a"] == (deque([1]), {2})
    assert nested[0]["a"] is inner and dict(nested[1]) == {} and nested[2] == Counter("aa") and nested[4] is nested
    assert made[0].weight is weight and not hasattr(made[0], "extra") and len(made) == 2
    assert made.training and made[1].training


def test_put_back_after_an_error() -> None:
    made = module()
    with pytest.raises(RuntimeError, match="user"), untouched(made):
        made.steps = 0
        torch.rand(1)
        raise RuntimeError("user")
    assert made.steps == 3


def test_hooks_are_off_meanwhile() -> None:
    made, ran = module(), []
    made.register_forward_hook(lambda *_: ran.append(1))
    made[0].register_forward_pre_hook(lambda *_: ran.append(2))
    with untouched(made):
        made(torch.ones(3, 2))
        assert ran == []
    made(torch.ones(3, 2))
    assert ran == [2, 1]


def test_torch_generator_is_put_back() -> None:
    made = module()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with untouched(made):
        torch.rand(5)
        torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, lambda: numpy.random.randn(3)])
def test_python_and_numpy_randomness_is_refused_and_put_back(draw: object) -> None:
    random.seed(3)
    numpy.random.seed(3)
    states = random.getstate(), numpy.random.get_state()
    with pytest.raises(CaptureError, match="draws random numbers from Python or numpy"), untouched(module()):
        draw()  # type: ignore[operator]
    assert random.getstate() == states[0]
    assert (numpy.random.get_state()[1] == states[1][1]).all() and numpy.random.get_state()[2:] == states[1][2:]


def test_meta_tensors_become_fake_and_come_back() -> None:
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made[0].register_parameter("again", made[0].weight)
    made[0].bias.requires_grad_(False)
    before = dict(made.named_parameters(remove_duplicate=False))
    with untouched(made):
        fake_instead_of_meta(made)
        assert {p.device.type for p in (*made.parameters(), *made.buffers())} == {"cpu"}
        assert made[0].again is made[0].weight
        assert made[0].weight.requires_grad and not made[0].bias.requires_grad
    assert all(before[name] is p for name, p in made.named_parameters(remove_duplicate=False))
