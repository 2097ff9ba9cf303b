"""Bags: as many rows of a table for every sample, looked up and summed, or the maximum of them, as operators.

What `torch.nn.EmbeddingBag` computes of input ``[bags, length]``. torch's own operators have the rows of all bags one
behind the other, and say by a tensor of offsets where each bag begins, so no bag could be computed without knowing how
many are before it. Like them, these never hold all rows at once.
"""

from __future__ import annotations

from typing import Any

import torch

SUM_MODE, MEAN_MODE, MAX_MODE = 0, 1, 2
"""The modes of an `EmbeddingBag`, as torch's operators number them."""


def bag_sum(weight: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor | None, padding_idx: int) -> torch.Tensor:
    """The sum of the rows of `weight` ``[rows, width]`` that each bag of `indices` ``[bags, length]`` names.

    With `scale`, of the shape of `indices`, each row times a number. Rows numbered `padding_idx` (none if it is
    negative) are left out. Returns ``[bags, width]``.
    """
    made: torch.Tensor = _bags(weight, indices, SUM_MODE, scale, padding_idx)[0]
    return made


def bag_sum_backward(
    grad: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor | None, num_weights: int, padding_idx: int
) -> torch.Tensor:
    """The gradient ``[num_weights, width]`` of the table, given that of what `bag_sum` made."""
    bags, length = indices.shape
    bag = torch.arange(bags, dtype=indices.dtype, device=indices.device).repeat_interleave(length)
    sizes = torch.full((bags,), length, dtype=indices.dtype, device=indices.device)
    made: torch.Tensor = torch.ops.aten._embedding_bag_dense_backward(
        grad, indices.reshape(-1), bag, sizes, sizes, num_weights, False, SUM_MODE, _flat(scale), padding_idx
    )
    return made


def bag_scale_backward(
    grad: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int
) -> torch.Tensor:
    """The gradient ``[bags, length]`` of `scale`, given that of what `bag_sum` made."""
    bags, length = indices.shape
    offsets = torch.arange(0, bags * length, length, dtype=indices.dtype, device=indices.device)
    bag = torch.arange(bags, dtype=indices.dtype, device=indices.device).repeat_interleave(length)
    flat: torch.Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, weight, indices.reshape(-1), offsets, bag, SUM_MODE, padding_idx
    )
    return flat.view(bags, length)


def bag_max(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of the rows that each bag names, column by column, and which row of the table each is from.

    Both ``[bags, width]``. A bag of nothing but padding has zeros, of row -1.
    """
    out, _, _, rows = _bags(weight, indices, MAX_MODE, None, padding_idx)
    empty = (indices == padding_idx).all(1, keepdim=True)
    return out, rows.masked_fill(empty, -1)


def bag_max_backward(grad: torch.Tensor, rows: torch.Tensor, num_weights: int) -> torch.Tensor:
    """The gradient ``[num_weights, width]`` of the table, given that of the maxima, and the rows that they are from."""
    made = grad.new_zeros(num_weights, grad.shape[1])
    return made.scatter_add(0, rows.clamp(min=0).long(), grad.masked_fill(rows < 0, 0.0))


def _bags(weight: torch.Tensor, indices: torch.Tensor, mode: int, scale: torch.Tensor | None, padding_idx: int) -> Any:
    """What torch's operator makes of bags of one length."""
    bags, length = indices.shape
    offsets = torch.arange(0, bags * length, length, dtype=indices.dtype, device=indices.device)
    return torch.ops.aten._embedding_bag(
        weight, indices.reshape(-1), offsets, False, mode, False, _flat(scale), False, padding_idx
    )


def _flat(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.reshape(-1)


_SCHEMAS = (
    "bag_sum(Tensor weight, Tensor indices, Tensor? scale, int padding_idx) -> Tensor",
    "bag_sum_backward(Tensor grad, Tensor indices, Tensor? scale, SymInt num_weights, int padding_idx) -> Tensor",
    "bag_scale_backward(Tensor grad, Tensor weight, Tensor indices, int padding_idx) -> Tensor",
    "bag_max(Tensor weight, Tensor indices, int padding_idx) -> (Tensor, Tensor)",
    "bag_max_backward(Tensor grad, Tensor rows, SymInt num_weights) -> Tensor",
)


def _on_shapes() -> dict[str, Any]:
    """The results of each operator, by shape and dtype alone."""
    return {
        "bag_sum": lambda w, i, *_: w.new_empty(i.shape[0], w.shape[1]),
        "bag_sum_backward": lambda g, i, s, n, p: g.new_empty(n, g.shape[1]),
        "bag_scale_backward": lambda g, w, i, p: g.new_empty(i.shape),
        "bag_max": lambda w, i, p: tuple(x.new_empty(i.shape[0], w.shape[1]) for x in (w, i)),
        "bag_max_backward": lambda g, r, n: g.new_empty(n, g.shape[1]),
    }


def _register() -> Any:
    library: Any = torch.library.Library("autopart", "FRAGMENT")  # type: ignore[no-untyped-call]
    run = (bag_sum, bag_sum_backward, bag_scale_backward, bag_max, bag_max_backward)
    for schema, function in zip(_SCHEMAS, run, strict=True):
        name = library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopart::{name}", _on_shapes()[name], lib=library)
    return library


_LIBRARY = _register()

BAG_SUM: Any = torch.ops.autopart.bag_sum.default
BAG_SUM_BACKWARD: Any = torch.ops.autopart.bag_sum_backward.default
BAG_SCALE_BACKWARD: Any = torch.ops.autopart.bag_scale_backward.default
BAG_MAX: Any = torch.ops.autopart.bag_max.default
BAG_MAX_BACKWARD: Any = torch.ops.autopart.bag_max_backward.default
