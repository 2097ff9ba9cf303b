"""Frozen data to JSON and back, checked against the declared types: nothing is executed, nothing is guessed.

Understood: dataclasses, tuples (as lists), mappings from strings, enums (by value), unions, str, int, float, bool and
None; torch's operators, dtypes, devices, layouts and memory formats, by name; tensors, as their bytes in base64; trees
of pytrees, by torch's own text for them. Where a field may hold several dataclasses, or anything (`Any`: an argument of
an operator), the data name the class. A dataclass's own checks run on the way back.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from autopart import _torch
from autopart._torch import OpOverload

_NAMED = {kind.__name__: kind for kind in (torch.dtype, torch.layout, torch.memory_format)}
_MARK = "is"  # the key under which data name their class

NUMBERS: Mapping[str, Callable[[str], Any]] = {"float": float, "complex": complex, "Fraction": Fraction}
"""What JSON has no number for, by the name of its class."""


def encode(value: Any, kind: Any = None) -> Any:
    """The value, which a field of type `kind` holds, as JSON data. Raises TypeError for what is not understood."""
    kind = type(value) if kind is None else kind
    if _is_union(kind) or kind is Any:
        return _encode_open(value, kind)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name), hint) for name, hint in _fields(type(value)).items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        items = get_args(kind) or (Any, ...)
        kinds = items[:1] * len(value) if items[-1:] == (Ellipsis,) else items
        return [encode(item, each) for item, each in zip(value, kinds, strict=True)]
    if isinstance(value, Mapping):
        return {key: encode(item, get_args(kind)[1]) for key, item in value.items()}
    if isinstance(value, OpOverload):
        return str(value)
    if type(value).__name__ in _NAMED:
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written as data")


def decode(kind: Any, data: Any, where: str) -> Any:
    """The value of type `kind` that `data` encodes.

    Raises ValueError with the place, which begins with `where`, and what was expected there.
    """
    if _is_union(kind) or kind is Any:
        return _decode_open(kind, data, where)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), data, where)
    if isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping):
        _expect(isinstance(data, dict), "an object", data, where)
        return {key: decode(get_args(kind)[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        members = [member.value for member in kind]
        _expect(data in members, f"one of {', '.join(map(str, members))}", data, where)
        return kind(data)
    if kind is OpOverload or kind is torch.device or kind in _NAMED.values():
        return _named(kind, data, where)
    if kind is torch.Tensor:
        return _decode_tensor(data, where)
    accepted = int | float if kind is float else kind
    _expect(isinstance(data, accepted) and isinstance(data, bool) <= (kind is bool), kind.__name__, data, where)
    return data if data is None else kind(data)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _encode_open(value: Any, kind: Any) -> Any:
    """A value whose class the field leaves open: objects carry its name, what JSON has is as it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_MARK: "float", "value": str(value)}
    if isinstance(value, complex | Fraction):
        return {_MARK: type(value).__name__, "value": str(value)}
    if isinstance(value, tuple):
        options = [option for option in get_args(kind) if get_origin(option) is tuple]
        return encode(value, options[0] if options else tuple[Any, ...])
    if isinstance(value, _torch.pytree.TreeSpec):
        return {_MARK: "TreeSpec", "value": _encode_tree(value)}
    if is_dataclass(value):
        return {_MARK: type(value).__name__, **encode(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {_MARK: "operator" if isinstance(value, OpOverload) else type(value).__name__, "value": encode(value)}


def _decode_open(kind: Any, data: Any, where: str) -> Any:
    options = get_args(kind)
    if isinstance(data, dict):
        return _marked(options, data, where)
    if isinstance(data, list):
        found = [option for option in options if get_origin(option) is tuple]
        _expect(bool(found) or kind is Any, f"one of {_told(options)}", data, where)
        return decode(found[0] if found else tuple[Any, ...], data, where)
    plain = [NoneType, bool, int, float, str] if kind is Any else [o for o in options if isinstance(o, type)]
    # None comes first for its type, bool before int, which it is too
    for option in plain:
        if type(data) is option or (option is float and type(data) is int and int not in plain):
            return data
    _expect(False, f"one of {_told(options)}", data, where)


def _marked(options: tuple[Any, ...], data: dict[str, Any], where: str) -> Any:
    """An object that names its class."""
    name = data.get(_MARK)
    rest = {key: item for key, item in data.items() if key != _MARK}
    classes = {kind.__name__: kind for kind in (options or _arguments()) if is_dataclass(kind)}
    if name in classes:
        return decode(classes[name], rest, where)
    known = not options or name in {getattr(option, "__name__", "") for option in options}
    _expect(known and "value" in rest, f"one of {', '.join(classes) or _told(options)}", data, where)
    if name in NUMBERS:
        _expect(isinstance(rest["value"], str), f"a {name}", data, where)
        try:
            return NUMBERS[str(name)](rest["value"])
        except (ValueError, ZeroDivisionError):
            _expect(False, f"a {name}", data, where)
    if name == "TreeSpec":
        return _decode_tree(rest["value"], where)
    kinds = {"operator": OpOverload, "device": torch.device, **_NAMED}
    _expect(name in kinds, f"one of {', '.join(kinds)}", data, where)
    return decode(kinds[str(name)], rest["value"], where)


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.is_meta or _torch.is_fake(tensor):
        raise TypeError("a tensor without data cannot be written")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
    return {"dtype": encode(tensor.dtype), "shape": list(tensor.shape), "data": data.decode()}


def _decode_tensor(data: Any, where: str) -> torch.Tensor:
    _expect(isinstance(data, dict) and set(data) == {"dtype", "shape", "data"}, "a tensor", data, where)
    dtype = decode(torch.dtype, data["dtype"], f"{where}.dtype")
    shape = decode(tuple[int, ...], data["shape"], f"{where}.shape")
    try:
        raw = bytearray(base64.b64decode(data["data"], validate=True))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{where}: expected the bytes of a tensor of shape {list(shape)}: {error}") from None


def _encode_tree(tree: Any) -> str:
    try:
        return _torch.pytree.treespec_dumps(tree)
    except (NotImplementedError, TypeError) as error:
        raise TypeError(f"what forward returns cannot be written as data: {error}") from None


def _decode_tree(data: Any, where: str) -> Any:
    _expect(isinstance(data, str), "the text of a pytree", data, where)
    try:
        return _torch.pytree.treespec_loads(data)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{where}: expected a pytree: {error} (import the library that defines it first)") from None


def _arguments() -> tuple[type, ...]:
    """The classes that an argument of a node may be of."""
    from autopart.ir.graph import Ref, Share, Size

    return Ref, Share, Size


def _named(kind: Any, data: Any, where: str) -> Any:
    """One of torch's own objects by its name."""
    _expect(isinstance(data, str), f"a name of a torch {kind.__name__}", data, where)
    if kind is torch.device:
        try:
            return torch.device(data)
        except RuntimeError:
            _expect(False, "a device", data, where)
    if kind is not OpOverload:
        found = getattr(torch, data, None)
        _expect(isinstance(found, kind), f"a torch {kind.__name__}", data, where)
        return found
    place: Any = torch.ops
    try:
        for part in data.split("."):
            place = getattr(place, part)
    except AttributeError:
        place = None
    _expect(
        isinstance(place, OpOverload), "an operator that is registered here (import its library first)", data, where
    )
    return place


def _tuple(items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), "a list", data, where)
    if items[-1:] == (Ellipsis,):
        items = items[:1] * len(data)
    if len(items) != len(data):
        raise ValueError(f"{where}: expected a list of {len(items)} items, got {len(data)}")
    return tuple(decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, data, strict=True)))


def _dataclass(kind: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, where)
    hints = _fields(kind)
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{where}: unknown field {', '.join(unknown)}")
    if missing := [name for name in hints if name not in data]:
        raise ValueError(f"{where}: missing field {', '.join(missing)}")
    values = {name: decode(hint, data[name], f"{where}.{name}") for name, hint in hints.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """The types of the fields that make a dataclass, by name; what equality leaves out is no part of its data."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init and field.compare}


def _expect(holds: bool, what: str, data: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"{where}: expected {what}, got {data!r}")


def _told(options: tuple[Any, ...]) -> str:
    return ", ".join(getattr(option, "__name__", str(option)) for option in options) or "anything"
