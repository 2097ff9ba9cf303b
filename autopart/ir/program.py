"""The program: what every rank runs, as text, with what is needed to run and check it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopart.ir.action import Action
from autopart.ir.captured import Captured
from autopart.ir.plan import Plan
from autopart.ir.staged import Staged
from autopart.ir.state import State

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's part: the Python `source`, and the `actions` that it performs, as a recording of it saw them."""

    rank: int
    source: str
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """One stage as FX graphs, traced from the text: calls of shared body modules between the collectives."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled step: one rank program a rank, the plan it follows, and the staged graph that it came from.

    `trace` derives the stage graphs from the texts (it is codegen's, which this layer does not know).
    """

    ranks: tuple[RankProgram, ...]
    plan: Plan
    staged: Staged
    trace: Callable[[Program], tuple[StageGraphs, ...]]

    @property
    def captured(self) -> Captured:
        """The graph of the whole step."""
        return self.staged.segmented.captured

    @property
    def state(self) -> State:
        """The units that the state lives in."""
        return self.staged.state

    @property
    def stages(self) -> tuple[StageGraphs, ...]:
        """The stage graphs, traced from the text at the plan's microbatch size."""
        return self.trace(self)

    def write(self, folder: str | Path) -> Path:
        """Write ``rank0.py``, ``rank1.py``, ... and ``plan.json`` into `folder` (made if absent) and return it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks:
            (folder / f"rank{rank.rank}.py").write_text(rank.source)
        self.plan.save(folder / "plan.json")
        (folder / "actions.json").write_text(
            json.dumps([[str(a) for a in rank.actions] for rank in self.ranks], indent=0)
        )
        return folder
