"""split_backward: Staged + Schedule -> Staged. Cut the backward in two on the stages that perform it as I and W.

before: h_backward(dx, act, x, w) -> d_act @ w, (d_act.T @ x,)           where d_act is made of dx and act
after:  h_backward_input(dx, act, x, w) -> d_act @ w, (x, d_act)         h_backward_weight(x, d_act) -> (d_act.T @ x,)

I (dgrad) makes the gradients that leave the stage, with whatever they need: an operator that makes both kinds of
gradients at once (of a layer norm, a convolution, attention) is in I, and W is handed those of its parameters. W
(wgrad) makes the rest. Where no gradient leaves the stage, as in the first, its whole backward is W.

Operators keep their operands and their order, so gradients are bit for bit those of the whole backward. Between the
two lies the stash: of all that I is given or makes, the fewest bytes from which W can go on (`passes.stash`). Views
cost nothing and are made again in W; pointwise operators are where that makes the stash smaller. All else that both
halves need is computed once, in I: what a backward recomputes of its forward, too. What W alone needs of that, W
recomputes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopart.ir.action import Kind, Schedule
from autopart.ir.graph import Node, Value, ancestors
from autopart.ir.segmented import Body, Function, Half, Halves, Segment, defined
from autopart.ir.staged import Staged
from autopart.passes.stash import Stash


def split_backward(staged: Staged, schedule: Schedule, *, samples: int) -> Staged:
    """The step whose backward is in two where `schedule` has I and W.

    Stashes are the smallest at microbatches of `samples`.
    """
    used = {(action.stage, action.kind) for _, action in schedule.actions()}
    backwards = tuple(
        tuple(kind for kind in (Kind.B, Kind.I, Kind.W) if (stage, kind) in used) for stage in range(len(staged.stages))
    )
    if not any(Kind.I in kinds for kinds in backwards):
        return staged
    _check_whole(staged, schedule, backwards)
    numbers: dict[tuple[int, _Wish | None], int] = {}
    made: list[Body] = []
    stages = []
    for stage, row in enumerate(staged.stages):
        wishes = _wishes(staged, stage) if Kind.I in backwards[stage] else [None] * len(row)
        segments = []
        for segment, wish in zip(row, wishes, strict=True):
            number = numbers.setdefault((segment.body, wish), len(made))
            if number == len(made):
                body = staged.segmented.bodies[segment.body]
                made.append(body if wish is None else _halved(body, segment, wish, samples))
            segments.append(_with_halves(replace(segment, body=number), made[number]))
        stages.append(tuple(segments))
    inside = tuple(staged.sharded.inside[old] for old, _ in numbers)
    whole = replace(
        staged.segmented,
        bodies=tuple(made),
        segments=tuple(s for row in stages[: staged.depth + staged.parts + staged.lookups] for s in row),
    )
    sharded = replace(staged.sharded, segmented=whole, inside=inside)
    return replace(staged, sharded=sharded, stages=tuple(stages), backwards=backwards)


def _check_whole(staged: Staged, schedule: Schedule, backwards: Sequence[tuple[Kind, ...]]) -> None:
    """Refuse chunks in a backward in two: what W needs of them would have to be kept of all."""
    for row, kinds in zip(staged.stages, backwards, strict=True):
        for body in (staged.segmented.bodies[segment.body] for segment in row if Kind.I in kinds):
            if body.backward is not None and body.backward.loops:
                raise ValueError(
                    f"chunks: {body.backward.loops[0].module} is computed in chunks, but the schedule "
                    f"{schedule.name!r} has its backward in two, and what the second needs would be kept "
                    "of all chunks; pin a schedule of whole backwards, such as '1f1b', or leave it out of chunks"
                )


def halves(body: Body, segment: Segment, *, samples: int) -> Halves | None:
    """Those of a body by itself, as if every gradient that its backward hands on left the stage; None without one."""
    if body.backward is None or body.halves is not None:
        return body.halves
    wanted = body.backward.outputs[: len(segment.backward_outputs)]
    return _halved(body, segment, _Wish(wanted, (), (), (), idle=False) if wanted else IDLE, samples).halves


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a use of a body is asked for, by local name: which gradients each half hands on, and which come in where.

    Of the backward's results I makes those `wanted`, W the `others` (gradients of parameters aside); `late` are the
    gradients that come in when W is performed, `free` those that are there for both halves (of outputs, of the loss).
    `idle`: I does nothing on the stage.
    """

    wanted: tuple[str, ...]
    others: tuple[str, ...]
    late: tuple[str, ...]
    free: tuple[str, ...]
    idle: bool


IDLE = _Wish((), (), (), (), idle=True)
"""Where I does nothing, W is the whole backward, whatever comes in and goes out: one body for all such segments."""


