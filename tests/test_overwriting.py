"""A body writes over memory of its own that nothing reads later; a text that does otherwise is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopart import VerificationError, verify
from autopart.api.compiler import captured_step, lower, solve
from autopart.capture import read
from autopart.codegen.parsed import executed, parse
from autopart.codegen.shapes import META, Bodies, Spec
from autopart.ir.program import Program
from autopart.passes.segment import segment
from tests.models import MODELS


@torch.library.custom_op("overwriting_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operator with a value of its own, which it writes over."""
    return x.clone().mul_(2)


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made += made.t()
    return made


HEAD = """import torch

aten = torch.ops.aten
DEVICE = torch.device("cpu")


def body(world, b, B, x, w, row):
"""


def run(text: str) -> tuple[Spec, ...]:
    """What a body of these lines returns for `x` of [6, 6], `w` alike and `row` of [6]."""
    source = HEAD + "".join(f"    {line.strip()}\n" for line in text.strip().splitlines())
    parsed = parse(source, "<rank 0>")
    names = executed(parsed.code, source, "<rank 0>", META)
    square = Spec((6, 6), torch.float32)
    args = (6, 12, square, square, Spec((6,), torch.float32))
    made = Bodies().call(names["body"], parsed.bodies["body"], args, {"tp": 0})[0]
    return made if isinstance(made, tuple) else (made,)


