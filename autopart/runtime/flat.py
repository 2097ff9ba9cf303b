"""Tensors as one flat tensor, which is what travels, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def flat(tensors: Iterable[torch.Tensor], length: int | None = None) -> torch.Tensor:
    """The elements of tensors of one dtype, one tensor after the other, padded with zeros to `length`."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    missing = 0 if length is None else length - joined.numel()
    return torch.nn.functional.pad(joined, (0, missing)) if missing else joined


def unflat(joined: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors of these shapes out of a flat one, as views; what is left of it is padding."""
    forms = [torch.Size(shape) for shape in shapes]
    sizes = [form.numel() for form in forms]
    pieces = torch.split(joined[: sum(sizes)], sizes)
    return [piece.view(form) for piece, form in zip(pieces, forms, strict=True)]
