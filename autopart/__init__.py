"""autopart: a compiler that places a PyTorch training step on many devices, and shows the program each rank runs.

Each public name is loaded when it is first asked for, so `import autopart` itself takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopart import schedules, testing
    from autopart.api import compile, load, parallelize, pareto, plan, post_validated, save, simulate, train_loop
    from autopart.cluster import Cluster
    from autopart.errors import AutopartError, CaptureError, PlanInfeasible, RankFailure, VerificationError
    from autopart.ir.placement import Partial, Placement, Replicate, Shard
    from autopart.ir.plan import Plan
    from autopart.ir.program import Program
    from autopart.passes.verify import verify
    from autopart.rules.register import register_sharding_rule

__all__ = [
    "AutopartError",
    "CaptureError",
    "Cluster",
    "Partial",
    "Placement",
    "Plan",
    "PlanInfeasible",
    "Program",
    "RankFailure",
    "Replicate",
    "Shard",
    "VerificationError",
    "compile",
    "load",
    "parallelize",
    "pareto",
    "plan",
    "post_validated",
    "register_sharding_rule",
    "save",
    "schedules",
    "simulate",
    "testing",
    "train_loop",
    "verify",
]

_HOMES = {
    **dict.fromkeys(
        ("compile", "load", "parallelize", "pareto", "plan", "post_validated", "save", "simulate", "train_loop"),
        "autopart.api",
    ),
    **dict.fromkeys(
        ("AutopartError", "CaptureError", "PlanInfeasible", "RankFailure", "VerificationError"), "autopart.errors"
    ),
    "Cluster": "autopart.cluster",
    **dict.fromkeys(("Partial", "Placement", "Replicate", "Shard"), "autopart.ir.placement"),
    "Plan": "autopart.ir.plan",
    "Program": "autopart.ir.program",
    "register_sharding_rule": "autopart.rules.register",
    "verify": "autopart.passes.verify",
}


def __getattr__(name: str) -> Any:
    if name in ("schedules", "testing"):
        return import_module(f"autopart.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'autopart' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
