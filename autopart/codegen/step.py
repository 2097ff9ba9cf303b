"""The text of ``step(world, batch)``: the schedule of one rank, rolled where it repeats, with its communication."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopart.codegen.bodies import SUFFIX
from autopart.codegen.functions import call, indented, tuple_of
from autopart.codegen.parsed import PROLOGUE
from autopart.codegen.roll import Loop, periodic, template
from autopart.codegen.stages import (
    reads_prologue,
    stage_edges,
    stage_input_gradients,
    stage_outputs,
    stage_prologue,
    stage_results,
    stores_of,
    takes_tangents,
)
from autopart.ir.action import Action, Kind, Scheduled, stages_of
from autopart.ir.dealing import How
from autopart.ir.graph import Output, Size, Value
from autopart.ir.staged import Staged, averaged


def step(staged: Staged, scheduled: Scheduled, column: int, degree: int, *, local: bool, parts: int) -> list[str]:
    """The step of pp rank `column`, which performs its row of `scheduled`; `degree` is that of dp.

    Over dp the batch is in so many `parts`.

    What passes between two stages of the rank stays in the store that the first puts it in. With `local`, each data
    rank is given its own samples, so what they add up to is summed over dp. A step without a loss is a generator: it
    yields its outputs, is sent their gradients, and goes on.
    """
    place, row = scheduled.schedule.place, scheduled.table[column]
    stages = stages_of(place, column)
    units = staged.state.on(column)
    lines = ["", "", "def step(world, batch):", f'    """{_phases(staged, row)}"""']
    lines += _prologue(staged, stages, local and parts > 1)
    stale = [f'world.regather("{unit.name}", axis="dp")' for unit in units if unit.updated_in_parts(degree)]
    if stale:
        lines.append("    # Parameters that the last optimizer step updated in parts are made whole again.")
        lines += _rolled(stale)
    lines += stores(staged, stages)
    lines += [f"    {out.name} = {{}}" for out in outputs(staged) if {*makers(staged, out)} & {*stages}]
    results = [out for out in outputs(staged) if out.kind != "input_grad"]
    if staged.segmented.captured.deferred:
        first = begin_of_backward(row)
        lines += indented(scheduled_lines(staged, row[:first]))
        lines += _buffers(staged, place, column, parts)
        made, entries = _results(staged, stages, results)
        lines += [*made, "    # The caller computes a loss of these; its backward() sends their gradients."]
        lines += _dict("tangents = yield ", entries)
        row, results = row[first:], []
    lines += indented(scheduled_lines(staged, row))
    lines += _reductions(staged, scheduled, column, stages, degree)
    lines += _buffers(staged, place, column, parts) if not staged.segmented.captured.deferred else []
    results += [out for out in outputs(staged) if out.kind == "input_grad"]
    made, entries = _results(staged, stages, results)
    return [*lines, *made, *_dict("return ", entries)]


def _dict(head: str, entries: Sequence[str]) -> list[str]:
    return indented(call(head, [f'"{name}": {name}' for name in entries], "", "{}"))


def begin_of_backward(row: Sequence[Action]) -> int:
    """The place in a row of the first action of a backward, before which all forwards and their transfers must be."""

    def backward(action: Action) -> bool:
        match action.kind:
            case Kind.SEND:
                return action.peer < action.stage
            case Kind.RECV:
                return action.peer > action.stage
            case _:
                return action.kind is not Kind.F

    first = next((i for i, action in enumerate(row) if backward(action)), len(row))
    assert all(map(backward, row[first:])), "a schedule of all forwards, then all backwards"
    return first


def edges(staged: Staged, stages: Sequence[int]) -> list[str]:
    """A function an edge that ends at one of the stages: what it carries, given the microbatch's size."""
    lines: list[str] = []
    crossing = [e for e in staged.edges if e.target in stages and e.source not in stages]
    for (source, target), edge in {(staged.home(e.source), e.target): e for e in crossing}.items():
        lines += ["", "", f"def edge_{source}_{target}(b):"]
        lines += [f'    """What stage {source} hands to stage {target} for a microbatch of b samples."""']
        specs = [f"({_spec(value)})" for value in edge.values] + [""] * (len(edge.values) == 1)
        lines += indented(call("return ", specs, ""))
    return [line.replace(", )", ",)") for line in lines]


