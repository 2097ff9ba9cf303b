"""The text of the stage functions: segments called in order, repeated ones in a loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopart.codegen.bodies import SUFFIX
from autopart.codegen.functions import call, communicates, tuple_of
from autopart.codegen.layout import Layout
from autopart.codegen.moves import Lines, moves
from autopart.codegen.moves import lines as lines_of
from autopart.codegen.roll import template
from autopart.ir.action import Kind
from autopart.ir.captured import describe
from autopart.ir.graph import Input, Value
from autopart.ir.names import RESERVED, identifier
from autopart.ir.segmented import Segment
from autopart.ir.staged import Edge, Staged
from autopart.ir.state import Unit


@dataclass(frozen=True, slots=True)
class Use:
    """One call of a body's function by one segment: global names in and out, and the lines around the call."""

    name: str  # of the function
    takes: tuple[str, ...]  # values by global name
    arguments: tuple[str, ...]  # source of the other arguments
    gives: tuple[str, ...]  # values by global name
    variables: tuple[str, ...]  # a good name for each of them
    extra: tuple[str, ...]  # further results: the saved tuple, gradients of units
    before: tuple[str, ...]  # lines before the call that are other calls' too
    after: tuple[str, ...]  # lines after the call
    behind: tuple[str, ...]  # lines after the call that are other calls' too
    place: int  # the segment's own number in its name, if any
    first: tuple[str, ...] = ("b", "B")  # the arguments before all others


@dataclass
class _Writer:
    """Lines of one stage function being written; `env` has the source of every value that is at hand."""

    env: dict[str, str]
    needed: frozenset[str]  # values that leave the stage
    lines: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: set(RESERVED))

    def fresh(self, wish: str) -> str:
        """A variable name that is not in use yet."""
        base = identifier(wish, "layer_")
        name, n = base, 1
        while name in self.names:
            n += 1
            name = f"{base}_v{n}"
        self.names.add(name)
        return name


def function_of(
    staged: Staged,
    stage: int,
    kind: Kind,
    layouts: Sequence[Layout],
    names: Mapping[object, str],
    degree: int,
    completed: Mapping[str, tuple[Unit, ...]],
    last: int,
) -> list[str]:
    """A stage's function for one kind of action; the backward's are ``[]`` where they would do nothing.

    ``stageN_forward(world, batch, k, edges..., prologue...) -> edges..., outputs..., saved``
    ``stageN_backward(world, batch, k, saved, edges..., prologue...) -> edges..., gradients of inputs...``
    ``stageN_backward_input(...)`` is the same, and returns the ``stash`` too, which is what
    ``stageN_backward_weight(world, batch, k, stash, prologue...)`` takes. A part of the output layer has

    ``stageN_logits(world, batch, k, edges..., prologue...) -> edges..., saved``
    ``stageN_loss(world, batch, k, saved, edges..., prologue...) -> edges..., outputs...``

    Where no gradient leaves the stage, it is the latter that takes all that a backward does. After `saved` come
    `tangents` where the stage makes outputs of a step without a loss. The backward (or W) of microbatch `last`
    completes the gradients of the units in `completed`, by segment, whose reduction begins as soon as each is there.
    """
    order = layouts if kind in (Kind.F, Kind.S) else reversed(layouts)
    rows = [item for item in order if kind in item.phases]
    if kind is not Kind.F and not rows:
        return []
    completed = completed if any(item.phases[kind].gradients for item in rows) else {}
    taken, kept = stores_of(staged, stage, kind)
    moved = lines_of(rows, kind, degree, moves(staged, stage, kind, degree, completed))
    uses = [_use(item, kind, names, each, taken, kept) for item, each in zip(rows, moved, strict=True)]
    edges_in, edges_out = stage_edges(staged, stage, kind)
    results = stage_results(staged, stage, kind)
    writer = _Writer({}, frozenset([*(v.name for e in edges_out for v in e.values), *results]))
    prologue = stage_prologue(staged, stage, kind)
    given = [taken] * bool(taken) + ["tangents"] * takes_tangents(staged, stage, kind)
    lines = _head(staged, f"stage{stage}_{SUFFIX[kind]}", edges_in, given, prologue, writer, degree)
    if completed:
        lines.append(f"    last = k == {last}  # then gradients are complete, and each begins to be reduced")
    lines += _inputs(staged, uses, writer)
    lines += [_tangent(staged, item, writer) for item in stage_tangents(staged, stage, kind)]
    lines += [f"    {kept} = []"] if kept else []
    _write(uses, writer)
    returned = [tuple_of(writer.env[value.name] for value in edge.values) for edge in edges_out]
    returned += [writer.env[name] for name in results] + [kept] * bool(kept)
    return [*lines, *writer.lines, *([f"    return {', '.join(returned)}"] if returned or kind is Kind.F else [])]


