"""The sample call: its leaves, which dim of each is the batch, and the same call at another batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Signature
from typing import Any

import torch

from autopart import _torch
from autopart.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Call:
    """A call flattened: `leaves` in pytree order with a `path` each (``args[0]``, ``kwargs['mask']``), None for
    non-tensors.

    `dims` has the batch dim of each leaf, None where it is not split; `labels` what a person calls each leaf (``ids``,
    ``mask_a``), from the signature of `forward`.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    spec: Any
    dims: tuple[int | None, ...]
    batch: int
    labels: tuple[str, ...]

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """(path, tensor) of the tensor leaves."""
        return tuple((p, x) for p, x in zip(self.paths, self.leaves, strict=True) if isinstance(x, torch.Tensor))

    @property
    def device(self) -> torch.device:
        """Where the first tensor is."""
        return self.tensors[0][1].device

    def resized(self, batch: int) -> Call:
        """The same call with `batch` samples, repeating samples; every tensor is a fresh leaf, with grad as before."""
        return self._fresh(batch, lambda tensor, dim: _resize(tensor, dim, self.batch, batch))

    def unfilled(self, batch: int) -> Call:
        """`resized` without values, for tracing, which reads none: to repeat a large batch takes seconds."""
        return self._fresh(batch, lambda tensor, dim: _unfilled(tensor, dim, batch))

    def _fresh(self, batch: int, made: Callable[[torch.Tensor, int | None], torch.Tensor]) -> Call:
        leaves = tuple(
            made(leaf, dim).requires_grad_(_wanted(leaf)) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        )
        return replace(self, leaves=leaves, batch=batch)

    def wanted(self) -> tuple[str, ...]:
        """The paths of the tensors that get gradients."""
        return tuple(path for path, tensor in self.tensors if _wanted(tensor))

    def describe(self) -> str:
        """The tensors with their shapes, and which of their dims hold samples."""
        return ", ".join(
            f"{label} {list(leaf.shape)} {'not split' if dim is None else f'split along dim {dim}'}"
            for label, leaf, dim in zip(self.labels, self.leaves, self.dims, strict=True)
            if isinstance(leaf, torch.Tensor)
        )

    def unflatten(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's args and kwargs."""
        args, kwargs = _torch.pytree.tree_unflatten(list(self.leaves), self.spec)
        return args, kwargs

    @property
    def text(self) -> str:
        """The key as text, which another process can compare."""
        return repr(self.key())

    def key(self) -> tuple[Any, ...]:
        """What a compiled program depends on: everything but the values and the batch size."""
        return tuple(value for _, value in self.named_key())

    def named_key(self) -> tuple[tuple[str, Any], ...]:
        """The key's parts by what a person calls them."""
        leaves = tuple(
            (f"the {'sizes or dtype' if isinstance(leaf, torch.Tensor) else 'value'} of {label}", _leaf_key(leaf, dim))
            for leaf, dim, label in zip(self.leaves, self.dims, self.labels, strict=True)
        )
        return (("which arguments there are", str(self.spec)), *leaves)


def read_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Mapping[str, int | None] | None, signature: Signature
) -> Call:
    """Flatten a call and find the batch dim of every tensor.

    `batch` maps an input's name (a parameter in `forward`'s signature, or a full path) to its batch dim or None.
    Unnamed tensors are split at dim 0 where its size equals that of the first tensor input. Raises TypeError or
    ValueError for a `batch` that does not fit the call.
    """
    pairs, spec = _torch.pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    paths = tuple(_path(keys) for keys, _ in pairs)
    leaves = tuple(_contiguous(leaf) for _, leaf in pairs)
    slots = tuple(
        p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
    known = slots + tuple(p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY)
    named = _named_dims(paths, leaves, batch, slots, known)
    size = _batch_size(paths, leaves, named)
    dims = tuple(
        None
        if not isinstance(leaf, torch.Tensor)
        else named[path]
        if path in named
        else (0 if leaf.dim() and leaf.shape[0] == size else None)
        for path, leaf in zip(paths, leaves, strict=True)
    )
    for path, leaf, dim in zip(paths, leaves, dims, strict=True):
        if dim is not None and leaf.shape[dim] != size:
            raise ValueError(
                f"batch: {path} has {leaf.shape[dim]} samples along dim {dim}, but the batch has {size}; "
                f"name the batch dim of every input whose batch is elsewhere, for example batch={{'{path}': None}}"
            )
    return Call(leaves, paths, spec, dims, size, tuple(_label(path, slots) for path in paths))


def _contiguous(leaf: Any) -> Any:
    """Parts of the batch are contiguous, so the whole is read that way: strides decide which operators run."""
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided else leaf


def _named_dims(
    paths: tuple[str, ...],
    leaves: tuple[Any, ...],
    batch: Mapping[str, int | None] | None,
    slots: tuple[str, ...],
    known: tuple[str, ...],
) -> dict[str, int | None]:
    """The dim that `batch` gives for each path it speaks of; a name speaks of all tensors within that argument."""
    if batch is not None and not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping from input names to dims, not {type(batch).__name__}")
    tensors = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    named: dict[str, int | None] = {}
    for name, dim in (batch or {}).items():
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise TypeError(f"batch: the dim of {name!r} must be a whole number or None, not {dim!r}")
        prefixes = {name, f"kwargs['{name}']"} | ({f"args[{slots.index(name)}]"} if name in slots else set())
        hits = [p for p in tensors if any(p == q or p.startswith((q + "[", q + ".")) for q in prefixes)]
        if not hits and name not in known:
            raise ValueError(f"batch: no input is called {name!r}; the tensors of this call are {', '.join(tensors)}")
        for path in hits:
            rank = tensors[path].dim()
            if dim is not None and not -rank <= dim < rank:
                raise ValueError(f"batch: {path} has {rank} dims, so its batch cannot be dim {dim}")
            named[path] = dim % rank if dim is not None else None
    return named


def _batch_size(paths: tuple[str, ...], leaves: tuple[Any, ...], named: dict[str, int | None]) -> int:
    for path, leaf in zip(paths, leaves, strict=True):
        dim = named.get(path, 0)
        if isinstance(leaf, torch.Tensor) and dim is not None and leaf.dim():
            if leaf.shape[dim] == 0:
                raise ValueError(f"batch: {path} has no samples (size 0 along dim {dim})")
            return int(leaf.shape[dim])
    raise CaptureError(
        "the call has no tensor input with a batch dim, so there is nothing to split; pass the batch as a tensor "
        "argument, or name its dim with batch={'name': dim}"
    )


def _resize(tensor: torch.Tensor, dim: int | None, old: int, new: int) -> torch.Tensor:
    tensor = tensor.detach()
    if dim is None or old == new:
        return tensor.clone()
    index = torch.arange(new, device=tensor.device) % old
    return tensor.index_select(dim, index)


def _unfilled(tensor: torch.Tensor, dim: int | None, new: int) -> torch.Tensor:
    shape = [new if place == dim else size for place, size in enumerate(tensor.shape)]
    return tensor.detach().new_empty(shape)  # contiguous, as `read_call` makes what is given


def _wanted(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _leaf_key(leaf: Any, dim: int | None) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple("batch" if i == dim else s for i, s in enumerate(leaf.shape)), leaf.dtype, _wanted(leaf)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf


def _label(path: str, names: tuple[str, ...]) -> str:
    """``args[0]`` by the name of forward's first parameter, ``kwargs['mask']['a']`` as ``mask_a``."""
    parts = re.findall(r"\w+", path)
    if parts[0] == "args" and int(parts[1]) < len(names):
        parts[1] = names[int(parts[1])]
    elif parts[0] == "args":
        parts[1] = "target" if int(parts[1]) == len(names) else f"argument{parts[1]}"
    return "_".join(parts[1:])


def _path(keys: tuple[Any, ...]) -> str:
    first, *rest = keys
    return ("args" if first.idx == 0 else "kwargs") + "".join(map(str, rest))
