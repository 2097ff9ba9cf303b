"""The public functions: plans, programs, training loops, saving and loading."""

from autopart.api.compiler import compile, plan
from autopart.api.fronts import pareto
from autopart.api.loop import train_loop
from autopart.api.module import parallelize
from autopart.api.saving import load, save
from autopart.api.stepping import post_validated
from autopart.api.timeline import simulate

__all__ = ["compile", "load", "parallelize", "pareto", "plan", "post_validated", "save", "simulate", "train_loop"]
