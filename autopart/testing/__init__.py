"""What users, and autopart's own tests, property-test with.

The strategies need hypothesis (``pip install autopart[testing]``), which is imported when one is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopart.testing.world import LocalWorld

if TYPE_CHECKING:
    from autopart.testing.parity import assert_parity
    from autopart.testing.reference import reference_random
    from autopart.testing.sharding import check_sharding_rule
    from autopart.testing.strategies import batches, meshes, plans, schedules

__all__ = [
    "LocalWorld",
    "assert_parity",
    "batches",
    "check_sharding_rule",
    "meshes",
    "plans",
    "reference_random",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if name == "assert_parity":
        from autopart.testing.parity import assert_parity

        return assert_parity
    if name == "check_sharding_rule":
        from autopart.testing.sharding import check_sharding_rule

        return check_sharding_rule
    if name == "reference_random":
        from autopart.testing.reference import reference_random

        return reference_random
    if name in __all__:
        from autopart.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
