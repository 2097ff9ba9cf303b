"""A plan as text for people: summary and difference."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopart.ir.placement import Placement
    from autopart.ir.plan import Plan
    from autopart.ir.tensor_plan import TensorPlan

STATES = ("parameters", "optimizer", "gradients", "activations", "transient")


def format_bytes(count: int | float) -> str:
    """Bytes in binary units, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds with a readable unit, such as ``1.50 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.2f} ns"


def span(names: tuple[str, ...]) -> str:
    """A run of segments by its ends: ``h.0 .. h.3``."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def spans(names: Sequence[str], every: Sequence[str]) -> str:
    """Some of the segments in `every`, neighbours as a run: ``wte, h.0 .. h.3``."""
    place = {name: i for i, name in enumerate(every)}
    runs: list[list[str]] = []
    for name in names:
        if runs and place.get(name, -1) == place.get(runs[-1][-1], -3) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(span(tuple(run)) for run in runs)


def schedule(text: str) -> str:
    """A plan's schedule in a line: its name, or the size of its table."""
    rows = [line for line in text.split("\n") if ": " not in line]  # the others are settings
    return f"by a table of {len(rows)} row{'s' * (len(rows) > 1)}" if re.match(r"\(*\d+[A-Z]", rows[0]) else text


def rules(placements: Sequence[tuple[str, Placement]]) -> str:
    """Placements by pattern, in a line; patterns in a row that have the same, together."""
    told = []
    for placement, run in groupby(placements, key=lambda pair: pair[1]):
        patterns = tuple(pattern for pattern, _ in run)
        last = patterns[-1:] if patterns[-1] == "*" else ()
        first = patterns[: len(patterns) - len(last)]
        told += [f"{name}: {placement}" for name in (*((span(first),) if len(first) > 2 else first), *last)]
    return "; ".join(told)


def in_chunks(chunks: Sequence[tuple[str, int]]) -> str:
    """What is computed in chunks, in a line."""
    return ", ".join(f"{pattern}: {count}" for pattern, count in chunks)


def summary(plan: Plan) -> str:
    """Choices, a table with a row a stage, and predictions."""
    predicted = plan.prediction
    rows = [["stage", "segments", "ranks", "time", *STATES, "peak"]]
    for number, stage in enumerate(plan.stages):
        memory, first = predicted.memory[number], plan.place.index(plan.place[number])
        held = [format_bytes(size) for size in (*(getattr(memory, state) for state in STATES), memory.total)]
        at, size = _where(plan, stage.ranks), len(stage.segments)
        rows.append(
            [str(number), f"{size}: {span(stage.segments)}", at, format_seconds(predicted.stage_seconds[number])]
            # a rank holds the memory of its stages together
            + (held if first == number else [f"with stage {first}", *[""] * len(STATES)])
        )
    head = [
        f"mesh {plan.mesh}, schedule {schedule(plan.schedule)}, "
        f"{plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}"
        f" of a batch of {plan.batch}",
        f"placement {rules(plan.placements)}",
        *([f"recompute {spans(plan.recompute, plan.segments)}"] if plan.recompute else []),
        *([f"in chunks {in_chunks(plan.chunks)}"] if plan.chunks else []),
        *inside(plan),
        *_on_host(plan),
        *(f"another copy of the model has its stages on the pipeline ranks {copy}" for copy in plan.mirrors),
        f"predicted step {format_seconds(predicted.step_seconds)}, bubble {predicted.bubble:.1%}"
        + f", {predicted.samples_per_second:,.1f} samples/s with the pipeline full"
        * bool(predicted.samples_per_second),
    ]
    return "\n".join([*head, *_table(rows), *_traffic(plan), f"optimality: {plan.optimality}"])


def _where(plan: Plan, ranks: tuple[int, ...]) -> str:
    """Ranks, and which devices they are where a cluster has unlike ones."""
    devices = tuple(sorted(plan.devices[rank] for rank in ranks)) if plan.devices else ()
    return _ranks(ranks) + f" on devices {_ranks(devices)}" * bool(devices)


def _on_host(plan: Plan) -> Iterator[str]:
    """What is kept on the hosts."""
    states = {state for _, placement in plan.placements for state in placement.on("dp").on_host}
    if states:
        most = max(memory.host for memory in plan.prediction.memory)
        yield (
            f"on the host {' and '.join(sorted(states, reverse=True))}: up to {format_bytes(most)} for each rank; "
            "programs do not do that yet"
        )


