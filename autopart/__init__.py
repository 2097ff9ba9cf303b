"""autopart: a compiler that places a PyTorch training step on many devices, and shows the program each rank runs."""

from autopart import schedules, testing
from autopart.api import compile, load, parallelize, plan, save, simulate
from autopart.cluster import Cluster
from autopart.errors import AutopartError, CaptureError, PlanInfeasible, RankFailure, VerificationError
from autopart.ir.placement import Placement
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.verify import verify

__all__ = [
    "AutopartError",
    "CaptureError",
    "Cluster",
    "Placement",
    "Plan",
    "PlanInfeasible",
    "Program",
    "RankFailure",
    "VerificationError",
    "compile",
    "load",
    "parallelize",
    "plan",
    "save",
    "schedules",
    "simulate",
    "testing",
    "verify",
]
