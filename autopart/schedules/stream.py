"""Streams: an asynchronous schedule as what each rank does over and over, for as long as batches come.

At tick k a rank performs F(k), then B(k - ahead), then, where that ends a batch, the optimizer's step; when no batch
comes any more, ticks go on without forwards. Ticks are counted over the whole loop, as microbatches are. What is made
in a tick is received in it, which needs no waiting for gradients: their backward comes in a later one. All transfers
keep one order: by ticks, in each the activations, from the first stage on, and then the gradients, likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature

from autopart.ir.action import SETTINGS, Action, Kind, Schedule, Weights
from autopart.ir.plan import Plan
from autopart.schedules import stale
from autopart.schedules.build import build, read_name
from autopart.schedules.dependencies import Edges, batch_size
from autopart.schedules.executable import executable
from autopart.schedules.family import check_count
from autopart.schedules.filling import Filled
from autopart.schedules.spell import is_table, make
from autopart.schedules.text import read
from autopart.schedules.versions import staleness


@dataclass(frozen=True, slots=True)
class Stream:
    """A schedule that never flushes, a stage a rank.

    `batch` is the number of microbatches between two steps of the optimizer; ``ahead[s]`` how many forwards stage s has
    begun when its first backward comes, less one; ``keep[s]`` how many versions of the weights beside the newest one
    the stage's actions still need after a step.
    """

    name: str
    weights: Weights
    batch: int
    ahead: tuple[int, ...]
    keep: tuple[int, ...]

    @property
    def delay(self) -> tuple[int, ...]:
        """By stage, the steps between a forward and its backward for which the optimizer is to make up, if any."""
        return self.ahead if compensates(self.name) else (0,) * len(self.ahead)

    @property
    def lag(self) -> int:
        """After how many further batches every rank has done all of a batch, but for its own last backwards."""
        return -(-max(self.ahead) // self.batch)

    @property
    def unfinished(self) -> int:
        """The microbatches before those of the last batch that some rank still needs."""
        return max(self.ahead)

    @property
    def shown(self) -> int:
        """A number of batches with a beginning, a middle and an end."""
        return self.lag + 2

    def rows(self, edges: Edges, batches: int) -> tuple[tuple[Action, ...], ...]:
        """What each rank does for so many batches, with what is sent and received over `edges`."""
        return tuple(tuple(self._row(stage, edges, batches * self.batch)) for stage in range(len(self.ahead)))

    def _row(self, stage: int, edges: Edges, count: int) -> Iterator[Action]:
        before = sorted(a for a, b in edges if b == stage and a < stage)
        after = sorted(b for a, b in edges if a == stage and b > stage)
        givers = sorted(a for a, b in edges if b == stage and a > stage)
        takers = sorted(b for a, b in edges if a == stage and b < stage)
        for tick in range(count + self.ahead[stage]):
            if tick < count:
                yield from (Action(Kind.RECV, stage, tick, peer=feeder) for feeder in before)
                yield Action(Kind.F, stage, tick)
                yield from (Action(Kind.SEND, stage, tick, peer=target) for target in after)
            k = tick - self.ahead[stage]
            if k >= 0:
                yield Action(Kind.B, stage, k)
                yield from (Action(Kind.SEND, stage, k, peer=taker) for taker in takers)
                if (k + 1) % self.batch == 0:
                    yield Action(Kind.OPT, stage, k // self.batch)
            made = ((giver, tick - self.ahead[giver]) for giver in givers)
            yield from (Action(Kind.RECV, stage, k, peer=giver) for giver, k in made if 0 <= k < count)


def table_of(plan: Plan) -> Schedule:
    """The table of a plan whose steps overlap, for as many batches as it shows."""
    if is_table(plan.schedule):
        return read(plan.schedule, name="filled")
    count = stream_of(plan).shown * plan.microbatches
    return make(plan.schedule, ranks=plan.mesh.degree("pp"), microbatches=count)


def stream_of(plan: Plan) -> Stream | Filled:
    """What the ranks of a plan whose steps overlap do over and over.

    Raises ValueError for a schedule that flushes, one that cannot be for the plan's numbers, and one that changes
    weights in another order than that of a stream.
    """
    return _stream(plan.schedule, plan.mesh.degree("pp"), plan.microbatches)


@lru_cache(maxsize=16)  # it is asked for on every rank, and takes long to find in a table
def _stream(text: str, ranks: int, batch: int) -> Stream | Filled:
    if is_table(text):
        schedule = read(text, name="filled")
        found: Stream | Filled | None = Filled.read(schedule, batch)
    else:
        # A name makes a table for any number of batches: one that has a beginning, a middle and an end.
        schedule = make(text, ranks=ranks, microbatches=batch * (2 * ranks + 2))
        found = _read(schedule) if schedule.weights is not Weights.SYNC else None
    if found is None or found.batch != batch:
        raise ValueError(
            f"schedule: {schedule.name!r} does not step after each batch of {batch} microbatches and go on; name "
            "pipedream or pb (batches of 1 microbatch), 2bw or paci"
        )
    return found


def spelled(schedule: str, ranks: int, microbatches: int | None) -> tuple[str, int]:
    """The text of a loop's schedule on so many pipeline ranks, and the microbatches of its batches.

    Without `microbatches` they are as many as the family has by itself. Raises ValueError for another schedule,
    TypeError for what is no text.
    """
    family, options = read_name(schedule)
    if family not in stale.FAMILIES:
        count = 2 * ranks if microbatches is None else microbatches
        made = build(schedule, ranks=ranks, microbatches=count)
        _check_fillable(made)
        return made.name, count
    given = options.get("accumulate")
    if microbatches is not None and given not in (None, microbatches):
        raise ValueError(f"microbatches: {microbatches} contradict {schedule!r}")
    grouped = "accumulate" in signature(family.make).parameters
    usual = {"2bw": ranks, "paci": max(1, ranks - 1)}.get(family.name, 1)
    batch = microbatches if given is None else given
    check_count("microbatches", batch := usual if batch is None else batch)
    assert isinstance(batch, int)
    if not grouped and batch != 1:
        raise ValueError(
            f"microbatches: {family.name!r} steps after every microbatch, so a batch is one of them; pass smaller "
            "batches and microbatches=1, or name 2bw or paci"
        )
    text = f"{family.name}(accumulate={batch})" if batch != usual else family.name
    return build(text, ranks=ranks, microbatches=batch).name, batch


def check_name(schedule: str) -> None:
    """Raise ValueError or TypeError for what is no schedule of a loop, whatever its numbers are."""
    family, _ = read_name(schedule)
    if family in stale.FAMILIES:
        spelled(schedule, 1, None)
        return
    try:
        made = build(schedule, ranks=4, microbatches=8)
    except ValueError:  # it is for other numbers, which are known at the first batch
        return
    _check_fillable(made)


def _check_fillable(made: Schedule) -> None:
    what = "two copies of the model" if made.mirrors else "slices of the sequence" if made.slices > 1 else ""
    what = "an output layer in parts" if made.barriers else what
    if what:
        raise ValueError(
            f"schedule: {made.name!r} is none of a train_loop, as it has {what}; it takes "
            f"{', '.join(each.name for each in stale.FAMILIES)}, and for a model with frozen layers in front what has "
            "one copy of it, whole sequences and a whole output layer, such as 1f1b, interleaved or zb-h1"
        )


def fits(plan: Plan, schedule: str, batch: int) -> bool:
    """Whether a plan whose steps overlap is one of what `spelled` says."""
    ranks = plan.mesh.degree("pp")
    if is_table(plan.schedule):
        found = stream_of(plan)
        trained = executable(make(schedule, ranks=ranks, microbatches=batch))
        return isinstance(found, Filled) and found.trained.table == trained.table
    return spelled(plan.schedule, ranks, plan.microbatches) == (schedule, batch)


def compensates(text: str) -> bool:
    """Whether the optimizer may make up for the delays of a schedule by this name."""
    return text.partition("(")[0].strip() == "pb"


def overlaps(text: str) -> bool:
    """Whether a schedule's text (of `spell`) is of a loop whose steps overlap, rather than of a step that flushes."""
    if is_table(text):
        return text.lstrip().startswith(f"{SETTINGS[0]}:")
    return text.partition("(")[0].strip() in {family.name for family in stale.FAMILIES}


def _read(schedule: Schedule) -> Stream | None:
    """The schedule as a stream; None if it is none."""
    stages = range(schedule.stages)
    if schedule.place != tuple(stages):
        return None
    ahead = tuple(
        next(i for i, action in enumerate(row) if action.kind is Kind.B) - 1 if _turns(row) else -1
        for row in schedule.table
    )
    keep = tuple(_kept(schedule.weights, each.live) for each in staleness(schedule))
    made = Stream(schedule.name, schedule.weights, batch_size(schedule), ahead, keep)
    rows = made.rows(frozenset(), schedule.microbatches // made.batch)
    return made if rows == schedule.table else None


def _turns(row: tuple[Action, ...]) -> bool:
    return any(action.kind is Kind.B for action in row) and row[0].kind is Kind.F


def _kept(weights: Weights, live: int) -> int:
    """The versions beside the newest: those of forwards on their way, the one before the newest, or none."""
    return {Weights.STASH: live - 1, Weights.DOUBLE: 1, Weights.CURRENT: 0, Weights.SYNC: 0}[weights]
