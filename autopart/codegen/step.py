"""The text of ``step(world, batch)``: the schedule of one rank, rolled where it repeats, with its communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopart.codegen.functions import call
from autopart.codegen.roll import Loop, periodic, template
from autopart.codegen.stages import stage_outputs, stage_prologue
from autopart.ir.action import Action, Kind
from autopart.ir.graph import Output, Size, Value
from autopart.ir.staged import Staged
from autopart.ir.state import Unit


def step(staged: Staged, stages: Sequence[int], row: Sequence[Action], degree: int, *, local: bool) -> list[str]:
    """The step of a rank that holds `stages` and performs `row` (compute, SEND and RECV); `degree` is that of dp.

    With `local`, each data rank is given its own samples, so what they add up to is summed over dp.
    """
    units = [unit for unit in staged.state.units if set(unit.stages) & set(stages)]
    lines = ["", "", "def step(world, batch):", f'    """{_phases(row)}"""']
    lines += _prologue(staged, stages, local and degree > 1)
    stale = [f'world.regather("{unit.name}", axis="dp")' for unit in units if unit.updated_in_parts(degree)]
    if stale:
        lines.append("    # Parameters that the last optimizer step updated in parts are made whole again.")
        lines += _rolled(stale)
    lines += [f"    {name} = world.store()" for name in _stores(staged, stages)]
    lines += [f"    {out.name} = {{}}" for out in _outputs(staged) if _maker(staged, out) in stages]
    lines += _schedule(staged, row)
    here = {unit.name for unit in units}
    reductions = _reductions([unit for unit in staged.trained() if unit.name in here], degree)
    if reductions:
        lines += ["    # Gradients are reduced to what their consumer needs.", *reductions]
    return [*lines, *_results(staged, stages)]


def edges(staged: Staged, stages: Sequence[int]) -> list[str]:
    """A function an edge that ends at one of the stages: what it carries, given the microbatch's size."""
    lines: list[str] = []
    for edge in staged.edges:
        if edge.target in stages and edge.source not in stages:
            lines += ["", "", f"def edge_{edge.source}_{edge.target}(b):"]
            lines += [f'    """What stage {edge.source} hands to stage {edge.target} for a microbatch of b samples."""']
            lines += [
                "    " + line
                for line in call("return ", [f"({_spec(v)})" for v in edge.values] + [""] * (len(edge.values) == 1), "")
            ]
    return [line.replace(", )", ",)") for line in lines]


def _spec(value: Value) -> str:
    dims = [size.text("b") if isinstance(size, Size) else str(size) for size in value.shape]
    return f"({', '.join(dims)}{',' if len(dims) == 1 else ''}), {value.dtype}"


def _prologue(staged: Staged, stages: Sequence[int], local: bool) -> list[str]:
    wanted = {name for s in stages for back in (False, True) for name in stage_prologue(staged, s, backward=back)}
    if not wanted:
        return []
    names = [item.target for item in staged.segmented.captured.of_kind("prologue")]
    args = ["batch.samples", "batch.size"] if local else ["batch.size"]
    for item in prologue_inputs(staged):
        args.append(f'batch.whole("{item[1]}")' if item[0] == "input" else f'world.buffer("{item[1]}")')
    lines = call(f"{', '.join(names)} = prologue", args, "")
    if local:
        lines.append("# Each data rank has counted its own samples.")
        lines += [f'{name} = world.summed({name}, axis="dp")' for name in names]
    return ["    " + line for line in lines]


def prologue_inputs(staged: Staged) -> tuple[tuple[str, str, str], ...]:
    """(kind, target, name) of what the prologue reads."""
    captured = staged.segmented.captured
    read = {name for node in captured.prologue for name in node.refs()}
    return tuple(
        (item.kind, item.target, item.value.name)
        for item in captured.of_kind("input", "buffer", "constant")
        if item.value.name in read
    )


def _edge(source: int, target: int) -> str:
    return f"{'acts' if source < target else 'grads'}_{source}_{target}"


def _stores(staged: Staged, stages: Sequence[int]) -> list[str]:
    touched = [e for e in staged.edges if e.source in stages or e.target in stages]
    saved = [f"saved_{s}" for s in stages if saves(staged, s)]
    return [*saved, *(_edge(e.source, e.target) for e in touched)]


def saves(staged: Staged, stage: int) -> bool:
    """Whether a stage keeps anything for a backward."""
    return any(staged.segmented.bodies[s.body].backward is not None for s in staged.stages[stage])


def _schedule(staged: Staged, row: Sequence[Action]) -> list[str]:
    def shifted(action: Action, rounds: int) -> Action:
        return replace(action, microbatch=action.microbatch + rounds)

    lines: list[str] = []
    for item in periodic(row, shifted):
        if isinstance(item, Loop):
            low = min(action.microbatch for action in item.items)
            span = f"range({low}, {low + item.count})" if low else f"range({item.count})"
            lines.append(f"    for k in {span}:")
            for action in item.items:
                offset = action.microbatch - low
                lines += _action(staged, action, f"k + {offset}" if offset else "k", "        ")
        else:
            lines += _action(staged, item, str(item.microbatch), "    ")
    return lines


