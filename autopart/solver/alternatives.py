"""The runners-up of a plan: for each kind of choice the best plan that chooses otherwise, found by the same search.

Those of the mesh, the placement and the number of microbatches are looked for under the plan's schedule and the first
one that is looked at; another schedule, with the mesh, the placement and the number of microbatches of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopart.cluster import Cluster
from autopart.ir.choice import Alternative, SegmentFact
from autopart.ir.plan_text import rules, spans
from autopart.solver.cut import Cut
from autopart.solver.joint import Best, best, leanest
from autopart.solver.kinds import FEMTOSECONDS
from autopart.solver.setting import Setting
from autopart.solver.space import Space


def alternatives(space: Space, chosen: Best) -> tuple[Alternative, ...]:
    """What else could have been chosen, a runner-up for each kind of choice that is not pinned."""
    return tuple(
        found
        for kind in (_mesh, _placement, _microbatches, _devices, _schedule, _split, _recompute)
        for found in kind(space, chosen)
    )


def _mesh(space: Space, chosen: Best) -> Iterator[Alternative]:
    """Another mesh; and if that has the same axes inside segments, the best with others, where there are some."""
    here = chosen.setting.mesh.inside
    others = [each for each in _alike(space, chosen) if each.mesh != chosen.setting.mesh]
    if not others:
        return
    found = best(space, others)
    yield from _result(space, "mesh", others, found)
    if found is None or found.setting.mesh.inside == here:
        yield from _best(space, "tensor degree", [each for each in others if each.mesh.inside != here])


def _alike(space: Space, chosen: Best) -> list[Setting]:
    """The settings with the schedule of the plan, or the first one that is looked at."""
    names = chosen.setting.text, space.request.schedules[0]
    return [each for each in space.settings if each.text in names]


def _placement(space: Space, chosen: Best) -> Iterator[Alternative]:
    mesh, placements = chosen.setting.mesh, chosen.setting.placements
    others = [each for each in _alike(space, chosen) if each.mesh == mesh and each.placements != placements]
    yield from _best(space, "placement", others)


def _microbatches(space: Space, chosen: Best) -> Iterator[Alternative]:
    setting = chosen.setting
    others = [
        each
        for each in _alike(space, chosen)
        if (each.mesh, each.placements) == (setting.mesh, setting.placements)
        and each.microbatches != setting.microbatches
    ]
    yield from _best(space, "microbatches", others)


def _devices(space: Space, chosen: Best) -> Iterator[Alternative]:
    """Another order of groups of unlike devices, all else being the plan's."""
    here = replace(chosen.setting, groups=())
    others = [each for each in space.settings if each.groups and replace(each, groups=()) == here]
    yield from _best(space, "order of devices", [each for each in others if each.groups != chosen.setting.groups])


def _schedule(space: Space, chosen: Best) -> Iterator[Alternative]:
    """Another schedule with the same mesh, placement and microbatches; of a pinned one, the other whole flush."""
    setting, other = chosen.setting, {"1f1b": "gpipe", "gpipe": "1f1b"}
    if space.request.searched:
        here = replace(setting, text="", order=0, variant=0)
        others = [each for each in space.settings if replace(each, text="", order=0, variant=0) == here]
        yield from _best(space, "schedule", [each for each in others if each.text != setting.text])
    elif setting.mesh.degree("pp") > 1 and setting.text in other and not space.request.forwards_first:
        yield from _best(space, "schedule", [replace(setting, text=other[setting.text])])


def _split(space: Space, chosen: Best) -> Iterator[Alternative]:
    if chosen.setting.mesh.degree("pp") > 1:
        found = space.best(chosen.setting)
        if found is not None and found.next is not None:
            names = space.request.names
            begin = ", ".join(names[start] for start in found.next.starts[1:])
            yield _told(space, "split", f"stages from {begin}", chosen.setting, found.next)


def _recompute(space: Space, chosen: Best) -> Iterator[Alternative]:
    """Nothing recomputed where something is, else everything that keeps less by it."""
    request, setting = space.request, chosen.setting
    if not request.free:
        return
    if chosen.cut.recomputed:
        found = space.best(setting, recomputing=False)
        if found is not None and found.cut is not None:
            yield _told(space, "recompute", "nothing", setting, found.cut)
        else:
            yield Alternative("recompute", "nothing", None, int(space.least(setting, recomputing=False)))
    elif any(again is not None for again in request.at(setting.variant).recomputed):
        everything = request.at(setting.variant).recomputing()
        other = Space(replace(everything, free=False))
        yield from _best(other, "recompute", [setting], spans(everything.recompute, request.names))


def _best(space: Space, choice: str, settings: list[Setting], option: str = "") -> Iterator[Alternative]:
    """The best plan of some settings, or what they need at least."""
    if settings:
        yield from _result(space, choice, settings, best(space, settings), option)


def _result(
    space: Space, choice: str, settings: list[Setting], found: Best | None, option: str = ""
) -> Iterator[Alternative]:
    if found is not None:
        option = option or _option(choice, found.setting, space.request.cluster)
        yield _told(space, choice, option, found.setting, found.cut)
        return
    setting, need = leanest(space, settings)
    yield Alternative(choice, option or _option(choice, setting, space.request.cluster), None, need)


def _told(space: Space, choice: str, option: str, setting: Setting, cut: Cut) -> Alternative:
    return Alternative(choice, option, cut.step / FEMTOSECONDS, space.peak(setting, cut))


def _option(choice: str, setting: Setting, cluster: Cluster) -> str:
    placements = setting.placements
    placement = str(placements[0][1]) if len(placements) == 1 else rules(placements)
    microbatches = f"{setting.microbatches} microbatch{'es' * (setting.microbatches > 1)}"
    match choice:
        case "mesh" | "tensor degree":
            return f"{setting.mesh} with placement {placement} and {microbatches}"
        case "placement":
            return f"{placement} with {microbatches}"
        case "microbatches":
            return microbatches
        case "order of devices":
            return ", ".join(cluster.groups[group].device.name for group in setting.groups)
        case _:
            return setting.text


def facts(space: Space, setting: Setting) -> tuple[SegmentFact, ...]:
    """What the segments cost at the microbatches of a setting, those of a kind together."""
    table, names = space.table(setting), space.request.names
    again = {each.kind: each for each in table.again}
    made = []
    for kind, numbers in enumerate(table.numbers):
        change = again.get(kind)
        more = {}
        if change is not None:
            more = {
                "again_seconds": (change.more[0] + change.more[1]) / FEMTOSECONDS,
                "again_saved_bytes": numbers.saved_bytes - change.gain,
                "again_transient": change.transient,
            }
        made.append(
            SegmentFact(
                segments=tuple(name for name, other in zip(names, table.kinds.of, strict=True) if other == kind),
                forward_seconds=table.times[kind][0] / FEMTOSECONDS,
                backward_seconds=table.times[kind][1] / FEMTOSECONDS,
                parameter_bytes=numbers.parameter_bytes,
                saved_bytes=numbers.saved_bytes,
                **more,  # type: ignore[arg-type]
            )
        )
    return tuple(made)