def _wishes(staged: Staged, stage: int) -> list[_Wish | None]:
    """What each segment of a stage is asked for, None where it has no backward."""
    segmented, row = staged.segmented, staged.stages[stage]
    demanded = _demanded(staged, stage)
    made = {name for segment in row for name in segment.backward_outputs}
    tangents = {item.value.name for item in segmented.captured.of_kind("tangent")}
    wishes: list[_Wish | None] = []
    for segment in row:
        function = segmented.bodies[segment.body].backward
        if function is None:
            wishes.append(None)
            continue
        if made.isdisjoint(demanded):
            wishes.append(IDLE)
            continue
        results = tuple(zip(function.outputs, segment.backward_outputs, strict=False))
        incoming = tuple(zip(function.inputs, segment.backward_inputs, strict=False))
        wishes.append(
            _Wish(
                wanted=tuple(local for local, name in results if name in demanded),
                others=tuple(local for local, name in results if name not in demanded),
                late=tuple(value.name for value, name in incoming if name in made and name not in demanded),
                free=tuple(value.name for value, name in incoming if name in tangents),
                idle=False,
            )
        )
    return wishes


def _demanded(staged: Staged, stage: int) -> set[str]:
    """The gradients that leave a stage, and those of its own that these need."""
    segmented = staged.segmented
    demanded = {value.name for edge in staged.out_of(stage, forward=False) for value in edge.values}
    demanded |= {out.name for out in segmented.captured.outputs if out.kind == "input_grad"}
    for segment in staged.stages[stage]:  # a gradient is made by a later segment than those that read it
        function = segmented.bodies[segment.body].backward
        if function is not None:
            results = zip(function.outputs, segment.backward_outputs, strict=False)
            read = ancestors(function.nodes, (local for local, name in results if name in demanded))[1]
            incoming = zip(function.inputs, segment.backward_inputs, strict=False)
            demanded |= {name for value, name in incoming if value.name in read}
    return demanded


def _halved(body: Body, segment: Segment, wish: _Wish, samples: int) -> Body:
    """The body with its backward in two."""
    backward = body.backward
    assert backward is not None
    if wish.idle:
        return replace(body, halves=Halves(None, body.saved, backward))
    incoming, kept, rest = _inputs(body, backward, segment)
    results = (*wish.others, *backward.outputs[len(segment.backward_outputs) :])
    first = ancestors(backward.nodes, wish.wanted)[0]
    made = {name for node in first for name in node.names()}
    own = tuple(node for node in ancestors(backward.nodes, results)[0] if made.isdisjoint(node.names()))
    at_hand = {*wish.late, *wish.free, *(value.name for value in rest)}
    stash, again = Stash(body, first, at_hand, samples).least(_outside(own, results))
    second = _in_order(backward.nodes, own, again)
    reads, rereads = _outside(first, (*wish.wanted, *stash)), _outside(second, results)
    values = defined(backward)
    inputs = (
        *(value for value in incoming if value.name in reads),
        *kept,
        *(value for value in rest if value.name in reads),
    )
    carried = (
        *(value for value in incoming if value.name in rereads and value.name in at_hand),
        *(values[name] for name in stash),
        *(value for value in rest if value.name in rereads),
    )
    weight = Function(carried, second, results) if results else None
    return replace(body, halves=Halves(Function(inputs, first, wish.wanted), stash, weight))


def _inputs(
    body: Body, backward: Function, segment: Segment
) -> tuple[tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]:
    """A backward's inputs: the gradients, what was saved, and what is there anyway (fixed ones and parameters)."""
    first = len(segment.backward_inputs)
    second = first + len(body.saved)
    return backward.inputs[:first], backward.inputs[first:second], backward.inputs[second:]


def _outside(nodes: Iterable[Node], results: Iterable[str]) -> dict[str, None]:
    """The names that nodes and results read and no node makes, in order."""
    nodes = tuple(nodes)
    made = {name for node in nodes for name in node.names()}
    read = (*(name for node in nodes for name in node.refs()), *results)
    return dict.fromkeys(name for name in read if name not in made)


def _in_order(nodes: Iterable[Node], own: Iterable[Node], again: Mapping[str, Node]) -> tuple[Node, ...]:
    """W's own nodes and those that it runs again (by a name that they make), in the order of the whole backward."""
    wanted = {node.names()[0]: node for node in own} | dict(again)
    return tuple(wanted[name] for node in nodes for name in node.names()[:1] if name in wanted)


def _with_halves(segment: Segment, body: Body) -> Segment:
    """The segment with what its halves read and hand on."""
    if body.halves is None or body.backward is None:
        return segment
    gradients, kept, _ = _inputs(body, body.backward, segment)
    names = (*segment.backward_inputs, *segment.backward_fixed, *segment.backward_parameters)
    formals = (value.name for value in body.backward.inputs if value not in kept)
    given = dict(zip(formals, names, strict=True))
    results = dict(zip(body.backward.outputs, segment.backward_outputs, strict=False))
    first, last = len(gradients), len(gradients) + len(segment.backward_fixed)

    def half(function: Function | None, kept: tuple[str, ...], count: int) -> Half:
        """That of a function that takes what was `kept`, and whose last `count` results are gradients of parameters."""
        if function is None:
            return Half()
        read = {value.name for value in function.inputs if value.name not in kept}
        taken = [name if local in read else None for local, name in given.items()]
        return Half(
            inputs=tuple(name for name in taken[:first] if name is not None),
            fixed=tuple(name for name in taken[first:last] if name is not None),
            parameters=tuple(name for name in taken[last:] if name is not None),
            outputs=tuple(results[name] for name in function.outputs[: len(function.outputs) - count]),
        )

    return replace(
        segment,
        halves=(
            half(body.halves.input, body.saved, 0),
            half(body.halves.weight, body.halves.stash, len(segment.gradients)),
        ),
    )
