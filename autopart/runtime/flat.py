"""Tensors as one flat tensor, which is what travels, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors of one dtype, one tensor after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def flat_padded(groups: Iterable[tuple[Iterable[torch.Tensor], int]]) -> torch.Tensor:
    """Likewise for groups of tensors, at least one in each, every group padded with zeros to its length."""
    pieces: list[torch.Tensor] = []
    for tensors, length in groups:
        own = [tensor.reshape(-1) for tensor in tensors]
        missing = length - sum(piece.numel() for piece in own)
        pieces += [*own, own[0].new_zeros(missing)] if missing else own
    return torch.cat(pieces)


def unflat(joined: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors of these shapes out of a flat one, as views; what is left of it is padding."""
    forms = [torch.Size(shape) for shape in shapes]
    sizes = [form.numel() for form in forms]
    pieces = torch.split(joined[: sum(sizes)], sizes)
    return [piece.view(form) for piece, form in zip(pieces, forms, strict=True)]