def _spec(value: Value) -> str:
    dims = [size.text("b") if isinstance(size, Size) else str(size) for size in value.shape]
    return f"({', '.join(dims)}{',' if len(dims) == 1 else ''}), {value.dtype}"


def _prologue(staged: Staged, stages: Sequence[int], local: bool) -> list[str]:
    if not reads_prologue(staged, stages):
        return []
    names = [item.target for item in staged.segmented.captured.of_kind("prologue")]
    args = [*(["batch.samples"] if local else []), *prologue_arguments(staged)]
    lines = call(f"{', '.join(names)} = {PROLOGUE}", args, "")
    if local:
        lines.append("# Each data rank has counted its own samples.")
        lines += [f'{name} = world.summed({name}, axis="dp")' for name in names]
    return indented(lines)


def prologue_arguments(staged: Staged) -> list[str]:
    """Source for what the prologue is given: the samples of the whole batch, and what it reads."""
    read = [
        f'batch.whole("{target}")' if kind == "input" else f'world.buffer("{target}")'
        for kind, target, _ in prologue_inputs(staged)
    ]
    return ["batch.size", *read]


def prologue_inputs(staged: Staged) -> tuple[tuple[str, str, str], ...]:
    """(kind, target, name) of what the prologue reads."""
    captured = staged.segmented.captured
    read = {name for node in captured.prologue for name in node.refs()}
    return tuple(
        (item.kind, item.target, item.value.name)
        for item in captured.of_kind("input", "buffer", "constant")
        if item.value.name in read
    )


def edge_name(staged: Staged, source: int, target: int) -> str:
    """The store of what a stage hands to another."""
    if staged.is_part(source) and staged.is_part(target):
        return f"sums_{source}_{target}"
    kind = "acts" if staged.onward(source, target) else "grads"
    return f"{kind}_{staged.home(source)}_{staged.home(target)}"


def stores(staged: Staged, stages: Sequence[int]) -> list[str]:
    kept = [f"{name}_{s}" for s in stages for kind in staged.kinds(s) if (name := stores_of(staged, s, kind)[1])]
    lines = [f"    {name} = world.store()" for name in kept]
    for edge in (e for e in staged.edges if e.source in stages or e.target in stages):
        local = "  # from stage to stage on this rank" if edge.source in stages and edge.target in stages else ""
        lines.append(f"    {edge_name(staged, edge.source, edge.target)} = world.store(){local}")
    return [*dict.fromkeys(lines)]


def scheduled_lines(staged: Staged, row: Sequence[Action], first: str = "") -> list[str]:
    """The lines of a row, rolled where it repeats; its microbatches are counted from the variable `first`, if any."""
    lines: list[str] = []
    for item in periodic(row, _shift):
        if isinstance(item, Loop):
            low, stride = min(action.microbatch for action in item.items), item.stride
            span = [_plus(first, low), _plus(first, low + stride * item.count), str(stride)]
            lines.append(f"for k in range({', '.join(span if stride > 1 else span[span[0] == '0' : 2])}):")
            for action in item.items:
                lines += indented(action_lines(staged, action, _plus("k", action.microbatch - low)))
        else:
            lines += action_lines(staged, item, _plus(first, item.microbatch))
    return lines


def _plus(variable: str, number: int) -> str:
    """Source for their sum; the number alone where there is no variable."""
    if not variable:
        return str(number)
    return f"{variable} + {number}" if number else variable


def _shift(action: Action, later: Action) -> int | None:
    """By how many microbatches the second action comes later than the first; None if it is another one."""
    by = later.microbatch - action.microbatch
    return by if replace(action, microbatch=later.microbatch) == later else None


def action_lines(staged: Staged, action: Action, k: str) -> list[str]:
    stage, peer = action.stage, action.peer
    match action.kind:
        case Kind.SEND:
            return [send(staged, stage, peer, k)]
        case Kind.RECV:
            return [receive(staged, peer, stage, k)]
        case Kind.F | Kind.B | Kind.I | Kind.W | Kind.S | Kind.T:
            head = f'with world.action("{action.kind}", stage={stage}, microbatch={k}):'
            return [head, *indented(computed(staged, stage, action.kind, k))]
        case _:
            raise AssertionError(f"no text for {action}")


def send(staged: Staged, stage: int, to: int, k: str) -> str:
    """The line by which a stage sends what it has for another one in microbatch `k`."""
    dealt = _dealt(staged, stage, to)
    return f"world.send({edge_name(staged, stage, to)}.pop({k}), stage={stage}, to={to}, microbatch={k}{dealt})"


