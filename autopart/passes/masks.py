"""masks: which of an attention's masks are made of numbers alone, and keep every token from all later ones."""

from __future__ import annotations

import torch

from autopart.ir.captured import Captured
from autopart.ir.graph import Arg, Node, Ref, Size, ancestors


def hides_later(captured: Captured, name: str) -> bool:
    """Whether a mask that is added to scores, [..., queries, keys], leaves no query a key that comes after it.

    That is known of one into which nothing enters that may change; it is computed here, for a single sample. Minus
    infinity hides a key, and so does the least number of the dtype from a query that has another key.
    """
    nodes, needed = ancestors(captured.nodes, [name])
    if not nodes or not needed.isdisjoint(item.value.name for item in captured.inputs):
        return False
    env: dict[str, torch.Tensor | None] = {}
    with torch.no_grad():
        for node in nodes:
            made = _made(node, env)
            env.update((out.name, each) for out, each in zip(node.outs, made, strict=True) if out is not None)
    mask = env[name]
    if mask is None or not mask.is_floating_point() or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    later, least = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1), torch.finfo(mask.dtype).min
    hidden = mask[..., later]
    seen = mask.masked_fill(later, -torch.inf).amax(-1)
    return bool((hidden == -torch.inf).all() or ((hidden <= least).all() and (seen > least / 2).all()))


def _made(node: Node, env: dict[str, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """What a node returns."""

    def leaf(arg: Arg) -> Arg:
        match arg:
            case Ref(name):
                return env[name]
            case Size():
                return arg.at(1)
            case torch.device():
                return torch.device("cpu")
            case _:
                return arg

    made = node.mapped(leaf)
    found = node.op(*made.args, **dict(made.kwargs))
    return (found,) if node.single else tuple(found)
