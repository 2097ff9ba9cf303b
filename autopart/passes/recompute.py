"""recompute: Segmented + names -> Segmented. What a backward reads of a recomputed forward, it computes again.

before: h_forward(x) -> y, (x, norm, up, act)   h_backward(dy, x, norm, up, act) -> dx
after:  h_forward(x) -> y, (x,)                 h_backward(dy, x) -> dx, which first makes norm, up and act again

What is recomputed together is a region: the whole forward of a segment that the plan names; else what the user put
into one `torch.utils.checkpoint` call, as far as it lies in the segment. A region's copies read what the region reads:
values from outside are saved, parameters and buffers are read again. What another region's backward needs of it is
saved too, as in eager. Copies that nothing needs are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopart.ir.graph import Node
from autopart.ir.plan import Plan
from autopart.ir.plan_text import spans
from autopart.ir.segmented import Body, Function, Segment, Segmented, defined

Kept = Mapping[int, frozenset[str]]
"""By the number of a body, the local names of what its forward makes that is saved rather than made again."""


def recompute(segmented: Segmented, names: Iterable[str] = (), *, kept: Kept = MappingProxyType({})) -> Segmented:
    """The step in which the segments called `names` and the user's checkpoint regions are recomputed.

    What is `kept` is not, but saved where a backward reads it. Nor is a node that reads a buffer which the step
    updates: by then the buffer may have changed. Names that this step has no segment for are left out (a forward-only
    program of the same plan recomputes nothing).
    """
    names, updated = set(names), _updated(segmented)
    made: dict[object, _Made] = {}
    keys = []
    for segment in segmented.segments:
        body, whole = segmented.bodies[segment.body], segment.layer in names
        incoming = zip(body.forward.inputs, (*segment.values, *segment.forward_fixed), strict=False)
        moving = frozenset(value.name for value, name in incoming if name in updated)
        keys.append((segment.body, whole, moving))
        if keys[-1] not in made:
            made[keys[-1]] = _recomputing(body, segment, whole, moving, kept.get(segment.body, frozenset()))
    numbers = {key: number for number, key in enumerate(made)}
    segments = tuple(
        made[key].reading(segment if segment.body == numbers[key] else replace(segment, body=numbers[key]))
        for key, segment in zip(keys, segmented.segments, strict=True)
    )
    return replace(segmented, bodies=tuple(_named(segmented, [m.body for m in made.values()])), segments=segments)


def with_regions(plan: Plan, segmented: Segmented) -> Plan:
    """The plan with the segments that the user's checkpoint regions recompute whole, and notes on all of them."""
    names = [segment.name for segment in segmented.segments]
    plain, marked, every = (_bodies(made) for made in (segmented, recompute(segmented), recompute(segmented, names)))
    own = [i for i in range(len(names)) if marked[i] != plain[i]]
    whole = [names[i] for i in own if marked[i] == every[i]]
    parts = [names[i] for i in own if names[i] not in (*whole, *plan.recompute)]
    notes = tuple(
        f"recompute {what}{spans(found, names)}: as the model's torch.utils.checkpoint says"
        for what, found in (("", whole), ("parts of ", parts))
        if found
    )
    recomputed = tuple(name for name in names if name in whole or name in plan.recompute)
    return replace(plan, recompute=recomputed, notes=(*plan.notes, *notes))


def _bodies(segmented: Segmented) -> list[Body]:
    """Each segment's body, but for its name."""
    unnamed = [replace(body, name="") for body in segmented.bodies]
    return [unnamed[segment.body] for segment in segmented.segments]


@dataclass(frozen=True, slots=True)
class _Made:
    """A body, and which of its forward's buffers and parameters its backward now reads too, by position."""

    body: Body
    fixed: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()

    def reading(self, segment: Segment) -> Segment:
        """The segment with what its backward reads."""
        if not self.fixed and not self.parameters:
            return segment
        return replace(
            segment,
            backward_fixed=(*segment.backward_fixed, *(segment.forward_fixed[i] for i in self.fixed)),
            backward_parameters=(
                *segment.backward_parameters,
                *(segment.forward_parameters[i] for i in self.parameters),
            ),
        )


