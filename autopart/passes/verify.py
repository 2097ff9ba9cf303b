"""verify: Program -> Report. The gate that every program passes; an edited text goes through the same one.

before: texts, whoever wrote them
after:  what was checked, a count a rule; or VerificationError for the first rule that is broken

Each rank's text is run on shapes (`codegen.recording`) at the plan's batch size and at one that is cut differently, so
that microbatches differ in size. What the texts do is then held against these rules:

``text``         it runs, values of different microbatches do not mix, and it is the text of this rank of this plan;
                 a body writes over nothing but what it made itself and neither reads later nor hands on
``transfers``    every send has its receive: on both ends the same order, microbatches, shapes and dtypes
``collectives``  the ranks of a group call the same collectives in the same order
                 on values inside a layer too: with the shapes, the pieces and the reduction that the others have
``deadlock``     all ranks end even if every send waits for its receive and every collective for all of its group
                 nothing meets across the yield of a step that waits for the gradients of its outputs
``stores``       what is stored for later is taken out, once
``work``         each microbatch has one forward and one backward on each stage (where that is in two, I and then W) of
                 one copy of the model; they read every parameter as placed, gathered before its use if it is kept in
                 parts (a gather begun ahead is of what is used next), made whole again at the start of the step if an
                 optimizer updated it in parts
``values``       each action calls each layer once, in order, with the values, inputs, buffers, parameters, random
                 draws, prologue values and gradients of outputs that the graph gives it, and exchanges inside what the
                 graph of its place exchanges, in that order, and then reads all that the graph reads; what is sent,
                 added to gradients, stored in buffers and handed out is what the layer returned for that
``gradients``    each backward (W, where it is in two) adds every gradient that it makes, once, to its own unit; each
                 unit is reduced once over dp, and once over the stages that share it, after its last contribution; what
                 begins to be reduced is waited for
``buffers``      each forward updates every buffer that it has to, once; after the last update they are made one over
                 dp, and every stage learns them
``outputs``      each rank returns the outputs that it makes or needs, whole, or yields them before the backward; a sum
                 over the batch has the part of every microbatch once; what a data rank counted of its own samples
                 (``inputs="local"``) is summed before its use

The text of a loop whose steps overlap is run for a few batches and to its end. For it, instead of `gradients`:

``updates``      each stage steps once a batch, after its last backward and before the gradients of the next one, on
                 what is reduced over dp
``versions``     each forward and backward uses the version of the weights that the schedule says, which is kept till
                 then

What must be there follows from the program's graph, plan and state, never from the passes that wrote the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopart.codegen.shapes import Bodies, Spec, shown
from autopart.ir.graph import Output, Value
from autopart.ir.mesh import pieces
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.verify_between import collectives, ends, transfers
from autopart.passes.verify_buffers import buffers
from autopart.passes.verify_overlap import losses, updates, used
from autopart.passes.verify_texts import Text, fault, read
from autopart.passes.verify_values import Values, values
from autopart.passes.verify_within import Needs, copies_travelled, gradients, needs, work
from autopart.schedules.stream import overlaps, stream_of

Made = tuple[Value, frozenset[int]]
"""A value that leaves a segment, and the stages that make it: one in each copy of the model."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A rule that holds, and how many of `what` it was checked on."""

    rule: str
    count: int
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` checked; `batches` are the batch sizes at which the texts were run."""

    checked: tuple[Checked, ...]
    batches: tuple[int, ...]

    def __str__(self) -> str:
        """A line a rule."""
        width = max(len(item.rule) for item in self.checked)
        lines = [f"{item.rule:<{width}}  {item.count:>6} {item.what}" for item in self.checked]
        return "\n".join([*lines, f"checked at batches of {' and '.join(map(str, self.batches))} samples"])


def verify(program: Program, *, bodies: Bodies | None = None) -> Report:
    """Check a program's texts by every rule above.

    Raises VerificationError for the first that is broken, naming the rule, the rank, where it applies the stage, the
    microbatch and the action, the line of the text, and what to do. `bodies` is what is known of bodies on shapes
    already, from `emit`; a text is looked up there by all that it says.
    """
    plan = program.plan
    if [rank.rank for rank in program.ranks] != list(range(plan.mesh.size)):
        numbers = [rank.rank for rank in program.ranks]
        problem = f"its ranks are {numbers}"
        raise fault("text", "program", problem, f"a mesh of {plan.mesh} has the ranks 0 to {plan.mesh.size - 1}")
    staged = program.staged
    needed = tuple(needs(staged, stage) for stage in range(len(staged.stages)))
    makers: dict[str, set[int]] = {}
    for stage, row in enumerate(staged.stages):
        for name in (name for item in row for name in (*item.outputs, *item.backward_outputs)):
            makers.setdefault(name, set()).add(stage)
    values = {value.name: value for value in program.captured.values()}
    made = {name: (values[name], frozenset(stages)) for name, stages in makers.items() if name in values}
    bodies = bodies or Bodies()
    batches = _batches(plan)
    known = tuple(map(Values, program.places))
    checked = [_checked(program, needed, made, known, batch, bodies) for batch in batches]
    return Report(checked[0], batches)


def _batches(plan: Plan) -> tuple[int, int]:
    """The plan's batch size, and one whose microbatches differ in size where the plan's do not, or the other way about.

    The two have a microbatch size in common, so that few bodies must be run anew. Where places have some samples of
    each microbatch, both have equal microbatches that can be split so.
    """
    parts = plan.mesh.parts * plan.microbatches
    if plan.tensor is not None and plan.tensor.of_samples > 1:
        return plan.batch, plan.batch + parts * plan.tensor.of_samples
    sizes = [size for share in plan.mesh.dealt(plan.batch) for size in pieces(share, plan.microbatches)]
    if plan.mesh.shares:
        return plan.batch, 2 * plan.batch
    if len(set(sizes)) > 1:
        return plan.batch, parts * max(sizes)
    return plan.batch, plan.batch + max(1, parts // 2)


def _checked(
    program: Program,
    needed: Sequence[Needs],
    made: Mapping[str, Made],
    known: Sequence[Values],
    batch: int,
    bodies: Bodies,
) -> tuple[Checked, ...]:
    training, state = program.captured.training, program.state
    texts = [read(program, rank, batch, bodies) for rank in range(len(program.ranks))]
    sent = transfers(texts, {(edge.source, edge.target): edge.deal for edge in program.staged.edges if edge.deal})
    # What one rank does wrong by itself is told before what then does not fit between ranks.
    alone = _distinct(texts)
    stored = sum(n * _check_stores(text) for text, n in alone)
    stream = stream_of(program.plan) if training and overlaps(program.plan.schedule) else None
    count = stream.shown if stream is not None else 1
    travelled = copies_travelled(texts, program.staged, program.plan.microbatches * count)
    actions = sum(n * work(text, needed, state, travelled, training) for text, n in alone)
    given = sum(n * values(text, known[program.plan.place_inside(text.rank)]) for text, n in alone)
    graded = [
        (*(gradients(text, needed, state) if stream is None else updates(text, needed, state, stream)), n)
        for text, n in alone
    ]
    versions = 0 if stream is None else sum(n * used(text, program.plan, stream) for text, n in alone)
    renewed = [program.staged.updated(stage) for stage in range(len(program.staged.stages))]
    updated = sum(n * buffers(text, program.staged, renewed) for text, n in alone)
    shared = collectives(texts)
    meetings = ends(texts, [*sent, *shared])
    if stream is None:
        outputs = sum(_check_outputs(text, program, made, travelled, batch) for text in texts)
    else:
        outputs = sum(losses(text, program.staged, stream) for text in texts)
    return (
        Checked("text", len(texts), "texts"),
        Checked("transfers", len(sent), "sends with their receives"),
        Checked("collectives", len(shared), "collectives of whole groups"),
        Checked("deadlock", meetings, "transfers and collectives in order"),
        Checked("stores", stored, "values kept for later"),
        Checked("work", actions, "forwards and backwards"),
        Checked("values", given, "values given to layers"),
        Checked(
            "gradients",
            sum(n * a for a, _, n in graded),
            f"contributions, {sum(n * b for _, b, n in graded)} {'reductions' if stream is None else 'updates'}",
        ),
        *((Checked("buffers", updated, "updates of buffers"),) if updated else ()),
        *((Checked("versions", versions, "actions on their version of the weights"),) if versions else ()),
        Checked("outputs", outputs, "outputs"),
    )


def _distinct(texts: Sequence[Text]) -> list[tuple[Text, int]]:
    """The texts of ranks that do different things, each with the number of ranks that do the same (data ranks do)."""
    alike: dict[tuple[int, tuple[int, ...]], list[Text]] = {}
    for text in texts:
        alike.setdefault((id(text.recording.events), text.stages), []).append(text)
    return [(group[0], len(group)) for group in alike.values()]


def _check_stores(text: Text) -> int:
    if text.recording.kept:
        where = text.where(text.recording.kept[0])
        problem = f"{len(text.recording.kept)} stored values are never taken out, the first from {where}"
        raise fault("stores", f"rank {text.rank}", problem, "take each out once, where it is used")
    return text.recording.stored


def _check_outputs(
    text: Text, program: Program, made: Mapping[str, Made], travelled: Sequence[Sequence[int]], batch: int
) -> int:
    """The step returns what it must, each whole (or yields it, before the backward); the number of outputs."""
    captured, plan = program.captured, program.plan
    wanted = {
        out.name: out
        for out in captured.outputs
        if out.kind in ("loss", "output", "input_grad")
        and out.name in made
        and (out.partial or out.everywhere or made[out.name][1] & {*text.stages})
    }
    for name, out in wanted.items():
        early = captured.deferred and out.kind == "output"
        result = text.recording.yielded if early else text.recording.result
        found = result if isinstance(result, dict) else {}
        value = made[name][0]
        expected, given = Spec(_whole(out, value, text, plan, batch), value.dtype), found.get(name)
        if given != expected:
            returned = shown([given]) if isinstance(given, Spec) else f"a {type(given).__name__}"
            problem = f"step {'yields' if early else 'returns'} {returned} as {name!r}"
            remedy = f"return the whole output, {shown([expected])}"
            raise fault("outputs", f"rank {text.rank}", problem, remedy)
    _check_total(text, [made[out.name][1] for out in wanted.values() if out.partial], travelled)
    return len(wanted)


def _whole(out: Output, value: Value, text: Text, plan: Plan, batch: int) -> tuple[int, ...]:
    """The shape of an output in which microbatches (and data ranks, where each rank gets the whole) are joined."""
    shares = plan.mesh.dealt(batch)
    if out.partial:
        return value.at(1)
    if out.dim is None:
        return value.at(pieces(shares[0], plan.microbatches)[0] if out.everywhere else text.samples[0])
    every = [size for share in shares for size in pieces(share, plan.microbatches)]
    shapes = [value.at(size) for size in (every if out.everywhere else text.samples)]
    return (*shapes[0][: out.dim], sum(shape[out.dim] for shape in shapes), *shapes[0][out.dim + 1 :])


def _check_total(text: Text, makers: Sequence[frozenset[int]], travelled: Sequence[Sequence[int]]) -> None:
    """Sums over the world have the part of every microbatch from the rank that makes it, and nothing from others."""
    here = [stages & {*text.stages} for stages in makers if text.mesh.leads(text.rank)]
    made, every = sum(map(bool, here)), sorted(k for stage in frozenset().union(*here) for k in travelled[stage])
    for event in (event for event in text.events if event.call == "total"):
        parts = [spec.microbatch for spec in event.what[1:] if spec is not None]
        if parts and (sorted(parts, key=str) != sorted(every, key=str) or not made):
            problem = f"it sums the parts of the microbatches {parts}"
            raise fault("outputs", text.at(event), problem, f"pass those of {every if made else 'none'}, each once")
        made -= bool(parts)
    if made:
        problem = f"{made} outputs made here are not summed"
        raise fault("outputs", f"rank {text.rank}", problem, "pass their parts to world.total")