GOOD = {
    "an operand": """
        mm = aten.mm.default(x, w)
        tanh = aten.tanh.out(mm, out=mm)
        return tanh""",
    "and then its result, and a row of the operand": """
        mm = aten.mm.default(x, w)
        view = aten.view.default(mm, [6, 6])
        tanh = aten.tanh.out(view, out=view)
        add = aten.add_.Tensor(tanh, row)
        del mm, view
        return add, aten.neg.default(add)""",
    "another dead value": """
        mm = aten.mm.default(x, w)
        sum = aten.sum.default(mm)
        other = aten.mm.out(x, w, out=mm)
        return other, sum""",
    "under one name, as people write": """
        y = x @ w
        y = y.mul_(2)
        y += row
        return y""",
    "with the number that a call makes": """
        mm = aten.mm.default(x, w)
        fill = aten.masked_fill_.Scalar(mm, row > 0, float("-inf"))
        return fill""",
    "what an operator makes for itself": """
        mm = aten.mm.default(x, w)
        return torch.ops.overwriting_test.twice.default(mm), mm""",
    "random numbers of its own": """
        draw = torch.ops.autopart.normal.default(None, [6, 6], None, dtype=torch.float32, device=DEVICE)
        add = aten.add.out(x, draw, out=draw)
        return add""",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_may_be_written_over(name: str) -> None:
    assert run(GOOD[name])[0] == Spec((6, 6), torch.float32)


FAULTS = {
    "an input": ("y = aten.tanh.out(x, out=x)\nreturn y", "x is written over, but is not this function's own"),
    "an input, as people write": ("x += w\nreturn x", "x is written over, but is not"),
    "a part of an input": ("x[0] = 0\nreturn x", "is written over, but is not this function's own"),
    "a view of an input": (
        "v = aten.t.default(x)\ny = aten.tanh.out(v, out=v)\nreturn y",
        "v is written over, but is not this function's own",
    ),
    "what may be a view of an input": (
        "t = aten.t.default(x)\nv = aten.reshape.default(t, [36])\ny = aten.tanh.out(v, out=v)\nreturn y",
        "v is written over, but is not this function's own",
    ),
    "what is read later": (
        "m = aten.mm.default(x, w)\ny = aten.tanh.out(m, out=m)\nreturn aten.mul.Tensor(y, m)",
        "m is written over, but line 10 reads m",
    ),
    "what is returned": ("m = x @ w\ny = aten.tanh.out(m, out=m)\nreturn y, (m,)", "line 10 reads m"),
    "of which a view is returned": (
        "m = x @ w\nv = aten.split.Tensor(m, 3)\ny = aten.tanh.out(m, out=m)\nreturn y, v",
        "line 11 reads v, which lies there",
    ),
    "that is the base of a view": (
        "m = x @ w\nv = m[:3]\nz = aten.tanh.out(v, out=v)\nreturn z, aten.sum.default(m)",
        "v is written over, but line 11 reads m",
    ),
    "of which a view may be": (
        "m = x @ w\nt = m.t()\nv = aten.reshape.default(aten.t.default(m), [36])\nr = aten.reshape.default(t, [36])\n"
        "y = aten.tanh.out(r, out=r)\nreturn y, t",
        "line 13 reads t",
    ),
    "in a tuple": ("m = x @ w\nkept = (m, x)\ny = aten.tanh.out(m, out=m)\nreturn y, kept", "line 11 reads kept"),
    "without a name": ("m = x @ w\naten.tanh.out(m, out=m)\nreturn m", "line 10 reads m"),
    "amid other things": (
        "m = x @ w\nreturn aten.mul.Tensor(aten.tanh.out(m, out=m), m)",
        "amid other things; give it a line of its own",
    ),
    "in a loop": (
        "m = x @ w\nfor i in range(2): y = m.tanh_()\nreturn y",
        "m is written over in a loop, the next turn of which needs it",
    ),
    "elements that are read after that": (
        "m = x @ w\ny = aten.cumsum.out(m, 0, out=m)\nreturn y",
        "aten.cumsum.out reads of m what it has written over",
    ),
    "elements of a product": ("m = x @ w\ny = aten.mm.out(m, w, out=m)\nreturn y", "aten.mm.out reads of m"),
    "other elements of it": (
        "m = x @ w\nt = aten.t.default(m)\ny = aten.add.out(m, t, out=m)\nreturn y",
        "aten.add.out reads of m what it has written over",
    ),
    "what a collective has": (
        'm = x @ w\ns = world.all_reduce_values(m, axis="tp", how="sum")\ny = aten.tanh.out(m, out=m)\nreturn y, s',
        "m is written over, but is not this function's own",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_may_not_be_written_over(name: str) -> None:
    text, message = FAULTS[name]
    with pytest.raises(ValueError, match=message):
        run(text)


@cache
def program(name: str) -> Program:
    model, args, kwargs = MODELS[name]()
    segmented = segment(captured_step(model, read(model, args, kwargs), None, False, "direct"))
    return lower(segmented, solve(segmented, mesh={"pp": 2}, microbatches=3))


def changed(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert old in text, text
        return text.replace(old, new)

    return edit


PROGRAMS: dict[str, tuple[int, Callable[[str], str], str]] = {
    "a saved value": (
        0,
        changed(
            "tanh_backward = aten.tanh_backward.default(dx, tanh)",
            "tanh_backward = aten.tanh_backward.grad_input(dx, tanh, grad_input=tanh)",
        ),
        r"rule text: rank 0, stage 0, microbatch 0, action 0B0 \(line \d+: `tanh_backward = .*`\): ValueError: tanh",
    ),
    "a gradient that comes in": (
        0,
        changed("tanh_backward.default(dx, tanh)", "tanh_backward.grad_input(dx, tanh, grad_input=dx)"),
        "dx is written over, but is not this function's own",
    ),
    "a parameter": (
        1,
        changed(
            "    mm = aten.mm.default(mul_1, weight)",
            "    weight = aten.mul_.Tensor(weight, 2)\n    mm = aten.mm.default(mul_1, weight)",
        ),
        "weight is written over, but is not this function's own",
    ),
    "the caller's input": (
        1,
        changed("sub = aten.sub.Tensor(addmm, y)", "sub = aten.sub.out(addmm, y, out=y)"),
        "y is written over, but is not this function's own",
    ),
    "what is saved": (
        1,
        changed("sub = aten.sub.Tensor(addmm, y)", "sub = aten.sub.out(addmm, y, out=addmm)"),
        r"addmm is written over, but line \d+ reads addmm",
    ),
    "what a stage hands on": (
        0,
        changed("    return (layers_1,), saved", "    aten.mul_.Tensor(layers_1, 2)\n    return (layers_1,), saved"),
        "rule text: rank 0, stage 0, microbatch 0, action 0F0 .*aten.mul_.Tensor",
    ),
    "what is being sent": (
        0,
        changed("world.send(acts_0_1.pop(", "aten.mul_.Tensor(acts_0_1[0], 2), world.send(acts_0_1.pop("),
        "rule text: rank 0.*a stored value is read without being taken",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_planted_faults(name: str) -> None:
    good = program("mlp")
    verify(good)
    rank, edit, message = PROGRAMS[name]
    ranks = [replace(each, source=edit(each.source)) if each.rank == rank else each for each in good.ranks]
    with pytest.raises(VerificationError, match=message):
        verify(replace(good, ranks=tuple(ranks)))


def test_every_result_that_takes_a_place_is_guarded() -> None:
    """Whatever the pass writes over, a later read of it is refused."""
    good, count = program("mlp"), 0
    for rank in good.ranks:
        lines = rank.source.splitlines()
        for number, line in enumerate(lines):
            if "out=" not in line:
                continue
            name = line.rpartition("out=")[2].rstrip(")")
            read = [*lines[: number + 1], f"    again = aten.neg.default({name})", *lines[number + 1 :]]
            edited = replace(rank, source="\n".join(read) + "\n")
            message = f"{name} is written over, but line {number + 2} reads {name}"
            with pytest.raises(VerificationError, match=message):
                verify(replace(good, ranks=tuple(edited if each is rank else each for each in good.ranks)))
            count += 1
    assert count >= 3