def stores_of(staged: Staged, stage: int, kind: Kind) -> tuple[str, str]:
    """What a stage's function takes of what an earlier one kept, and what it keeps itself; "" for nothing."""
    keeps = any(phase.keeps is not None for _, phase in staged.phases(stage, kind))
    if kind in (Kind.F, Kind.S):
        return "", "saved" if keeps else ""
    return "saved" if staged.enters(stage, kind) else "stash", "stash" if keeps else ""


def stage_edges(staged: Staged, stage: int, kind: Kind) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
    """The edges of which a stage's function takes the values, and those that it makes the values for."""
    if staged.is_part(stage):
        return staged.part_edges(stage, kind)
    if kind is Kind.F:
        return staged.into(stage, forward=True), staged.out_of(stage, forward=True)
    if staged.enters(stage, kind):
        return staged.into(stage, forward=False), staged.out_of(stage, forward=False)
    return (), ()


def stage_results(staged: Staged, stage: int, kind: Kind) -> tuple[str, ...]:
    """The outputs of the step, or the gradients of inputs, that a stage's function returns."""
    if kind in (Kind.F, Kind.T):
        return stage_outputs(staged, stage)
    return () if kind is Kind.S else stage_input_gradients(staged, stage) if staged.enters(stage, kind) else ()


def takes_tangents(staged: Staged, stage: int, kind: Kind) -> bool:
    """Whether a stage's function is given the gradients of outputs."""
    return staged.segmented.captured.deferred and bool(stage_tangents(staged, stage, kind))


def _tangent(staged: Staged, item: Input, writer: _Writer) -> str:
    """The line that makes the gradient of an output, or of the loss, for a microbatch."""
    value = item.value
    if item.target == "loss":
        writer.env[value.name] = "one"
        return f"    one = torch.ones((), dtype={value.dtype}, device=DEVICE)"
    outputs = staged.segmented.captured.outputs
    dim = next(out.dim for out in outputs if out.kind == "output" and out.target == item.target)
    whole = f'tangents["{value.name}"]'
    writer.env[value.name] = writer.fresh(value.name)
    return f"    {writer.env[value.name]} = {whole if dim is None else f'batch.cut({whole}, k, dim={dim})'}"


def stage_outputs(staged: Staged, stage: int) -> tuple[str, ...]:
    """The names of the step's outputs that a stage makes."""
    made = {name for segment in staged.stages[stage] for name in (*segment.outputs, *segment.backward_outputs)}
    wanted = dict.fromkeys(out.name for out in staged.segmented.captured.outputs if out.kind in ("loss", "output"))
    return tuple(name for name in wanted if name in made)


def stage_input_gradients(staged: Staged, stage: int) -> tuple[str, ...]:
    """The names of the gradients of inputs that a stage's backward makes."""
    made = {name for segment in staged.stages[stage] for name in segment.backward_outputs}
    outputs = staged.segmented.captured.outputs
    return tuple(out.name for out in outputs if out.kind == "input_grad" and out.name in made)


def stage_tangents(staged: Staged, stage: int, kind: Kind) -> tuple[Input, ...]:
    """The gradients of outputs, and of the loss, that a stage's function begins with."""
    read = {name for _, phase in staged.phases(stage, kind) for name in phase.takes}
    return tuple(item for item in staged.segmented.captured.of_kind("tangent") if item.value.name in read)


def stage_prologue(staged: Staged, stage: int, kind: Kind) -> tuple[str, ...]:
    """The prologue values that a stage's function reads."""
    kinds = {item.value.name: item.kind for item in staged.segmented.captured.inputs}
    read = [name for _, phase in staged.phases(stage, kind) for name in phase.fixed if kinds[name] == "prologue"]
    return tuple(dict.fromkeys(read))


def reads_prologue(staged: Staged, stages: Sequence[int]) -> bool:
    """Whether a function of one of the stages reads a prologue value."""
    return any(stage_prologue(staged, stage, kind) for stage in stages for kind in staged.kinds(stage))


