"""The registry of schedule families: build one by name, list them all."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import replace

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
    which the same schedule can be built. Raises ValueError for an unknown name, a count below 1 or one that the family
    cannot take, TypeError for a count that is no whole number or an option that the family does not have.
    """
    bare, written = _read(name)
    family = {each.name: each for each in (*FAMILIES, flush.FORWARD)}.get(bare)
    if family is None:
        raise ValueError(
            f"schedule: unknown name {name!r}; the schedules are {', '.join(each.name for each in FAMILIES)}"
        )
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    known = dict(list(inspect.signature(family.make).parameters.items())[2:])
    for option in (*written, *options):
        if option not in known:
            takes = f"its options are {', '.join(known)}" if known else "it has no options"
            raise TypeError(f"schedule {bare!r} has no option {option!r}; {takes}")
        if option in written and option in options:
            raise TypeError(f"schedule {name!r} has the option {option!r} already")
    chosen = {key: value for key, value in {**written, **options}.items() if value != known[key].default}
    made = family.make(ranks, microbatches, **chosen)
    return replace(made, name=_recipe(bare, {key: chosen[key] for key in known if key in chosen}))


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
        assert isinstance(call, ast.Call) and not call.args
        return name.strip(), {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(f"schedule: {text!r} is not a name with options, such as 'interleaved(chunks=3)'") from None
