"""A simulated timeline for people: as text, as a picture (SVG) and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from autopart.ir.action import Action, Kind

if TYPE_CHECKING:
    from autopart.schedules.simulate import Span, Timeline

COLOURS = {
    Kind.F: ("#4e79a7", "forward"),
    Kind.B: ("#59a14f", "backward"),
    Kind.I: ("#76b7b2", "backward for inputs"),
    Kind.W: ("#b6992d", "backward for weights"),
    Kind.S: ("#e15759", "output layer, first part"),
    Kind.T: ("#ff9da7", "output layer, second part"),
    Kind.E: ("#af7aa1", "lookup in the input embedding"),
    Kind.D: ("#d4a6c8", "gradient of the input embedding"),
    Kind.OPT: ("#79706e", "optimizer step"),
}
"""The fill of each kind and what the legend calls it; a PAIR shows both of its members."""

BAR = 60
"""Characters of a rank's bar in the text."""

LEFT, WIDTH, ROW, BOX, TICKS = 60, 1200, 32, 26, 10
"""The picture, in pixels: the margin for names, the length of the makespan, a row, the box in it; marks on the axis."""

LETTER = 6.5
"""The width of a digit in a box, in pixels: numbers that do not fit are left out."""


def text(timeline: Timeline) -> str:
    """Makespan and bubbles, then for each rank its share of work, the activations that it holds, and a bar."""
    whole = timeline.makespan
    part = (lambda time: time / whole) if whole else (lambda time: 0.0)
    lines = [
        f"makespan      {whole:.6g}",
        f"flush bubble  {timeline.flush_bubble:.6g} ({part(timeline.flush_bubble):.1%})",
        f"span bubble   {timeline.span_bubble:.6g} ({part(timeline.span_bubble):.1%})",
    ]
    for rank, held in enumerate(timeline.peak_activations):
        spans = [span for span in timeline.spans if span.rank == rank]
        busy = sum(span.end - span.start for span in spans)
        bar = ["."] * BAR
        for span in spans:
            for place in range(int(part(span.start) * BAR), int(part(span.end) * BAR)):
                bar[place] = str(span.action.kind)[0]
        lines.append(f"rank {rank:<3} {part(busy):6.1%} busy, {held:g} microbatches held")
        lines.append(f"         {''.join(bar)}")
    return "\n".join(lines)


def chrome(timeline: Timeline) -> str:
    """The trace event format's JSON: a complete event an action, in microseconds, threads named after ranks."""
    ranks = range(len(timeline.idle))
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    events = [
        {
            "name": str(span.action),
            "cat": str(span.action.kind),
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
        }
        for span in timeline.spans
    ]
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def svg(timeline: Timeline) -> str:
    """The picture. A box has its microbatch's number where that fits, and all about its action as a tooltip."""
    ranks = len(timeline.idle)
    scale = WIDTH / timeline.makespan if timeline.makespan else 0.0
    bottom = ranks * ROW + ROW // 2
    body = [
        *(_label(8, rank * ROW + ROW // 2, f"rank {rank}", "start") for rank in range(ranks)),
        *(line for span in timeline.spans if span.end > span.start for line in _box(span, scale)),
        *_axis(timeline.makespan, bottom),
        *_legend({part.kind for span in timeline.spans for part in span.action.parts}, bottom + ROW),
    ]
    size = f'width="{LEFT + WIDTH + LEFT}" height="{bottom + 2 * ROW}"'
    style = 'font-family="sans-serif" font-size="11"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *body, "</svg>", ""])


def _box(span: Span, scale: float) -> Iterator[str]:
    """The boxes of an action: one, or one above the other for the members of a PAIR."""
    left, width = LEFT + span.start * scale, (span.end - span.start) * scale
    height = BOX / len(span.action.parts)
    for place, part in enumerate(span.action.parts):
        top = span.rank * ROW + (ROW - BOX) / 2 + place * height
        tip = escape(f"{span.action}: {span.start:.6g} to {span.end:.6g}")
        fill = COLOURS[part.kind][0]
        yield (
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" '
            f'stroke="white" stroke-width="0.5"><title>{tip}</title></rect>'
        )
        number = _number(part)
        if LETTER * len(number) <= width:
            yield _label(left + width / 2, top + height / 2, number, "middle", "white")


def _number(action: Action) -> str:
    """What a box says: the microbatch, and the slice where it is not the first."""
    return f"{action.microbatch}.{action.slice}" if action.slice else str(action.microbatch)


def _axis(makespan: float, y: float) -> Iterator[str]:
    yield f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="black"/>'
    for tick in range(TICKS + 1):
        yield _label(LEFT + tick * WIDTH / TICKS, y + ROW // 3, f"{tick * makespan / TICKS:.4g}", "middle")


def _legend(kinds: set[Kind], y: float) -> Iterator[str]:
    for place, kind in enumerate(kind for kind in COLOURS if kind in kinds):
        fill, name = COLOURS[kind]
        x = LEFT + place * 175
        yield f'<rect x="{x}" y="{y - 6}" width="12" height="12" fill="{fill}"/>'
        yield _label(x + 18, y, f"{kind} {name}", "start")


def _label(x: float, y: float, words: str, anchor: str, fill: str = "black") -> str:
    """Words whose middle is at a height (0.35 of a line below it is where their letters stand)."""
    place = f'x="{x:.2f}" y="{y:.2f}" dy="0.35em" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}">{escape(words)}</text>'