def _head(
    staged: Staged,
    name: str,
    edges: Sequence[Edge],
    more: Sequence[str],
    prologue: Sequence[str],
    writer: _Writer,
    degree: int,
) -> list[str]:
    formals = ["world", "batch", "k", *more, *(f"from_{edge.source}" for edge in edges), *prologue]
    lines = ["", "", *call(f"def {name}", formals, ":"), "    b, B = batch.sizes[k], batch.size"]
    writer.env.update({value: value for value in prologue})
    writer.names.update(prologue)
    for edge in edges:
        variables = [writer.fresh(_variable(staged, value.name)) for value in edge.values]
        writer.env.update(zip((value.name for value in edge.values), variables, strict=True))
        lines += [f"    # {name}: {_placed(staged, v, degree)}" for name, v in zip(variables, edge.values, strict=True)]
        lines.append(f"    {tuple_of(variables)} = from_{edge.source}")
    return lines


def _placed(staged: Staged, value: Value, degree: int) -> str:
    """The shape of a value that crosses devices, and its placement on the axes on which there are several ranks."""
    placed = f", {staged.sharded.between[value.name]} on {staged.sharded.axis}" if degree > 1 else ""
    here = staged.segmented.here
    if here is not None:
        placed += "".join(f", {how} on {axis}" for axis, how in here.placement(value.name))
    return describe(value).partition(": ")[2] + placed


def _variable(staged: Staged, name: str) -> str:
    """A name for a value between segments: the maker's for activations, ``d_`` and the receiver's for gradients."""
    if name in {value.name for value in staged.segmented.made}:
        return name
    for segment in staged.segmented.segments:
        if name in segment.outputs:
            return _numbered(segment.name, segment.outputs.index(name), len(segment.outputs))
    for segment in reversed(staged.segmented.segments):
        if name in segment.backward_inputs:
            return f"d_{segment.name}"
    return name


def _numbered(name: str, position: int, count: int) -> str:
    return name if count == 1 else f"{name}_{position}"


def _inputs(staged: Staged, uses: Sequence[Use], writer: _Writer) -> list[str]:
    lines = []
    taken = {name for use in uses for name in use.takes}
    for item in staged.segmented.captured.of_kind("input"):
        if item.value.name in taken:
            writer.env[item.value.name] = writer.fresh(item.value.name)
            lines.append(f'    {writer.env[item.value.name]} = batch.input("{item.target}", k)')
    return lines


def _use(item: Layout, kind: Kind, names: Mapping[object, str], moved: Lines, taken: str, kept: str) -> Use:
    """A segment's call in a stage's function, which takes what was kept from the list `taken`, and keeps in `kept`."""
    segment, phase = item.segment, item.phases[kind]
    # What the forward saved is taken from its end; what one backward stashes, another takes in the same order.
    source = (f"*{taken}.pop({'0' * (taken == 'stash')})",) * bool(taken)
    after = [f'world.update_buffer("{target}", updated[{i}])' for i, target in enumerate(phase.updates)]
    after += [f"{kept}.append(kept)"] * (phase.keeps is not None)
    return Use(
        name=f"{names[item.variant]}_{SUFFIX[kind]}",
        takes=phase.takes,
        arguments=(*source, *_fixed(phase.fixed, item), *moved.parameters),
        gives=phase.gives,
        variables=tuple(_result(segment, kind, i, len(phase.gives)) for i in range(len(phase.gives))),
        extra=(*("updated",) * bool(phase.updates), *("kept",) * (phase.keeps is not None), *moved.gradients),
        before=moved.before,
        after=(*after, *moved.after),
        behind=moved.behind,
        place=_place(segment.name),
        first=("world", "b", "B") if communicates(phase.function.nodes) else ("b", "B"),
    )


def _result(segment: Segment, kind: Kind, position: int, count: int) -> str:
    """A name for a value that a segment's function returns."""
    if kind is Kind.F:
        return _numbered(segment.name, position, count)
    if kind in (Kind.S, Kind.T):  # what is told has a name: head.sum@pp1
        names = segment.outputs if kind is Kind.S else segment.backward_outputs
        return names[position].partition("@")[0]
    return f"d_{segment.name}_{position}" if position else f"d_{segment.name}"


def _fixed(names: Sequence[str], item: Layout) -> Iterator[str]:
    """Buffers come from the world, draws from the batch; prologue values are variables of the stage function."""
    sources = {name: f'world.buffer("{target}")' for name, target in item.buffers}
    sources |= {name: f'batch.random("{target}", k)' for name, target in item.draws}
    for name in names:
        yield sources.get(name, name)


def _place(name: str) -> int:
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else 0


def _write(uses: Sequence[Use], writer: _Writer) -> None:
    for run in _runs(uses):
        writer.lines += [f"    {line}" for line in run[0].before]
        behind = run[-1].behind
        # The last of equal calls may differ in what it gathers next: then the loop is one round shorter.
        for looped in (run, run[:-1]):
            later = writer.needed | {name for use in uses[uses.index(run[0]) + len(looped) :] for name in use.takes}
            if len(looped) > 1 and _write_loop(looped, later, writer):
                run = run[len(looped) :]
                break
        for use in run:
            _write_call(use, writer)
        writer.lines += [f"    {line}" for line in behind]


