"""The solver: what a plan is chosen by. `choose` makes a plan; `solve_split` and `certify` are its exact core."""

from autopart.solver.certify import certify
from autopart.solver.choose import choose
from autopart.solver.split import Split, SplitProblem, solve_split

__all__ = ["Split", "SplitProblem", "certify", "choose", "solve_split"]
