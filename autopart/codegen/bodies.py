"""The text of the bodies: one function a distinct body and phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopart.codegen.functions import function, tuple_of
from autopart.codegen.layout import Layout


@dataclass(frozen=True, slots=True)
class Bodies:
    """The functions' lines, and the name of each layout's functions (``name_forward``, ``name_backward``)."""

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
        lines += ["", "", *_forward(item, name, doc)]
        if item.body.backward is not None:
            lines += ["", "", *_backward(item, name, doc)]
    return Bodies(tuple(lines), names)


def _fresh(wish: str, taken: set[str]) -> str:
    """A name for a body: where layouts differ, one body makes several functions."""
    name, count = wish, 1
    while name in taken:
        count += 1
        name = f"{wish}_w{count}"
    return name


def _forward(item: Layout, name: str, doc: str) -> list[str]:
    formals = ("b", "B", *item.values, *item.forward_fixed, *item.formals)
    count = len(item.segment.outputs)
    returned = list(item.body.forward.outputs[:count])
    if item.segment.updates:
        returned.append(tuple_of(item.body.forward.outputs[count:]))
    if item.body.backward is not None:
        returned.append(tuple_of(item.body.saved))
    return function(
        f"{name}_forward",
        formals,
        item.body.forward.nodes,
        ", ".join(returned) or "None",
        doc=f"Forward of {doc}.",
        prefix=item.segment.name.split("@")[0],
    )


def _backward(item: Layout, name: str, doc: str) -> list[str]:
    assert item.body.backward is not None
    formals = ("b", "B", *item.backward_inputs, *item.body.saved, *item.backward_fixed, *item.formals)
    returned = list(item.body.backward.outputs[: len(item.segment.backward_outputs)])
    returned += [tuple_of(sources) for _, sources in item.gradients]
    return function(
        f"{name}_backward",
        formals,
        item.body.backward.nodes,
        ", ".join(returned) or "None",
        doc=f"Backward of {doc}.",
        prefix=item.segment.name.split("@")[0],
        recomputes=any(not node.backward for node in item.body.backward.nodes),
    )
