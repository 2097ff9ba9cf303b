"""The simulator beside the clock: every schedule run by real processes over gloo, with sleeps for its compute.

    python benchmarks/schedules.py [--ranks 2,4,8] [--only 1f1b,zb-v] [--cost 20] [--rounds 3]

A rank works through its row as a program does: it sleeps where the row computes, posts what the row sends and waits for
what it receives. Sleeps need no core, so more ranks than cores are fair. One stage's F, I and W take `--cost`
milliseconds each; the table has the simulated makespan, the median of the measured ones, and how much longer that is.
The target is 5% at most. Microbatches are twice the ranks, or the fewest more that a schedule takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from common import machine, ranks, report

from autopart import schedules
from autopart.ir.action import Action, Kind, Schedule, Scheduled
from autopart.runtime.distributed import ProcessTransport, join
from autopart.runtime.transport import Pending
from autopart.schedules.dependencies import chain

TARGET = 0.05
FAMILIES = [*(family.name for family in schedules.names()), "vocab(barriers=2)"]
MESSAGE = (1024,)


def built(name: str, count: int) -> Schedule | None:
    """The schedule for `count` ranks, None where the family does not take so many (or few)."""
    for microbatches in range(2 * count, 4 * count + 1):
        try:
            return schedules.build(name, ranks=count, microbatches=microbatches)
        except ValueError:
            continue
    return None


def costs(schedule: Schedule, cost: float) -> dict[str, float]:
    """Such that one stage's F, I and W take `cost` seconds each, as do S and T together."""
    share = cost * schedule.stages * len(schedule.places) / schedule.ranks * schedule.slices
    return {"F": share, "I": share, "W": share, "S": share}


class Meetings:
    """What all ranks do together for an output layer split over them, each part in a group, and an order, of its own.

    F of the last stage goes to every rank, for its S; then S of all ranks, and T of all ranks, are waited for.
    """

    def __init__(self) -> None:
        self.groups = {kind: dist.new_group() for kind in (Kind.F, Kind.S, Kind.T)}
        self.begun: dict[tuple[Kind, int], dist.Work | None] = {}
        self.sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def before(self, schedule: Schedule, action: Action) -> None:
        """Wait for what an action needs of all ranks."""
        last, source = schedule.stages - 1, schedule.place[-1]
        if action.kind is Kind.S and dist.get_rank() != source:
            dist.recv(torch.zeros(MESSAGE), source, group=self.groups[Kind.F])
        elif action.kind is Kind.T or (action.kind in (Kind.B, Kind.I) and action.stage == last):
            kind = Kind.T if action.kind is not Kind.T and schedule.barriers == 2 else Kind.S
            work = self.begun.get((kind, action.microbatch))
            if work is not None:
                work.wait()

    def after(self, schedule: Schedule, action: Action) -> None:
        """Begin what other ranks need of an action."""
        if action.kind is Kind.F and action.stage == schedule.stages - 1:
            others = (rank for rank in range(schedule.ranks) if rank != schedule.place[-1])
            value = torch.zeros(MESSAGE)  # to each by itself, as programs send it: a broadcast goes by way of others
            self.sent += [(dist.isend(value, rank, group=self.groups[Kind.F]), value) for rank in others]
        elif action.kind in (Kind.S, Kind.T):
            work = dist.all_reduce(torch.zeros(MESSAGE), group=self.groups[action.kind], async_op=True)
            self.begun[action.kind, action.microbatch] = work


class Player:
    """Plays one rank's row of a lowered schedule."""

    def __init__(
        self, scheduled: Scheduled, transport: ProcessTransport, seconds: dict[Action, float], meetings: Meetings
    ) -> None:
        self.schedule, self.row = scheduled.schedule, scheduled.table[transport.rank]
        self.transport, self.seconds = transport, seconds
        self.everyone = tuple(range(transport.size))
        self.meetings = meetings if self.schedule.barriers else None

    def play(self) -> float:
        """Run the row; seconds from the common start to this rank's end."""
        self.transport.barrier()
        start = time.perf_counter()
        arrived: dict[Action, Pending[torch.Tensor]] = {}
        for action in self.row:
            match action.kind:
                case Kind.SEND:
                    self.transport.send(torch.zeros(MESSAGE), self.peer(action))
                case Kind.RECV:
                    arrived[action] = self.transport.begin_recv(MESSAGE, torch.float32, self.peer(action))
                case _:
                    for need in [recv for recv in arrived if feeds(recv, action)]:
                        arrived.pop(need).wait()
                    if self.meetings is not None:
                        self.meetings.before(self.schedule, action)
                    time.sleep(self.seconds[action])
                    if self.meetings is not None:
                        self.meetings.after(self.schedule, action)
        self.transport.flush()
        return time.perf_counter() - start

    def peer(self, action: Action) -> int:
        """The rank at the other end of a transfer."""
        return self.schedule.places[action.pipe][action.peer]


def feeds(receive: Action, action: Action) -> bool:
    """Whether an action needs what a receive brings: activations its F, gradients its B or I."""
    kinds = (Kind.F,) if receive.peer < receive.stage else (Kind.B, Kind.I)
    return any(
        part.kind in kinds
        and (part.stage, part.microbatch, part.slice, part.pipe)
        == (receive.stage, receive.microbatch, receive.slice, receive.pipe)
        for part in action.parts
    )


def measure(names: Sequence[str], cost: float, rounds: int) -> None:
    """Every schedule on the processes of this world; rank 0 hands on the times."""
    dist.init_process_group("gloo")
    transport = join("cpu")
    transport.prepare([tuple(range(transport.size))])
    meetings = Meetings()
    found: dict[str, tuple[float, list[float], int]] = {}
    for name in names:
        schedule = built(name, transport.size)
        if schedule is None:
            continue
        timeline = schedules.simulate(schedule, costs(schedule, cost))
        seconds = {span.action: span.end - span.start for span in timeline.spans}
        scheduled = schedules.lower(schedule, chain(schedule.stages))
        player = Player(scheduled, transport, seconds, meetings)
        taken = [max(transport.all_gather_object(player.play(), player.everyone)) for _ in range(rounds)]
        found[name] = (timeline.makespan, taken, schedule.microbatches)
    report(found)
    transport.barrier()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--cost", type=float, default=20.0, help="milliseconds of one stage's F, I or W")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.only.split(","), options.cost / 1000, options.rounds)
        return
    print(f"{machine()}, sleeps of {options.cost:g} ms, {options.rounds} rounds")
    print(f"{'schedule':16}{'ranks':>6}{'microbatches':>14}{'simulated s':>13}{'measured s':>12}{'longer by':>11}")
    for count in map(int, options.ranks.split(",")):
        arguments = ["--one", "--only", options.only, "--cost", str(options.cost), "--rounds", str(options.rounds)]
        for name, (simulated, taken, microbatches) in ranks(__file__, arguments, count).items():
            longer = statistics.median(taken) / simulated - 1
            verdict = "" if longer <= TARGET else "  missed"
            print(
                f"{name:16}{count:6}{microbatches:14}{simulated:13.3f}{statistics.median(taken):12.3f}"
                f"{100 * longer:10.1f}%{verdict}"
            )


if __name__ == "__main__":
    main()
