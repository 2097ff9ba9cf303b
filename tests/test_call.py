"""The sample call: leaves, names, batch dims, other batch sizes, and what is refused."""

from __future__ import annotations

from inspect import Signature, signature
from typing import Any

import pytest
import torch

from autopart.capture.call import Call, read_call
from autopart.errors import CaptureError


def forward(x: Any, y: Any = None, *, mask: Any = None, k: int = 2) -> None:
    """A signature."""


def loose(*args: Any, **kwargs: Any) -> None:
    """A signature without names."""


def call(*args: Any, batch: Any = None, of: Any = forward, **kwargs: Any) -> Call:
    return read_call(args, kwargs, batch, signature(of))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_paths_labels_and_dims() -> None:
    made = call(ones(4, 2), {"a": [ones(4), 3], "b": None}, mask=ones(4, 1), k=5)
    assert made.batch == 4
    assert dict(zip(made.paths, made.dims, strict=True)) == {
        "args[0]": 0,
        "args[1]['a'][0]": 0,
        "args[1]['a'][1]": None,
        "args[1]['b']": None,
        "kwargs['mask']": 0,
        "kwargs['k']": None,
    }
    assert made.labels[:2] == ("x", "y_a_0") and made.labels[-2:] == ("mask", "k")
    assert [path for path, _ in made.tensors] == ["args[0]", "args[1]['a'][0]", "kwargs['mask']"]
    assert made.describe().startswith("x [4, 2] split along dim 0, y_a_0 [4] split")


def test_labels_without_names() -> None:
    made = call(ones(4), ones(4), of=loose, z=ones(4))
    assert made.labels == ("target", "argument1", "z")
    assert call(ones(4), ones(4), ones(4)).labels[2] == "target"


def test_tensors_of_another_size_are_not_split() -> None:
    assert call(ones(4, 2), ones(3, 2)).dims == (0, None)
    assert call(ones(4, 2), torch.tensor(1.0)).dims == (0, None)


@pytest.mark.parametrize("name", ["mask", "kwargs['mask']", "kwargs['mask'][0]"])
def test_batch_by_name_or_path(name: str) -> None:
    made = call(ones(4, 2), mask=[ones(2, 4)], batch={name: 1})
    assert made.dims == (0, 1)
    assert call(ones(4, 2), mask=[ones(2, 4)], batch={name: -1}).dims == (0, 1)
    assert call(ones(4, 2), mask=[ones(4, 4)], batch={name: None}).dims == (0, None)


def test_batch_of_the_first_tensor() -> None:
    made = call(ones(5, 3, 2), ones(3, 7), batch={"x": 1})
    assert (made.batch, made.dims) == (3, (1, 0))
    made = call(ones(5), ones(3), batch={"x": None})
    assert (made.batch, made.dims) == (3, (None, 0))
    assert call(ones(5), batch={"mask": 1}).dims == (0,), "an argument of forward that this call does not pass"


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"z": 0}, ValueError, "no input is called 'z'; the tensors of this call are args"),
        ({"x": 2}, ValueError, r"args\[0\] has 2 dims, so its batch cannot be dim 2"),
        ({"x": -3}, ValueError, "cannot be dim -3"),
        ({"x": True}, TypeError, "the dim of 'x' must be a whole number or None, not True"),
        ({"x": "0"}, TypeError, "not '0'"),
        ([("x", 0)], TypeError, "expected a mapping from input names to dims, not list"),
        ({"x": 0, "y": 0}, ValueError, r"args\[1\] has 3 samples along dim 0, but the batch has 4"),
    ],
)
def test_bad_batch(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(ones(4, 2), ones(3, 2), batch=batch)


def test_nothing_to_split() -> None:
    with pytest.raises(CaptureError, match="no tensor input with a batch dim"):
        call(torch.tensor(1.0), k=3)
    with pytest.raises(ValueError, match="has no samples"):
        call(ones(0, 2))


def test_resized_repeats_samples() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(2, 3)
    made = call(x.requires_grad_(), y, k=7, batch={"y": 1})
    other = made.resized(5)
    (xs, ys), kwargs = other.unflatten()
    assert other.batch == 5 and kwargs == {"k": 7}
    assert torch.equal(xs, x[[0, 1, 2, 0, 1]]) and torch.equal(ys, y[:, [0, 1, 2, 0, 1]])
    assert xs.is_leaf and xs.requires_grad and not ys.requires_grad
    with torch.no_grad():
        assert not made.resized(5).unflatten()[0][0].requires_grad
    same = made.resized(3).unflatten()[0][0]
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("batch", [3, 5])
def test_unfilled_is_resized_but_for_the_values(batch: int) -> None:
    x, y = ones(3, 2).requires_grad_(), torch.arange(12).view(4, 3).t().unsqueeze(0)
    made = call(x, y, torch.tensor(1.0), k=7, batch={"x": 0, "y": 1})
    assert made.unfilled(batch).key() == made.resized(batch).key() and made.unfilled(batch).batch == batch
    tensors = zip(made.unfilled(batch).tensors, made.resized(batch).tensors, made.tensors, strict=True)
    for (_, one), (_, other), (_, given) in tensors:
        assert one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        assert one.is_leaf and one.requires_grad == other.requires_grad and one is not given


def test_tensors_are_contiguous() -> None:
    x = torch.arange(12.0).view(3, 4).t()
    made = call(x)
    assert made.leaves[0].is_contiguous() and torch.equal(made.leaves[0], x)


def test_key_is_what_a_program_depends_on() -> None:
    base = call(ones(4, 2), k=2)
    assert base.key() == call(ones(7, 2) * 3, k=2).key(), "neither values nor the batch size matter"
    others = [call(ones(4, 3), k=2), call(ones(4, 2).double(), k=2), call(ones(4, 2), k=3), call(ones(4, 2))]
    others.append(call([ones(4, 2)], k=2))
    assert len({base.key(), *(other.key() for other in others)}) == 6
    assert call(ones(4), k=1).key() != call(ones(4), k=True).key(), "equal but not the same"
    assert hash(call(ones(4), {"a": slice(0, 2)}).key()) is not None


def test_signature_without_parameters() -> None:
    assert read_call((ones(4),), {}, None, Signature()).labels == ("target",)