def diff(plan: Plan, other: Plan) -> str:
    """A line for each field that differs, stage by stage and state by state."""
    before, after = _flat(plan), _flat(other)
    keys = [*before, *(key for key in after if key not in before)]
    return "\n".join(
        f"{key}: {before.get(key, '(none)')} -> {after.get(key, '(none)')}"
        for key in keys
        if before.get(key) != after.get(key)
    )


def _flat(plan: Plan) -> dict[str, str]:
    """Every fact of a plan by a readable name."""
    facts = {field.name: str(getattr(plan, field.name)) for field in fields(plan)}
    structured = ("stages", "placements", "prediction", "notes", "recompute", "tensor", "alternatives", "facts", "took")
    for each in structured:
        del facts[each]
    facts["schedule"] = plan.schedule.replace("\n", " | ")
    facts["placement"] = rules(plan.placements)
    facts["chunks"] = in_chunks(plan.chunks) or "none"
    facts["recompute"] = ", ".join(plan.recompute) or "nothing"
    for tensor in plan.axes_inside:
        facts |= {f"{tensor.axis} {name}": str(how) for name, how in (*tensor.parameters, *tensor.between)}
        choices = hashlib.sha256(repr((tensor.choices, tensor.segments)).encode()).hexdigest()[:8]
        facts[f"choices inside segments on {tensor.axis}"] = choices
    facts |= {
        f"runner-up {each.choice}": f"{each.option}: {each.step_seconds!r} s, {each.peak} bytes"
        for each in plan.alternatives
    }
    facts |= {f"cost of {span(fact.segments)}": str(fact) for fact in plan.facts}
    for number, stage in enumerate(plan.stages):
        facts[f"stage {number} segments"] = ", ".join(stage.segments)
        facts[f"stage {number} ranks"] = _ranks(stage.ranks)
    facts["step seconds"] = repr(plan.prediction.step_seconds)
    facts["bubble"] = repr(plan.prediction.bubble)
    facts["samples per second"] = repr(plan.prediction.samples_per_second)
    for number, memory in enumerate(plan.prediction.memory):
        facts[f"stage {number} seconds"] = repr(plan.prediction.stage_seconds[number])
        facts |= {f"stage {number} {state} bytes": str(getattr(memory, state)) for state in (*STATES, "host")}
    for rank, sent in enumerate(plan.prediction.sent):
        facts |= {f"rank {rank} {collective} bytes": str(count) for collective, count in sent}
    return facts | {f"note {number}": note for number, note in enumerate(plan.notes)}


def inside(plan: Plan) -> list[str]:
    """How parameters lie on the axes inside segments, those of layers that differ in a number together; what passes."""
    return [line for tensor in plan.axes_inside for line in _axis(tensor, plan.segments)]


def _axis(tensor: TensorPlan, segments: Sequence[str]) -> list[str]:
    how: dict[str, dict[str, None]] = {}
    for target, placement in tensor.parameters:
        how.setdefault(str(placement), {})[re.sub(r"\b\d+\b", "*", target)] = None
    passing: dict[str, list[str]] = {}
    for name, number in zip(segments, tensor.segments, strict=False):
        forward = tensor.choices[number].forward
        taken, given = (", ".join(dict.fromkeys(map(str, part))) for part in (forward.inputs[:1], forward.outputs))
        split = any(strategy.cut is not None for strategy in forward.strategies)
        what = f"from {taken or 'nothing'} to {given or 'nothing'}" + (
            "" if split else ", each place computes all of it"
        )
        passing.setdefault(what, []).append(name)
    return [
        *(f"{tensor.axis} {placement}: {', '.join(found)}" for placement, found in sorted(how.items())),
        *(f"{tensor.axis} through {spans(found, segments)}: {what}" for what, found in passing.items()),
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    """Rank numbers, shortened to a range or a stride where they are one."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) < 4 or len(steps) != 1:
        return ",".join(map(str, ranks))
    step = steps.pop()
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step != 1 else "")


def _traffic(plan: Plan) -> list[str]:
    """Bytes sent, a line for each group of ranks that send the same."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, sent in enumerate(plan.prediction.sent):
        groups.setdefault(sent, []).append(rank)
    return [
        f"rank {_ranks(tuple(ranks))} sends per step: "
        + (", ".join(f"{collective} {format_bytes(count)}" for collective, count in sent) or "nothing")
        for sent, ranks in groups.items()
    ]


def _table(rows: list[list[str]]) -> list[str]:
    """Rows with aligned columns, the first row as head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
