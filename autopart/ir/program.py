"""The program: what every rank runs, as text, with what is needed to run and check it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.ir.action import Action
from autopart.ir.captured import Captured
from autopart.ir.codec import decode, encode
from autopart.ir.plan import Plan
from autopart.ir.staged import Staged
from autopart.ir.state import State

if TYPE_CHECKING:
    import torch

SCHEMA = "autopart.program"
VERSION = 4


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's part: the Python `source`, and the `actions` that it performs, as a recording of it saw them."""

    rank: int
    source: str
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """One stage as FX graphs, traced from the text: calls of shared body modules between the collectives.

    None for what its text does not have: a backward is whole, or in two (for inputs, for weights), or there is nothing
    to do in it.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None = None
    backward_input: torch.fx.GraphModule | None = None
    backward_weight: torch.fx.GraphModule | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled step: one rank program a rank, the plan it follows, and the staged graph that it came from.

    `trace` derives the stage graphs from the texts (it is codegen's, which this layer does not know). Where mesh axes
    split the tensors inside segments, `staged` is the step of their first place, `others` those of the others.
    """

    ranks: tuple[RankProgram, ...]
    plan: Plan
    staged: Staged
    trace: Callable[[Program], tuple[StageGraphs, ...]]
    others: tuple[Staged, ...] = ()

    @property
    def places(self) -> tuple[Staged, ...]:
        """The step of every place of the axes inside segments; one without such an axis."""
        return (self.staged, *self.others)

    def staged_on(self, rank: int) -> Staged:
        """The step that a rank runs its part of."""
        return self.places[self.plan.place_inside(rank)]

    def state_on(self, rank: int) -> State:
        """The units that a rank's state lives in: with the pieces that are there of their parameters."""
        return self.staged_on(rank).state

    @property
    def captured(self) -> Captured:
        """The graph of the whole step."""
        return self.staged.segmented.captured

    @property
    def state(self) -> State:
        """The units that the state lives in, as they are on rank 0."""
        return self.staged.state

    @property
    def stages(self) -> tuple[StageGraphs, ...]:
        """The stage graphs, traced from the text at the plan's microbatch size."""
        return self.trace(self)

    def write(self, folder: str | Path) -> Path:
        """Write the program into `folder` (made if absent) and return it: `read` reads it back.

        ``rank0.py``, ``rank1.py``, ... are what the ranks run; ``plan.json`` and ``actions.json`` are for reading;
        ``program.json`` is the graph that the texts are verified against. Raises TypeError for what JSON cannot hold.
        """
        folder = Path(folder)
        data = {"schema": SCHEMA, "version": VERSION, "staged": encode(self.staged)}
        if self.others:
            data["others"] = [encode(staged) for staged in self.others]
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks:
            (folder / f"rank{rank.rank}.py").write_text(rank.source, encoding="utf-8")
        self.plan.save(folder / "plan.json")
        rows = [[str(action) for action in rank.actions] for rank in self.ranks]
        (folder / "actions.json").write_text(json.dumps(rows, indent=0), encoding="utf-8")
        (folder / "program.json").write_text(json.dumps(data), encoding="utf-8")
        return folder

    @classmethod
    def read(cls, folder: str | Path) -> Program:
        """The program in a folder that `write` made, with its texts as they are now: they may have been edited.

        Nothing of them is executed and nothing is checked: `autopart.verify` does. `actions` are those of the texts as
        they were written. Raises ValueError, naming the file, for a folder that is not such.
        """
        folder = Path(folder)
        if not (folder / "program.json").is_file():
            what = "there is no such folder" if not folder.is_dir() else "it has no program.json"
            raise ValueError(f"{folder}: not a written program ({what}); Program.write makes one")
        plan = Plan.load(_found(folder / "plan.json"))
        data = _json(folder / "program.json")
        if not isinstance(data, dict) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
            raise ValueError(f"{folder / 'program.json'}: expected schema {SCHEMA!r}, version {VERSION}")
        staged = decode(Staged, data.get("staged"), f"{folder / 'program.json'}: staged")
        others = decode(tuple[Staged, ...], data.get("others", []), f"{folder / 'program.json'}: others")
        if len(others) != plan.inside - 1:
            raise ValueError(f"{folder / 'program.json'}: expected the steps of {plan.inside} places")
        rows = _json(folder / "actions.json")
        if not isinstance(rows, list) or len(rows) != plan.mesh.size:
            raise ValueError(f"{folder / 'actions.json'}: expected the actions of {plan.mesh.size} ranks")
        sources = [_found(folder / f"rank{rank}.py").read_text(encoding="utf-8") for rank in range(plan.mesh.size)]
        ranks = (
            RankProgram(rank, source, tuple(Action.parse(str(text)) for text in row))
            for rank, (source, row) in enumerate(zip(sources, rows, strict=True))
        )
        return cls(tuple(ranks), plan, staged, _trace, others)


def _trace(program: Program) -> tuple[StageGraphs, ...]:
    """The stage graphs by codegen, a layer above, which is looked up when they are asked for."""
    traced: tuple[StageGraphs, ...] = import_module("autopart.codegen.graphs").stage_graphs(program)
    return traced


def _found(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: missing from the written program")
    return path


def _json(path: Path) -> Any:
    try:
        return json.loads(_found(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
