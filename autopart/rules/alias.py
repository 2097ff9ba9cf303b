"""Which operators return views: what shares a storage with what."""

from __future__ import annotations

from collections.abc import Iterable

from autopart.ir.graph import Node, Ref


def viewed(node: Node) -> str | None:
    """The value whose storage every result of the node shares, None if its results have storages of their own."""
    # `_unsafe_view` promises in its schema that nobody else uses its operand, not that it copies.
    if not node.op.is_view and node.opname != "aten._unsafe_view.default":
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
