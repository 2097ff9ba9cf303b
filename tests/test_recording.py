"""The recording world sees what a text does, and refuses what no world could do right."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.codegen.parsed import body_names, load
from autopart.codegen.recording import Recording, record
from autopart.codegen.recording_batch import RecordingBatch
from autopart.codegen.recording_world import RecordingWorld
from autopart.codegen.shapes import Bodies, Samples, Spec
from autopart.ir.action import Action, Kind
from autopart.ir.placement import Modes
from autopart.ir.state import Parameter, State, Unit

F32 = torch.float32
STATE = State((Unit("fc", (Parameter("fc.weight", (4, 3), F32),), True, Modes(), (0,)),), ())
HEAD = """
import torch
aten = torch.ops.aten
DEVICE = torch.device("cpu")

def fc_forward(b, B, x, weight):
    y = aten.mm.default(x, aten.t.default(weight))
    return y, (x,)

def fc_backward(b, B, dy, x, weight):
    return (aten.mm.default(aten.t.default(dy), x),)

def edge_1_0(b):
    return (((b, 4), torch.float32),)

"""
STEP = """
def step(world, batch):
    saved = world.store()
    for k in range(2):
        with world.action("F", stage=0, microbatch=k):
            y, saved[k] = fc_forward(batch.sizes[k], batch.size, batch.input("x", k), *world.parameters("fc"))
        world.send((y,), stage=0, to=1, microbatch=k)
    for k in range(2):
        (dy,) = world.recv(edge_1_0(batch.sizes[k]), stage=0, source=1, microbatch=k)
        with world.action("B", stage=0, microbatch=k):
            grads = fc_backward(batch.sizes[k], batch.size, dy, *saved.pop(k), *world.parameters("fc"))
            world.accumulate("fc", grads)
    world.all_reduce("fc", axis="dp")
    return {"loss": world.total([], shape=(), dtype=torch.float32)}