def _runs(uses: Sequence[Use]) -> Iterator[list[Use]]:
    """Calls of one function in a row, with no line between them that several calls have in common."""
    run: list[Use] = []
    for use in uses:
        if run and (_alike(use) != _alike(run[-1]) or use.before or run[-1].behind):
            yield run
            run = []
        run.append(use)
    if run:
        yield run


def _alike(use: Use) -> tuple[str, int, int]:
    return use.name, len(use.takes), len(use.after)


def _write_call(use: Use, writer: _Writer) -> None:
    variables = [writer.fresh(name) for name in use.variables]
    args = [*use.first, *(writer.env[name] for name in use.takes), *use.arguments]
    writer.lines += ["    " + line for line in _call(use, variables, args)]
    writer.lines += [f"    {line}" for line in use.after]
    writer.env.update(zip(use.gives, variables, strict=True))


def _call(use: Use, variables: Sequence[str], args: Sequence[str]) -> list[str]:
    results = ", ".join([*variables, *use.extra])
    return call(f"{results} = {use.name}" if results else use.name, args, "")


def _write_loop(run: Sequence[Use], later: frozenset[str], writer: _Writer) -> bool:
    """Write a run of uses of one function as a loop; False, with nothing written, if they do not follow a pattern.

    A value that each round takes from the one before is a variable carried by the loop; one that differs from round
    to round in a number is computed from the loop variable; results that are needed after the loop are collected in a
    list.
    """
    places = [use.place for use in run]
    step = places[1] - places[0]
    if abs(step) != 1 or any(b - a != step for a, b in pairwise(places)):
        places = list(range(len(run)))
        step = 1
    carried = [_carried(run, position) for position in range(len(run[0].takes))]
    ready = [c is not None or all(use.takes[p] in writer.env for use in run) for p, c in enumerate(carried)]
    columns = [template(column, places) for column in zip(*(use.arguments for use in run), strict=True)]
    afters = [template(column, places) for column in zip(*(use.after for use in run), strict=True)]
    if not all(ready) or None in columns or None in afters:
        return False
    variables = [writer.fresh(re.sub(r"[._]?\d+$", "", name) or name) for name in run[0].variables]
    args, before = [], []
    for position, source in enumerate(carried):
        if source is not None:
            first = writer.env[run[0].takes[position]]
            before += [f"    {variables[source]} = {first}"] if first != variables[source] else []
            args.append(variables[source])
            continue
        texts = [writer.env[use.takes[position]] for use in run]
        args.append(template(texts, places) or _listed(texts, places, before, writer))
    keep = [p for p in range(len(variables)) if any(use.gives[p] in later for use in run[:-1])]
    lists = {p: writer.fresh(f"all_{variables[p]}") for p in keep}
    before += [f"    {name} = []" for name in lists.values()]
    low, high = min(places), max(places) + 1
    span = f"range({low}, {high})" if low else f"range({high})"
    writer.lines += [*before, f"    for i in {span if step > 0 else f'reversed({span})'}:"]
    arguments = [*run[0].first, *args, *(str(column) for column in columns)]
    writer.lines += ["        " + line for line in _call(run[0], variables, arguments)]
    writer.lines += [f"        {line}" for line in afters]
    writer.lines += [f"        {lists[p]}.append({variables[p]})" for p in keep]
    for number, use in enumerate(run):
        for p, name in enumerate(use.gives):
            writer.env[name] = f"{lists[p]}[{number}]" if p in lists else variables[p]
    return True


def _carried(run: Sequence[Use], position: int) -> int | None:
    """The result of the previous round that every round takes at `position`, None if it does not."""
    before, after = run[0].gives, run[1].takes[position]
    source = before.index(after) if after in before else None
    if source is None:
        return None
    chained = all(use.takes[position] == last.gives[source] for last, use in pairwise(run))
    return source if chained else None


def _listed(texts: Sequence[str], places: Sequence[int], before: list[str], writer: _Writer) -> str:
    """An argument without a pattern: a tuple made before the loop, indexed by the loop variable."""
    name = writer.fresh("each")
    ordered = texts if places[0] <= places[-1] else list(reversed(texts))
    before += ["    " + line for line in call(f"{name} = ", ordered, "")]
    low = min(places)
    return f"{name}[i - {low}]" if low else f"{name}[i]"
