"""Which operators return views: what shares a storage with what."""

from __future__ import annotations

from collections.abc import Iterable

from autopart._torch import OpOverload
from autopart.ir.graph import Node, Ref


def views(op: OpOverload) -> bool:
    """Whether an operator's results share the storage of its first operand, or may do so."""
    # `_unsafe_view` promises in its schema that nobody else uses its operand, not that it copies.
    return bool(op.is_view) or str(op) == "aten._unsafe_view.default"


def viewed(node: Node) -> str | None:
    """The value whose storage every result of the node shares, None if its results have storages of their own."""
    if not views(node.op):
        return None
    source = node.args[0]
    return source.name if isinstance(source, Ref) else None


def roots(nodes: Iterable[Node]) -> dict[str, str]:
    """For each value that is a view, directly or through other views: the value that its storage was made for."""
    found: dict[str, str] = {}
    for node in nodes:
        source = viewed(node)
        if source is not None:
            found.update(dict.fromkeys(node.names(), found.get(source, source)))
    return found
