"""Rules of operators that other libraries have made for themselves, written as their owners would register them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from autopart._torch import OpOverload
from autopart.rules.own import OwnRule, read

LIBRARIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # Experts of Hugging Face's mixtures: tokens t in the order of their experts e, of which each has its own number
    "transformers.grouped_mm_fallback.default": (
        "t h, e h k, e -> t k",
        {"whole": "t e", "linear": ("input", "weight"), "ends": {"t": "offs"}},
    ),
    "transformers.grouped_mm_fallback_backward.default": (
        "t h, e h k, e, t k -> t h, e h k",
        {"whole": "t e", "linear": ("grad_output",), "ends": {"t": "offs"}},
    ),
}
"""By operator: the text of `register_sharding_rule`, and its options."""


@lru_cache(maxsize=64)
def library_rule(op: OpOverload) -> OwnRule | None:
    """The rule of an operator of a library that is known here."""
    found = LIBRARIES.get(str(op))
    return None if found is None else read(op, found[0], **found[1])
