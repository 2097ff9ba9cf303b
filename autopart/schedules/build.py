"""The registry of schedule families: build one by name, list them all."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from autopart.ir.action import Schedule
from autopart.schedules import (
    bitpipe,
    dualpipe,
    flush,
    groups,
    interleaved,
    sequence,
    stale,
    vocabulary,
    vshape,
    zero_bubble,
)
from autopart.schedules.family import Family, check_count

FAMILIES = (
    *flush.FAMILIES,
    *interleaved.FAMILIES,
    *zero_bubble.FAMILIES,
    *vshape.FAMILIES,
    *groups.FAMILIES,
    *sequence.FAMILIES,
    *dualpipe.FAMILIES,
    *bitpipe.FAMILIES,
    *vocabulary.FAMILIES,
    *stale.FAMILIES,
)
"""Every training family, in the order in which they are listed."""


def names() -> tuple[Family, ...]:
    """The training families that `build` knows: name, one line on each, its source and its memory law."""
    return FAMILIES


def build(name: str, *, ranks: int, microbatches: int, **options: object) -> Schedule:
    """The schedule `name` for `ranks` pipeline ranks and `microbatches` microbatches.

    `name` is one of `names()`, or ``"forward"`` for a program without a backward; it may carry options, as in
    ``"interleaved(chunks=3)"``. The name of the schedule carries those that are not the defaults: it is a text from
    which the same schedule can be built. Raises ValueError for a name that there is not or whose options the family
    does not have, a count below 1 or one that the family cannot take; TypeError for a name that is no text, a count
    that is no whole number or a keyword that is no option of the family.
    """
    family, written = read_name(name, (*FAMILIES, flush.FORWARD))
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    if twice := [option for option in options if option in written]:
        raise TypeError(f"schedule: {name!r} has the option {twice[0]!r} already")
    if unknown := _unknown(family, options):
        raise TypeError(unknown)
    given = {**written, **options}
    chosen = {
        key: given[key] for key, option in _options(family).items() if given.get(key, option.default) != option.default
    }
    try:
        made = family.make(ranks, microbatches, **chosen)
    except (TypeError, ValueError) as error:
        kind = ValueError if written else type(error)  # what a text says is a value, not a type
        raise kind(f"schedule {family.name!r}: {error}") from None
    return replace(made, name=_recipe(family.name, chosen))


def read_name(text: object, families: Iterable[Family] = FAMILIES) -> tuple[Family, dict[str, object]]:
    """The one of `families` that a schedule's name denotes, and the options that it carries.

    Raises ValueError for a name that there is not or an option that its family does not have, TypeError for what is no
    text.
    """
    if not isinstance(text, str):
        raise TypeError(f"schedule: expected a name such as '1f1b', not {text!r}")
    bare, written = _read(text)
    known = {each.name: each for each in families}
    if bare not in known:
        near = get_close_matches(bare.lower(), known, n=1)
        raise ValueError(
            f"schedule: {text!r} is not known{f', did you mean {near[0]!r}?' if near else ';'} one of "
            f"{', '.join(each.name for each in FAMILIES)}; a table of actions has a line a rank, such as "
            "0F0,0F1,0B0,0B1, and autopart.schedules.auto finds one"
        )
    if unknown := _unknown(known[bare], written):
        raise ValueError(unknown)
    return known[bare], written


def _options(family: Family) -> Mapping[str, inspect.Parameter]:
    return dict(list(inspect.signature(family.make).parameters.items())[2:])


def _unknown(family: Family, options: Iterable[str]) -> str:
    """What to say of the first of some options that the family does not have."""
    known = _options(family)
    takes = f"its options are {', '.join(known)}" if known else "it has no options"
    return next(
        (f"schedule: {family.name!r} has no option {each!r}; {takes}" for each in options if each not in known), ""
    )


def _recipe(name: str, options: Mapping[str, object]) -> str:
    """The text that `build` reads: the name, and the options where there are any."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def _read(text: str) -> tuple[str, dict[str, object]]:
    """The name and the options of a recipe."""
    name, bracket, inside = text.partition("(")
    if not bracket:
        return name.strip(), {}
    try:
        call = ast.parse(f"f({inside}", mode="eval").body
    except SyntaxError:
        raise _unreadable(text, "it does not end as a call does") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _unreadable(text, "there is more after the options")
    if call.args or any(each.arg is None for each in call.keywords):
        raise _unreadable(text, "an option has no name")
    options = {str(each.arg): _value(text, each.value) for each in call.keywords}
    if len(options) < len(call.keywords):
        raise _unreadable(text, "an option is there twice")
    return name.strip(), options


def _value(text: str, value: ast.expr) -> object:
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise _unreadable(text, f"{ast.unparse(value)} is not a plain value") from None


def _unreadable(text: str, fault: str) -> ValueError:
    return ValueError(f"schedule: {text!r} is not a name with options, such as 'interleaved(chunks=3)': {fault}")
