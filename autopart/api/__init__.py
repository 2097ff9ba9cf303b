"""The public functions: `plan`, `compile`, `parallelize`, `simulate`, `save` and `load`."""

from autopart.api.compiler import compile, plan
from autopart.api.module import parallelize
from autopart.api.saving import load, save
from autopart.api.timeline import simulate

__all__ = ["compile", "load", "parallelize", "plan", "save", "simulate"]
