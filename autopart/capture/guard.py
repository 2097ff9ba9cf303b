"""Capture runs the user's Python; this keeps it from leaving traces in the user's objects."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

from autopart.errors import CaptureError


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Put back every submodule's attributes and every random generator afterwards.

    Raises CaptureError if Python's or numpy's generator moved: what the model drew would be frozen into the graph.
    """
    attributes = [(part, _copied(part)) for part in module.modules()]
    generator = torch.get_rng_state()
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    moved = False
    try:
        yield
        moved = random.getstate() != python
        if numpy is not None and drawn is not None:
            now = numpy.random.get_state()
            moved = moved or now[2:] != drawn[2:] or not (now[1] == drawn[1]).all()
    finally:
        for part, saved in attributes:
            part.__dict__.clear()
            part.__dict__.update(saved)
        torch.set_rng_state(generator)
        random.setstate(python)
        if numpy is not None and drawn is not None:
            numpy.random.set_state(drawn)
    if moved:
        raise CaptureError(
            f"{type(module).__name__}.forward draws random numbers from Python or numpy, which would be frozen into the "
            "program at their first values; draw them with torch, or pass them in as an argument"
        )


def _copied(part: torch.nn.Module) -> dict[str, object]:
    """The module's attributes, its registries copied one level deep so that edits to them are undone too."""
    registries = ("_parameters", "_buffers", "_modules")
    return {k: (dict(v) if k in registries else v) for k, v in part.__dict__.items()}
