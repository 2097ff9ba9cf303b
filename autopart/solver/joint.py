"""The joint search: of all settings of the global choices and all their splits, the plan with the shortest step.

Settings are looked at in the order of their lower bounds (`Space.bound`), but for those that are above the best plan
found; first those with one stage a rank, whose plans take less to find. What is left of the search is the gap: the best
plan against the least bound of a setting that was not searched to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from autopart.solver.cut import Cut
from autopart.solver.setting import Setting
from autopart.solver.space import Space

Progress = Callable[[int, int], None]
"""Told how many settings are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan of some settings, and what is proven of it.

    No plan of these has a step below `bound`, and none where each rank holds one stage has one below `narrow`.
    """

    setting: Setting
    cut: Cut
    bound: int
    complete: bool  # whether there was time for all
    narrow: int

    @property
    def gap(self) -> float:
        """By how much of it a shorter step could be better, 0 for an optimal plan."""
        return self.over(self.bound)

    def over(self, bound: int) -> float:
        """By how much of it the step is above a bound."""
        return self.cut.step / bound - 1 if 0 < bound < self.cut.step else 0.0


def best(
    space: Space,
    settings: Iterable[Setting],
    *,
    limit: int | None = None,
    deadline: float = inf,
    progress: Progress = lambda done, count: None,
) -> Best | None:
    """The plan of some settings with the shortest step within a limit, by default the request's; None if none fits.

    After `deadline`, by `time.monotonic`, the best so far is returned, once there is one. Of equally fast plans it is
    the one that recomputes fewer segments, then that of the preferred setting.
    """
    waiting = sorted(
        ((space.form(each).several, space.bound(each), each.preference, each) for each in settings),
        key=lambda each: each[:3],
    )
    found: tuple[Setting, Cut] | None = None
    open_bounds: dict[bool, list[int]] = {False: [], True: []}  # of settings with several stages a rank, and not
    complete = True
    for done, (several, bound, _, setting) in enumerate(waiting):
        progress(done, len(waiting))
        if found is not None and bound > found[1].step:
            continue
        if found is not None and time.monotonic() > deadline:
            open_bounds[several].append(bound)
            complete = False
            continue
        outcome = space.best(setting, inf if found is None else found[1].step, limit=limit)
        if outcome is None:
            continue
        open_bounds[several].append(max(bound, outcome.bound))
        if outcome.cut is not None and (found is None or _order(setting, outcome.cut) < _order(*found)):
            found = setting, outcome.cut
    if found is None:
        return None
    narrow = min([*open_bounds[False], found[1].step])
    return Best(*found, min([*open_bounds[True], narrow]), complete, narrow)


def _order(setting: Setting, cut: Cut) -> tuple[object, ...]:
    return cut.step, cut.recomputed, setting.preference, cut.order


def leanest(space: Space, settings: Iterable[Setting], *, recomputing: bool | None = None) -> tuple[Setting, int]:
    """Of some settings the one that fits the smallest limit, the preferred one of equals, and that limit.

    Only lean schedules are asked where they are among those of the settings.
    """
    first, *others = sorted(space.lean(settings), key=lambda each: each.preference)
    found = first, space.least(first, recomputing=recomputing)
    for setting in others:
        if space.fits(setting, found[1] - 1, recomputing=recomputing):
            found = setting, space.least(setting, recomputing=recomputing)
    return found
