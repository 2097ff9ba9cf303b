"""Operators that may write over an operand give the same bits there, at all sizes, and compute where they write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from autopart.ir.graph import Node, Ref, Value
from autopart.rules.memory import FRESH, IN_PLACE, makes, overwriting

aten = torch.ops.aten
SHAPES = ((0, 5), (1, 1), (3, 7), (130, 1025), (2, 3, 33), (2, 9001))
DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
ARITHMETIC = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "exp.default", "tanh.default")

More = Callable[[torch.Tensor], Sequence[Any]]
MORE: dict[str, More] = {
    "pow.Tensor_Scalar": lambda x: [2],
    "masked_fill.Scalar": lambda x: [x > 0, -1e9],
    "masked_fill.Tensor": lambda x: [x > 0, torch.tensor(2.0, dtype=x.dtype, device=x.device)],
    "leaky_relu_backward.default": lambda x: [torch.randn_like(x), 0.01, False],
    "hardtanh_backward.default": lambda x: [torch.randn_like(x), -0.5, 0.5],
    "threshold_backward.default": lambda x: [torch.randn_like(x), 0],
    **{f"{name}.Tensor": lambda x: [torch.randn_like(x)] for name in ("add", "sub", "mul", "div")},
    **{f"{name}_backward.default": lambda x: [torch.randn_like(x)] for name in ("gelu", "silu", "sigmoid", "tanh")},
    **{f"{name}.default": lambda x: [x.ndim - 1, False] for name in ("_softmax", "_log_softmax")},
    **{
        f"{name}_backward_data.default": lambda x: [torch.randn_like(x).softmax(-1), x.ndim - 1, x.dtype]
        for name in ("_softmax", "_log_softmax")
    },
}
"""What comes after the first operand, which is written over; nothing where it is not named."""


def call(name: str, x: torch.Tensor) -> tuple[Any, list[Any], list[str]]:
    """An operator of the table with its arguments, and the names of those that are tensors like `x`."""
    packet, _, overload = name.partition(".")
    args = [x, *MORE.get(name, lambda x: [])(x)]
    if name == "where.self":
        args = [x > 0, x, torch.randn_like(x)]
    alike = [f"a{i}" for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.shape == x.shape]
    return getattr(getattr(aten, packet), overload), args, [n for n in alike if args[int(n[1:])].dtype == x.dtype]


def written_over(op: Any, args: Sequence[Any], name: str) -> tuple[Node | None, dict[str, torch.Tensor]]:
    """The node that writes over the operand called `name`, and its operands by name, copies of the arguments."""
    given = {f"a{i}": arg.clone() for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    refs = tuple(Ref(f"a{i}") if isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args))
    out = Value("out", tuple(args[int(name[1:])].shape), args[int(name[1:])].dtype)
    return overwriting(Node(op, refs, (), (out,), True, False, "", ""), name), given


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("name", IN_PLACE)
def test_written_over_an_operand(name: str) -> None:
    check_written(name)


@pytest.mark.parametrize("name", [f"{name}.Tensor" for name in ("add", "sub", "mul", "div")])
def test_with_a_number_and_with_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for more in (
        lambda x: [0.7],
        lambda x: [torch.randn_like(x[:1])],
        lambda x: [torch.randn(1, dtype=x.dtype, device=x.device)],
    ):
        monkeypatch.setitem(MORE, name, more)
        check_written(name)


def check_written(name: str) -> None:
    dtypes = (*FLOATS, torch.complex64) if name in ARITHMETIC else FLOATS
    for shape, dtype, device in itertools.product(SHAPES, dtypes, DEVICES):
        op, args, alike = call(name, torch.randn(shape, dtype=torch.float32).to(device, dtype))
        assert alike
        expected = op(*args)
        for operand in alike:
            node, given = written_over(op, args, operand)
            if node is None:  # in place for its first operand alone
                assert operand != alike[0]
                continue
            leaf = {f"a{i}": arg for i, arg in enumerate(args) if not isinstance(arg, torch.Tensor)}
            found = node.op(
                *(given.get(f"a{i}", leaf.get(f"a{i}")) for i in range(len(args))),
                **{key: given[ref.name] for key, ref in node.kwargs},
            )
            assert found is given[operand] and found.stride() == expected.stride()
            assert same_bits(found, expected), (name, shape, dtype, operand)


@pytest.mark.parametrize("name", [name for name in IN_PLACE if "softmax" in name])
def test_softmaxes_along_other_dims(name: str) -> None:
    for shape, device in itertools.product(SHAPES, DEVICES):
        op, args, alike = call(name, torch.randn(shape).to(device))
        args[1 if "backward" not in name else 2] = 0
        expected = op(*args)
        for operand in alike:
            node, given = written_over(op, args, operand)
            assert node is not None
            tensors = [given.get(f"a{i}", arg) for i, arg in enumerate(args)]
            found = node.op(*tensors, **{key: given[ref.name] for key, ref in node.kwargs})
            assert found is given[operand] and same_bits(found, expected), (name, shape, operand)


def test_they_compute_where_they_write() -> None:
    """torch makes an overload with `out` for every operator; most of these compute elsewhere and copy."""

    def kernel(path: str) -> bool:
        packet, _, overload = path.partition(".")
        op = getattr(getattr(aten, packet), overload)
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"))

    assert [path for path, _ in IN_PLACE.values() if not kernel(path)] == []
    assert not kernel("native_dropout_backward.out") and not kernel("relu.out")


def test_fresh_results_are_row_major_whatever_comes_in() -> None:
    x, w = torch.randn(6, 4).t(), torch.randn(5, 6).t()
    scores, mean = torch.randn(6, 4).t(), torch.randn(4, 1)
    cases: dict[str, Any] = {
        "mm": lambda: aten.mm(x, w),
        "addmm": lambda: aten.addmm(torch.randn(5, 4).t(), x, w),
        "bmm": lambda: aten.bmm(torch.randn(6, 4, 2).permute(2, 1, 0), torch.randn(5, 6, 2).permute(2, 1, 0)),
        "baddbmm": lambda: aten.baddbmm(
            torch.randn(5, 4, 2).permute(2, 1, 0),
            torch.randn(6, 4, 2).permute(2, 1, 0),
            torch.randn(5, 6, 2).permute(2, 1, 0),
        ),
        "mv": lambda: aten.mv(x, torch.randn(6)),
        "addmv": lambda: aten.addmv(torch.randn(4), x, torch.randn(6)),
        "dot": lambda: aten.dot(torch.randn(12)[::2], torch.randn(6)),
        "embedding": lambda: aten.embedding(w, torch.tensor([[0, 1, 2], [3, 4, 5]]).t()),
        "full": lambda: aten.full([2, 3], 1.0),
        "zeros": lambda: aten.zeros([2, 3]),
        "ones": lambda: aten.ones([2, 3]),
        "native_layer_norm": lambda: aten.native_layer_norm(x, [6], None, None, 1e-5)[0],
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward(
            scores.new_ones(6, 4).t(), x, [6], mean, mean, None, None, [True, False, False]
        )[0],
        "nll_loss_backward": lambda: aten.nll_loss_backward(
            torch.ones(()), scores, torch.tensor([0, 1, 2, 3]), None, 2, -100, torch.ones(())
        ),
        "_softmax": lambda: aten._softmax(scores, 1, False),
        "_log_softmax": lambda: aten._log_softmax(scores, 0, False),
        "_softmax_backward_data": lambda: aten._softmax_backward_data(scores, scores.softmax(1), 1, torch.float32),
        "_log_softmax_backward_data": lambda: aten._log_softmax_backward_data(scores, scores, 0, torch.float32),
    }
    assert set(cases) == FRESH
    for name, made in cases.items():
        assert made().is_contiguous(), name


def test_what_may_be_the_operand_itself_is_not_new_memory() -> None:
    def one(op: Any) -> Node:
        return Node(op, (Ref("x"),), (), (Value("y", (2,), torch.float32),), True, False, "", "")

    x = torch.randn(2)
    for op in (aten.conj_physical.default, aten.detach.default, aten.alias.default, aten.positive.default):
        assert op(x).data_ptr() == x.data_ptr() and not makes(one(op))
    assert all(makes(one(op)) and op(x).data_ptr() != x.data_ptr() for op in (aten.neg.default, aten.clone.default))