def _action(staged: Staged, action: Action, k: str, indent: str) -> list[str]:
    stage, peer = action.stage, action.peer
    match action.kind:
        case Kind.SEND:
            line = f"world.send({_edge(stage, peer)}.pop({k}), stage={stage}, to={peer}, microbatch={k})"
            return [indent + line]
        case Kind.RECV:
            like, edge = f"edge_{peer}_{stage}(batch.sizes[{k}])", _edge(peer, stage)
            return [f"{indent}{edge}[{k}] = world.recv({like}, stage={stage}, source={peer}, microbatch={k})"]
        case Kind.F | Kind.B:
            body = _forward(staged, stage, k) if action.kind is Kind.F else _backward(staged, stage, k)
            head = f'{indent}with world.action("{action.kind}", stage={stage}, microbatch={k}):'
            return [head, *(f"{indent}    {line}" for line in body)]
        case _:
            raise AssertionError(f"no text for {action}")


def _forward(staged: Staged, stage: int, k: str) -> list[str]:
    results = [f"{_edge(stage, e.target)}[{k}]" for e in staged.out_of(stage, forward=True)]
    results += [f"{name}[{k}]" for name in stage_outputs(staged, stage)]
    results += [f"saved_{stage}[{k}]"] if saves(staged, stage) else []
    args = ["world", "batch", k, *(f"{_edge(e.source, stage)}.pop({k})" for e in staged.into(stage, forward=True))]
    args += stage_prologue(staged, stage, backward=False)
    return call(f"{', '.join(results)} = stage{stage}_forward", args, "")


def _backward(staged: Staged, stage: int, k: str) -> list[str]:
    if not saves(staged, stage):
        return ["pass  # nothing here is trained"]
    results = [f"{_edge(stage, e.target)}[{k}]" for e in staged.out_of(stage, forward=False)]
    args = ["world", "batch", k, f"saved_{stage}.pop({k})"]
    args += [f"{_edge(e.source, stage)}.pop({k})" for e in staged.into(stage, forward=False)]
    args += stage_prologue(staged, stage, backward=True)
    return call((f"{', '.join(results)} = " if results else "") + f"stage{stage}_backward", args, "")


def _reductions(units: Iterable[Unit], degree: int) -> list[str]:
    over_dp, over_pp = [], []
    for unit in units:
        if unit.updated_in_parts(degree) and not unit.reduced_at_once(degree):
            over_dp.append(f'world.reduce_scatter("{unit.name}", axis="dp")')
        elif degree > 1 and not unit.reduced_at_once(degree):
            over_dp.append(f'world.all_reduce("{unit.name}", axis="dp")')
        if len(unit.stages) > 1:
            over_pp.append(f'world.all_reduce("{unit.name}", axis="pp", stages={unit.stages})')
    return [*_rolled(over_dp), *_rolled(over_pp)]


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
            result += ["    " + line for line in rolled.split("\n")]
        else:
            end = position + 1
            result.append("    " + lines[position])
        position = end
    return result


def _span(lines: Sequence[str]) -> str | None:
    """The loop over the last number in the lines, which must go up by one from line to line."""
    import re

    places = [int(numbers[-1]) if (numbers := re.findall(r"\d+", line)) else -1 for line in lines]
    if places != list(range(places[0], places[0] + len(lines))) or places[0] < 0:
        return None
    text = template(lines, places)
    if text is None:
        return None
    return f"for i in range({places[0]}, {places[-1] + 1}):\n    {text}"


def _outputs(staged: Staged) -> list[Output]:
    unique = {out.name: out for out in staged.segmented.captured.outputs if out.kind in ("loss", "output")}
    return list(unique.values())


def _maker(staged: Staged, out: Output) -> int:
    return next(s for s in range(len(staged.stages)) if out.name in stage_outputs(staged, s))


def _results(staged: Staged, stages: Sequence[int]) -> list[str]:
    """The lines that make the step's outputs whole: a sum over everything, or the microbatches joined."""
    captured = staged.segmented.captured
    values = {value.name: value for value in captured.values()}
    lines, entries = [], []
    for out in _outputs(staged):
        home, value = _maker(staged, out), values[out.name]
        here = home in stages
        if out.partial:
            parts = f"list({out.name}.values())" if here else "[]"
            lines.append(f"    {out.name} = world.total({parts}, shape={value.at(1)}, dtype={value.dtype})")
        elif captured.training:
            lines += [f"    {out.name} = world.joined({out.name}, dim={out.dim})"] if here else []
        else:
            made = out.name if here else "None"
            like = f"lambda b: ({_spec(value)})"
            lines.append(f"    {out.name} = world.everywhere({made}, stage={home}, dim={out.dim}, like={like})")
        if here or out.partial or not captured.training:
            entries.append(f'"{out.name}": {out.name}')
    return [*lines, f"    return {{{', '.join(entries)}}}"]


def _phases(row: Sequence[Action]) -> str:
    """The row in a line: runs of equal action kinds with their counts."""
    compute = [action for action in row if action.kind in (Kind.F, Kind.B)]
    first = next((i for i, action in enumerate(compute) if action.kind is Kind.B), len(compute))
    last = next((i for i, a in enumerate(reversed(compute)) if a.kind is Kind.F), 0)
    if first == len(compute):
        return f"{first} forwards."
    steady = (len(compute) - (first - 1) - (last - 1)) // 2
    if steady <= 1:
        return f"{first} forward{'s' * (first > 1)}, then {last} backward{'s' * (last > 1)}."
    parts = [f"{first - 1} forward{'s' * (first > 2)} to warm up" if first > 1 else ""]
    parts.append(f"{steady} times one forward and one backward")
    parts.append(f"{last - 1} backward{'s' * (last > 2)} to drain" if last > 1 else "")
    text = ", ".join(part for part in parts if part)
    return text[0].upper() + text[1:] + "."
