"""The public functions: `plan`, `compile`, `parallelize` and `simulate`."""

from autopart.api.compiler import compile, plan
from autopart.api.module import parallelize
from autopart.api.timeline import simulate

__all__ = ["compile", "parallelize", "plan", "simulate"]
