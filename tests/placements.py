"""Every choice of modes that keeps the rules, for tests that go through all of them."""

from __future__ import annotations

import itertools

from autopart.ir.placement import STATES, Mode, Modes


def valid_modes() -> list[Modes]:
    """Every choice of modes that is not refused."""
    found = []
    for choice in itertools.product(Mode, repeat=len(STATES)):
        try:
            found.append(Modes(*choice))
        except ValueError:
            continue
    return found


VALID = valid_modes()
