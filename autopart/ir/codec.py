"""Frozen data to JSON and back, checked against the declared types: nothing is executed, nothing is guessed.

Understood: dataclasses, tuples (as lists), enums (by value), str, int, float. A dataclass's own checks run on the way
back.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints


def encode(value: Any) -> Any:
    """The value as JSON data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, data: Any, where: str) -> Any:
    """The value of type `kind` that `data` encodes.

    Raises ValueError with the place, which begins with `where`, and what was expected there.
    """
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), data, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if data not in [member.value for member in kind]:
            raise ValueError(f"{where}: expected one of {', '.join(str(m.value) for m in kind)}, got {data!r}")
        return kind(data)
    accepted = int | float if kind is float else kind
    if isinstance(data, bool) or not isinstance(data, accepted):
        raise ValueError(f"{where}: expected {kind.__name__}, got {data!r}")
    return kind(data)


def _tuple(items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{where}: expected a list, got {data!r}")
    if items[-1:] == (Ellipsis,):
        items = items[:1] * len(data)
    if len(items) != len(data):
        raise ValueError(f"{where}: expected a list of {len(items)} items, got {len(data)}")
    return tuple(decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, data, strict=True)))


def _dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {data!r}")
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    if unknown := sorted(set(data) - set(names)):
        raise ValueError(f"{where}: unknown field {', '.join(unknown)}")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{where}: missing field {', '.join(missing)}")
    values = {name: decode(hints[name], data[name], f"{where}.{name}") for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
