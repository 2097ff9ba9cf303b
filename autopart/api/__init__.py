"""The public functions: `plan`, `compile` and `parallelize`."""

from autopart.api.compiler import compile, plan
from autopart.api.module import parallelize

__all__ = ["compile", "parallelize", "plan"]
