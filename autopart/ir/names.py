"""Python names for things that the user named otherwise."""

from __future__ import annotations

import keyword
import re
from collections.abc import Container

RESERVED = (
    "world", "batch", "b", "B", "k", "i", "saved", "kept", "updated", "one",
    "torch", "aten", "list", "range", "reversed",
)  # fmt: skip
"""Names that the text of a program uses itself."""


def identifier(text: str, prefix: str = "p") -> str:
    """A Python identifier that reads like `text`: ``h_0_attn`` for ``h.0.attn``, ``p0_weight`` for ``0.weight``."""
    name = re.sub(r"\W+", "_", text).strip("_") or prefix
    if name[0].isdigit():
        name = prefix + name
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


def fresh(name: str, taken: Container[str]) -> str:
    """The name, with as many underscores behind it as it takes to be none of `taken`."""
    while name in taken:
        name += "_"
    return name