def receive(staged: Staged, source: int, stage: int, k: str, batch: str = "batch") -> str:
    """The line by which a stage receives what another one has for it in microbatch `k`, of `batch`."""
    like = f"edge_{staged.home(source)}_{stage}({batch}.sizes[{k}])"
    edge = edge_name(staged, source, stage)
    dealt = _dealt(staged, source, stage)
    return f"{edge}[{k}] = world.recv({like}, stage={stage}, source={source}, microbatch={k}{dealt})"


def _dealt(staged: Staged, source: int, target: int) -> str:
    """How the values of an edge are dealt, where the stages differ in width: a dim of samples each, or what else."""
    deal = staged.deal(source, target)
    return f", deal={tuple_of(map(_quoted, deal))}" if deal else ""


def _quoted(how: How) -> str:
    return f'"{how}"' if isinstance(how, str) else str(how)


def computed(staged: Staged, stage: int, kind: Kind, k: str) -> list[str]:
    """The call of a stage's function: from its stores, to its stores."""
    if kind not in (Kind.F, Kind.S) and not staged.phases(stage, kind):
        later = kind is Kind.I and staged.phases(stage, Kind.W)
        return [
            f"pass  # {'no gradient leaves this stage: its backward is all W' if later else 'nothing here is trained'}"
        ]
    taken, kept = stores_of(staged, stage, kind)
    edges_in, edges_out = stage_edges(staged, stage, kind)
    results = [f"{edge_name(staged, stage, edge.target)}[{k}]" for edge in edges_out]
    results += [f"{name}[{k}]" for name in stage_results(staged, stage, kind)]
    results += [f"{kept}_{stage}[{k}]"] * bool(kept)
    args = ["world", "batch", k, *([f"{taken}_{stage}.pop({k})"] if taken else [])]
    args += ["tangents"] * takes_tangents(staged, stage, kind)
    args += [f"{edge_name(staged, edge.source, stage)}.pop({k})" for edge in edges_in]
    args += stage_prologue(staged, stage, kind)
    return call((f"{', '.join(results)} = " if results else "") + f"stage{stage}_{SUFFIX[kind]}", args, "")


def _reductions(staged: Staged, scheduled: Scheduled, column: int, stages: Sequence[int], degree: int) -> list[str]:
    """Wait for the reductions that the backwards began; then gradients of shared parameters meet."""
    shared = staged.shared(column)
    begun = any(unit.reduced_at_once(degree) for unit in staged.state.on(column))
    begun |= any(staged.completed(stage, degree, scheduled.unfinished(stage)) for stage in stages)
    lines = ["    world.wait()  # until the gradients that are being reduced are there"] if begun else []
    if shared:
        who = "several stages" if staged.copies == 1 else "several stages, or copies of the model,"
        lines.append(f"    # Parameters that {who} use have one gradient, the sum of theirs.")
        lines += _rolled([f'world.all_reduce("{unit.name}", axis="pp", stages={unit.stages})' for unit in shared])
        lines.append("    world.wait()")
    return lines


def _buffers(staged: Staged, place: Sequence[int], column: int, parts: int) -> list[str]:
    """The lines that make updated buffers one over dp, and known to every stage."""
    over_dp: list[str] = []
    over_pp: list[str] = []
    for stage in range(len(staged.stages)):
        updated = staged.updated(stage)
        for name, kind in (("average", True), ("maximum", False)):
            names = [f'"{target}"' for target, value in updated if averaged(value) == kind]
            if names and place[stage] == column and parts > 1:
                over_dp += call(f"world.{name}_buffers", [*names, 'axis="dp"'], "")
        if updated and len(set(place)) > 1:
            names = [f'"{target}"' for target, _ in updated]
            over_pp += call("world.broadcast_buffers", [*names, f"stage={stage}"], "")
    lines = ["# Updated buffers are made one over the data ranks.", *over_dp] if over_dp else []
    lines += ["# Every stage learns the buffers that another one updated.", *over_pp] if over_pp else []
    return indented(lines)


def _rolled(lines: Sequence[str]) -> list[str]:
    """Lines that differ in consecutive numbers, as loops."""
    result: list[str] = []
    position = 0
    while position < len(lines):
        end, rolled = position + 1, ""
        while end < len(lines):
            longer = _span(lines[position : end + 1])
            if longer is None:
                break
            end, rolled = end + 1, longer
        if end - position > 2:
            result += indented(rolled.split("\n"))
        else:
            end = position + 1
            result.append("    " + lines[position])
        position = end
    return result


