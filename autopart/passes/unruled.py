"""unruled: Segmented -> notes. The operators without a factor rule, all of which every place of an axis computes whole.

Such operators read no samples, or run on slices of the batch: `judge` refuses them elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopart.ir.graph import Node
from autopart.ir.segmented import Segmented
from autopart.rules.table import family


def unruled(segmented: Segmented) -> tuple[str, ...]:
    """A sentence for each operator without a rule and line of the user's that calls it, for the notes of a plan."""
    return tuple(
        dict.fromkeys(
            f"{node.place()}{node.opname} has no sharding rule, so every place computes all of it;"
            " autopart.register_sharding_rule gives it one"
            for node in _nodes(segmented)
            if family(node.op) is None
        )
    )


def _nodes(segmented: Segmented) -> Iterator[Node]:
    for body in segmented.bodies:
        yield from body.forward.nodes
        yield from body.backward.nodes if body.backward is not None else ()