def _updated(segmented: Segmented) -> set[str]:
    """The values of the buffers that the step changes."""
    targets = {out.target for out in segmented.captured.updates()}
    return {item.value.name for item in segmented.captured.of_kind("buffer") if item.target in targets}


def _recomputing(body: Body, segment: Segment, whole: bool, updated: Set[str], kept: Set[str]) -> _Made:
    """The body with its regions recomputed; as it is where there is nothing to recompute."""
    if body.backward is None:
        return _Made(body)
    copies, needed = _copies(body, whole, updated, kept)
    if not copies:
        return _Made(body)
    forward, backward = body.forward, body.backward
    start = len(segment.values)
    stop = start + len(segment.forward_fixed)
    held = {value.name for value in forward.inputs[start:]}
    known = {value.name for value in backward.inputs}
    values = {name: value for name, value in defined(forward).items() if name in needed}
    saved = [name for name in body.saved if name in needed]
    saved += [name for name in values if name not in held and name not in saved]
    fixed = [i for i, v in enumerate(forward.inputs[start:stop]) if v.name in needed and v.name not in known]
    parameters = [i for i, v in enumerate(forward.inputs[stop:]) if v.name in needed and v.name not in known]
    gradients = len(segment.backward_inputs)
    last = gradients + len(body.saved) + len(segment.backward_fixed)
    inputs = (
        *backward.inputs[:gradients],
        *(values[name] for name in saved),
        *backward.inputs[gradients + len(body.saved) : last],
        *(forward.inputs[start + i] for i in fixed),
        *backward.inputs[last:],
        *(forward.inputs[stop + i] for i in parameters),
    )
    function = Function(inputs, _placed(copies, backward.nodes, whole), backward.outputs)
    return _Made(replace(body, saved=tuple(saved), backward=function), tuple(fixed), tuple(parameters))


def _copies(body: Body, whole: bool, updated: Set[str], kept: Set[str]) -> tuple[dict[int, list[Node]], set[str]]:
    """What to run again in the backward, by region, and every value that the backward then still takes from outside."""
    assert body.backward is not None

    def region(node: Node) -> int:
        return 0 if whole else node.region

    again = {
        name: region(node)
        for node in body.forward.nodes
        if region(node) >= 0 and updated.isdisjoint(node.refs())
        for name in node.names()
        if name not in kept
    }
    wanted: set[str] = set()
    needed = set(body.backward.outputs)
    for node in body.backward.nodes:
        for name in node.refs():
            (wanted if again.get(name) == region(node) else needed).add(name)
    copies: dict[int, list[Node]] = {}
    for node in reversed(body.forward.nodes):
        names = {name for name in node.names() if name in wanted and name not in needed}
        if names:
            outs = tuple(out if out is not None and out.name in names else None for out in node.outs)
            copies.setdefault(region(node), []).insert(0, replace(node, outs=outs))
            for name in node.refs():
                (wanted if again.get(name) == region(node) else needed).add(name)
    return copies, needed


def _placed(copies: dict[int, list[Node]], backward: tuple[Node, ...], whole: bool) -> tuple[Node, ...]:
    """The backward with each region's copies where its backward begins, so that those of one region live at a time."""
    waiting = dict(copies)
    nodes: list[Node] = []
    for node in backward:
        nodes += waiting.pop(0 if whole else node.region, [])
        nodes.append(node)
    return tuple(nodes)


def _named(segmented: Segmented, bodies: list[Body]) -> Iterable[Body]:
    """A body whose name another one has, as it was before, is called after what it does."""
    plain = {body.name for body in bodies if body in segmented.bodies}
    for body in bodies:
        changed = body not in segmented.bodies
        yield replace(body, name=f"{body.name}_recomputed") if changed and body.name in plain else body