def _span(lines: Sequence[str]) -> str | None:
    """The loop over the last number in the lines, which must go up by one from line to line."""
    places = [int(numbers[-1]) if (numbers := re.findall(r"\d+", line)) else -1 for line in lines]
    if places != list(range(places[0], places[0] + len(lines))) or places[0] < 0:
        return None
    text = template(lines, places)
    if text is None:
        return None
    return f"for i in range({places[0]}, {places[-1] + 1}):\n    {text}"


def outputs(staged: Staged) -> list[Output]:
    """What the step returns, each value once: the loss and outputs that some stage makes, gradients of inputs."""
    made = {name for row in staged.stages for item in row for name in (*item.outputs, *item.backward_outputs)}
    kinds = ("loss", "output", "input_grad")
    found = {o.name: o for o in staged.segmented.captured.outputs if o.kind in kinds and o.name in made}
    return list(found.values())


def makers(staged: Staged, out: Output) -> tuple[int, ...]:
    """The stages that make an output: one in each copy of the model."""
    made = stage_input_gradients if out.kind == "input_grad" else stage_outputs
    return tuple(s for s in range(len(staged.stages)) if out.name in made(staged, s))


def _results(staged: Staged, stages: Sequence[int], wanted: Iterable[Output]) -> tuple[list[str], list[str]]:
    """The lines that make outputs whole (a sum over everything, or the microbatches joined), and the names of those."""
    values, inside = staged.segmented.values(), staged.segmented.here
    lines, entries = [], []
    for out in wanted:
        homes, value = makers(staged, out), values[out.name]
        here = not {*homes}.isdisjoint(stages)
        if out.partial:
            aside = inside.aside if here and inside is not None else ()
            parts = f"list({out.name}.values())" if here and not aside else "[]"
            call = f"world.total({parts}, shape={value.at(1)}, dtype={value.dtype})"
            adds = (
                f"  # place 0 of {' and '.join(axis for axis, _ in inside.places)} adds it" if inside and aside else ""
            )
            lines.append(f"    {out.name} = {call}{adds}")
        elif not out.everywhere:
            lines += [f"    {out.name} = world.joined({out.name}, dim={out.dim})"] if here else []
        else:
            made = out.name if here else "None"
            like = f"lambda b: ({_spec(value)})"
            lines.append(f"    {out.name} = world.everywhere({made}, stage={homes[0]}, dim={out.dim}, like={like})")
        if here or out.partial or out.everywhere:
            entries.append(out.name)
    return lines, entries


def _phases(staged: Staged, row: Sequence[Action]) -> str:
    """The row in a line: how many forwards and backwards come before, during and after their taking turns."""
    own = (a.kind for a in row if not staged.is_lookup(a.stage))
    kinds = "".join(kind for kind in own if kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    if "W" in kinds:
        told = {"F": "forward", "B": "whole backward", "I": "backward for inputs", "W": "backward for weights"}
        parts = [_counted(kinds.count(kind), name) for kind, name in told.items() if kind in kinds]
        return f"{', '.join(parts[:-1])} and {parts[-1]}."
    if "B" not in kinds:
        return f"{_counted(len(kinds), 'forward')}."
    first, last = kinds.index("B"), len(kinds) - 1 - kinds.rindex("F")
    if first + last == len(kinds):
        return f"{_counted(first, 'forward')}, then {_counted(last, 'backward')}."
    forwards, backwards = (kinds[first - 1 : len(kinds) - last + 1].count(kind) for kind in "FB")
    turns = f"{forwards} times one forward and one backward"
    if kinds[first - 1 : first - 1 + 2 * forwards] != "FB" * forwards:
        turns = f"{_counted(forwards, 'forward')} and {_counted(backwards, 'backward')} by turns"
    parts = [f"{_counted(first - 1, 'forward')} to warm up" if first > 1 else "", turns]
    parts.append(f"{_counted(last - 1, 'backward')} to drain" if last > 1 else "")
    text = ", ".join(part for part in parts if part)
    return text[0].upper() + text[1:] + "."


def _counted(count: int, what: str) -> str:
    """``2 backwards for inputs``."""
    return f"{count} {what.replace('ward', 'wards', 1) if count != 1 else what}"
