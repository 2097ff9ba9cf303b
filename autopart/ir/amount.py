"""Amounts of closed forms: plain numbers, or sympy expressions of symbols that are filled in later."""

from __future__ import annotations

from math import inf
from typing import Any

Amount = Any
"""A number: int, float, Fraction, or a sympy expression. Arithmetic on it is the same, and nothing is rounded."""


def check_amount(name: str, value: Amount, *, least: int = 0, whole: bool = False) -> None:
    """Refuse what is no number, is below `least` or not finite, or not whole where it has to be.

    Of a sympy expression, only what is known of it: that it is negative, say.
    """
    if isinstance(value, bool | str) or not hasattr(value, "__truediv__"):
        raise TypeError(f"{name}: expected a number or a sympy expression, not {value!r}")
    if _symbolic(value):
        if (value - least).is_negative or value.is_real is False or (whole and value.is_integer is False):
            raise ValueError(f"{name}: must be {_wanted(least, whole)}, not {value}")
    elif not least <= value < inf or (whole and value != int(value)):
        raise ValueError(f"{name}: must be {_wanted(least, whole)}, not {value!r}")


def _wanted(least: int, whole: bool) -> str:
    return f"a {'whole' if whole else 'finite'} number of at least {least}"


def check_within(name: str, value: Amount, bound: str, most: Amount) -> None:
    """Refuse a number that is more than another, called `bound`; nothing is known of symbols."""
    if not _symbolic(value) and not _symbolic(most) and value > most:
        raise ValueError(f"{name}: {value!r} is more than {bound}, {most!r}")


def _symbolic(value: Amount) -> bool:
    """Whether a value has symbols in it, without a need for sympy."""
    return bool(getattr(value, "free_symbols", False))
