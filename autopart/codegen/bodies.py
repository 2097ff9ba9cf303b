"""The text of the bodies: one function a distinct body and phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopart.codegen.functions import communicates, function, tuple_of
from autopart.codegen.layout import Layout
from autopart.ir.action import Kind

SUFFIX = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
    Kind.S: "logits",
    Kind.T: "loss",
}
"""How the functions of bodies and stages are called after what they do."""

_FORWARD = (Kind.F, Kind.S, Kind.T)
"""Those that run nodes of the forward because it is theirs to do."""

_DOC = {
    Kind.F: "Forward of {}.",
    Kind.B: "Backward of {}.",
    Kind.I: "Backward of {} for its inputs (dgrad).",
    Kind.W: "Backward of {} for its weights (wgrad).",
    Kind.S: "Logits of {}, this rank's part, and what they add to the sums over all classes.",
    Kind.T: "This rank's part of the loss of {} and of its gradients, given the other ranks' sums.",
}


@dataclass(frozen=True, slots=True)
class Bodies:
    """The functions' lines, and the name of each layout's functions (``name_forward`` and so on, see `SUFFIX`)."""

    lines: tuple[str, ...]
    names: dict[object, str]


def bodies(layouts: Iterable[Layout]) -> Bodies:
    """Emit every distinct body among the layouts once."""
    layouts = tuple(layouts)
    lines: list[str] = []
    names: dict[object, str] = {}
    for item in layouts:
        if item.variant in names:
            continue
        name = names[item.variant] = _fresh(item.body.name, set(names.values()))
        users = [other.segment.name for other in layouts if other.variant == item.variant]
        doc = users[0] if len(users) == 1 else f"{users[0]} to {users[-1]}"
        for kind in item.phases:
            lines += ["", "", *_function(item, kind, name, doc)]
    return Bodies(tuple(lines), names)


def _fresh(wish: str, taken: set[str]) -> str:
    """A name for a body: where layouts differ, one body makes several functions."""
    name, count = wish, 1
    while name in taken:
        count += 1
        name = f"{wish}_w{count}"
    return name


def _function(item: Layout, kind: Kind, name: str, doc: str) -> list[str]:
    """The function of one phase: it returns values, new values of buffers, what it keeps, gradients by unit."""
    phase = item.phases[kind]
    count = len(phase.gives)
    returned = list(phase.function.outputs[:count])
    if phase.updates:
        returned.append(tuple_of(phase.function.outputs[count:]))
    if phase.keeps is not None:
        returned.append(tuple_of(phase.keeps))
    if phase.gradients:
        returned += [tuple_of(sources) for _, sources in item.gradients]
    return function(
        f"{name}_{SUFFIX[kind]}",
        (*(("world",) if communicates(phase.function.nodes) else ()), "b", "B", *item.inputs(kind)),
        phase.function.nodes,
        ", ".join(returned) or "None",
        doc=_DOC[kind].format(doc),
        prefix=item.segment.layer.split("@")[0],
        recomputes=kind not in _FORWARD and any(not node.backward for node in phase.function.nodes),
        inputs=phase.function.inputs,
        loops=phase.function.loops,
    )