"""


def recorded(
    step: str, *, head: str = HEAD, bodies: Bodies | None = None, sizes: tuple[int, ...] = (3, 2)
) -> Recording:
    batch = RecordingBatch({"x": lambda b: Spec((b, 3), F32)}, sizes, sum(sizes))
    return record(
        head + dedent(step), "<rank 0>", RecordingWorld(STATE, (batch.size,), 0, {}), batch, bodies or Bodies()
    )


def test_a_text_is_seen_whole_and_in_order() -> None:
    found = recorded(STEP)
    assert [str(action) for action in found.actions] == [
        *("0F0", "0SEND0>1", "0F1", "0SEND1>1", "0RECV0>1", "0B0", "0RECV1>1", "0B1", "-1REDUCE-1@fc"),
    ]
    calls = [event.call for event in found.events]
    assert calls[:6] == ["action", "parameters", "send", "action", "parameters", "send"]
    assert calls[6:10] == ["recv", "action", "parameters", "accumulate"]
    assert calls[-2:] == ["all_reduce", "total"]
    sends = [event for event in found.events if event.call == "send"]
    assert [event.what for event in sends] == [(Spec((3, 4), F32),), (Spec((2, 4), F32),)]
    assert [spec.microbatch for event in sends for spec in event.what if spec] == [0, 1]
    added = next(event for event in found.events if event.call == "accumulate")
    assert added.within == Action(Kind.B, 0, 0)
    assert (HEAD + STEP).splitlines()[added.line - 1].strip() == 'world.accumulate("fc", grads)'
    assert [found.calls[grad.call].function for grad in added.what if grad] == ["fc_backward"]
    assert found.kept == () and found.stored == 2
    assert found.result == {"loss": Spec((), F32)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("saved.pop(k), *world", "saved.pop(1 - k), *world", "microbatch 0 and 1 are used together in 0B0"),
        ('batch.input("x", k)', 'batch.input("x", 0)', "microbatch 0 and 1 are used together in 0F1"),
        ("fc_forward(batch.sizes[k]", "fc_forward(batch.sizes[1]", "microbatch 0 and 1 are used together in 0F0"),
        (
            "edge_1_0(batch.sizes[k])",
            "edge_1_0(batch.sizes[0])",
            "belongs to microbatch 0 is passed on as microbatch 1",
        ),
        ("to=1, microbatch=k", "to=1, microbatch=0", "belongs to microbatch 1 is passed on as microbatch 0"),
        ("*saved.pop(k)", "*saved.pop(0)", "nothing is stored for microbatch 0"),
        ("*saved.pop(k)", "*saved[k]", "read without being taken"),
        ("y, saved[k] =", "y, saved[0] =", "microbatch 0 is overwritten"),
        ('("fc", grads)', '("fc", (dy,))', r"shapes float32\[3, 4\], its parameters float32\[4, 3\]"),
        ('("fc", grads)', '("fd", grads)', "no unit is called 'fd'"),
        ('world.action("F"', 'world.action("G"', "'G' is not a valid Kind"),
        ("world.total([]", 'world.total([Spec((2,), "x")]', "Spec"),
        ("def step", "def stop", "defines no function step"),
        ("grads = fc_backward", "grads = fd_backward", "fd_backward"),
    ],
)
def test_what_no_world_could_do_is_refused_where_it_stands(old: str, new: str, message: str) -> None:
    assert STEP.count(old) >= 1
    with pytest.raises((TypeError, ValueError, NameError), match=message):
        recorded(STEP.replace(old, new))


def test_an_error_notes_the_action() -> None:
    with pytest.raises(TypeError) as caught:
        recorded(STEP.replace("*saved.pop(k)", "*saved.pop(0)"))
    assert caught.value.__notes__ == ["stage 0, microbatch 1, action 0B1"]


def test_what_is_stored_and_not_taken_is_kept() -> None:
    found = recorded("def step(world, batch):\n    a = world.store()\n    a[0] = 1\n    a[1] = [2]\n    a.pop(1)\n")
    lines = (HEAD + "def step").splitlines()
    assert found.kept == (len(lines) + 2, len(lines) + 3)


def test_an_output_is_joined_from_every_microbatch() -> None:
    step = """
    def step(world, batch):
        out = {}
        for k in range(2):
            out[k], _ = fc_forward(batch.sizes[k], batch.size, batch.input("x", k), *world.parameters("fc"))
        return {"out": world.joined(out, dim=0)}
    """
    assert recorded(step).result == {"out": Spec((5, 4), F32)}
    with pytest.raises(TypeError, match=r"parts of the microbatches \[0\], not of all 2"):
        recorded(step.replace("range(2)", "range(1)"))
    with pytest.raises(TypeError, match="joined along dim 1"):
        recorded(step.replace("dim=0", "dim=1"))


def runs(head: str, bodies: Bodies, sizes: tuple[int, ...]) -> list[int]:
    """The microbatch sizes for which a recording runs the forward."""
    counted = head.replace("    y = aten.mm", "    runs.append(b)\n    y = aten.mm")
    found: list[int] = recorded(STEP, head="runs = []\n" + counted, bodies=bodies, sizes=sizes).names["runs"]
    return found


def test_bodies_are_run_once_a_set_of_shapes() -> None:
    bodies = Bodies()
    assert [runs(HEAD, bodies, sizes) for sizes in ((3, 2), (2, 3), (3, 3), (4, 3))] == [[3, 2], [], [], [4]]


def test_bodies_that_read_the_whole_size_are_run_for_each() -> None:
    bodies, head = Bodies(), HEAD.replace("return y, (x,)", "return y * (1 / B), (x,)")
    assert [runs(head, bodies, sizes) for sizes in ((3, 2), (2, 3), (3, 3))] == [[3, 2], [], [3]]


def test_bodies_that_call_helpers_are_told_apart_by_them() -> None:
    helped = HEAD.replace("return y, (x,)", "return widened(y), (x,)")
    one = "\ndef widened(y):\n    return y\n"
    two = "\ndef widened(y):\n    return aten.cat.default([y, y], 1)\n"
    bodies = Bodies()
    widths = [recorded(STEP, head=helped + helper, bodies=bodies).events[2].what[0] for helper in (one, two)]
    assert widths == [Spec((3, 4), F32), Spec((3, 8), F32)]


def test_an_op_that_knows_no_meta_tensors_is_run_on_fake_ones() -> None:
    refusing = '    if DEVICE.type == "meta":\n        raise NotImplementedError\n    y = aten.mm'
    head = HEAD.replace("    y = aten.mm", refusing)
    assert recorded(STEP, head=head).actions == recorded(STEP).actions


def test_bodies_take_keywords() -> None:
    named = STEP.replace("batch.size, dy,", "batch.size, dy=dy, x=").replace(
        "x= *saved.pop(k), *world", "x=saved.pop(k)[0], weight=world"
    )
    named = named.replace('weight=world.parameters("fc")', 'weight=world.parameters("fc")[0]')
    assert recorded(named).actions == recorded(STEP).actions


@given(st.integers(1, 9), st.integers(-3, 3), st.integers(1, 5))
def test_sizes_computed_from_samples_are_ints_that_remember(count: int, offset: int, factor: int) -> None:
    b = Samples(count, 7)
    made: tuple[Any, ...] = (factor * b, b * factor, b + offset, offset + b, b - offset)
    assert made == (factor * count, count * factor, count + offset, offset + count, count - offset)
    assert {size.microbatch for size in made} == {7}


def test_specs_compare_by_shape_and_dtype() -> None:
    spec = Spec((2,), F32)
    assert replace(spec, microbatch=1, source=("parameter", "fc"), call=3) == spec
    assert hash(replace(spec, microbatch=1)) == hash(spec)
    assert Spec((2,), torch.float64) != spec


def test_the_functions_that_compute_are_found() -> None:
    prologue = "def prologue(B, y):\n    return y\n"
    assert body_names(HEAD + prologue + dedent(STEP)) == ("fc_forward", "fc_backward", "prologue")


def test_a_loaded_text_shows_its_lines_in_errors() -> None:
    names = load("x = 1\ndef fail():\n    raise ValueError(x)\n", "<rank 5>", torch.device("cpu"))
    assert names["x"] == 1 and names["DEVICE"] == torch.device("cpu")
    with pytest.raises(ValueError) as caught:
        names["fail"]()
    assert str(caught.traceback[-1].statement).strip() == "raise ValueError(x)"


def test_the_prologue_is_told_apart_by_what_it_is_given() -> None:
    head = HEAD + "def prologue(B, y):\n    return aten.neg.default(y)\n"
    step = """
    def step(world, batch):
        return [prologue(batch.size, y) for y in (batch.whole("x"), world.buffer("n"))]
    """
    batch = RecordingBatch({"x": lambda b: Spec((b, 3), F32)}, (2,), 2)
    found = record(
        head + dedent(step),
        "<rank 0>",
        RecordingWorld(STATE, (batch.size,), 0, {"n": Spec((7,), F32)}),
        batch,
        Bodies(),
    )
    assert found.result == [Spec((2, 3), F32), Spec((7,), F32)]
