"""autopart's step beside what a person would write by hand: eager, DistributedDataParallel, FSDP2, torch's pipelining.

    python benchmarks/peers.py [--rounds 20] [--only one,pp,interleaved,interleaved-zb,zb-v,dp,fsdp] [--width 384,128]

A GPT of 8 blocks (vocabulary 4000, sequence 128, batch 16), in float32, one optimizer step with AdamW a round. Both
sides of a row train equal models on equal data, in processes of their own, and take turns, so whatever else the machine
does meets both alike; the ratio is taken round by round. Processes have one thread each. A target of x is met when the
ratio's interval reaches down to x and its median is at most x + 0.03. Memory is counted at the allocator.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import ROOT, alternate, bootstrap, held_and_peak, machine, ranks, ratios, report, taking_turns, turns

sys.path.insert(0, str(ROOT / "examples"))

BATCH, SEQUENCE, VOCABULARY, BLOCKS = 16, 128, 4000, 8
MICROBATCHES = 8
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: on how many processes, against what, and the target of the ratio by width."""

    peer: str
    processes: int
    targets: dict[int, float]


ROWS = {
    "one": Row("eager", 1, {384: 1.03}),
    "pp": Row("torch pipelining 1F1B", 2, {384: 0.95}),
    "interleaved": Row("torch interleaved 1F1B", 2, {384: 1.00}),
    "interleaved-zb": Row("torch interleaved ZB", 2, {384: 1.00}),
    "zb-v": Row("torch ZB-V", 2, {384: 1.00}),
    "dp": Row("DDP", 2, {384: 1.00, 128: 1.00}),
    "fsdp": Row("FSDP2", 2, {384: 0.95, 128: 0.60}),
}


def model_of(width: int) -> Any:
    """The model, the same on every rank and side."""
    from gpt import GPT, Config

    torch.manual_seed(0)
    return GPT(
        Config(layers=BLOCKS, width=width, heads=6 if width % 6 == 0 else 4, context=SEQUENCE, vocabulary=VOCABULARY)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch: tokens and targets."""
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)), torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))


def loop(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> Step:
    """One training step of an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = model(ids, targets)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ours(width: int, pins: dict[str, Any]) -> Step:
    """autopart's side: every rank passes the whole batch."""
    import autopart

    return loop(autopart.parallelize(model_of(width), capture="direct", **pins), *data())


def own_half() -> tuple[torch.Tensor, torch.Tensor]:
    """A data rank's samples."""
    ids, targets = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in data())
    return ids.contiguous(), targets.contiguous()


def ddp(width: int) -> Step:
    """DistributedDataParallel's side."""
    from torch.nn.parallel import DistributedDataParallel

    return loop(DistributedDataParallel(model_of(width)), *own_half())


def fsdp2(width: int) -> Step:
    """FSDP2's side: a unit a block and one for the rest, as its tutorial has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, *own_half())


class Piece(torch.nn.Module):
    """Some blocks of the GPT, for torch's pipelining: tokens or activations in."""

    def __init__(self, model: Any, number: int, count: int) -> None:
        super().__init__()
        size = BLOCKS // count
        self.first, self.last = number == 0, number == count - 1
        self.blocks = model.blocks[number * size : (number + 1) * size]
        if self.first:
            self.token, self.position = model.token, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The piece's part of the forward."""
        if self.first:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def pipelining(kind: str, places: tuple[int, ...]) -> Callable[[int], Step]:
    """torch.distributed.pipelining's side: a schedule of it, with the stages on these ranks."""

    def made(width: int) -> Step:
        import torch.distributed.pipelining as torch_pipelining

        rank, model = dist.get_rank(), model_of(width)
        mine = [number for number, place in enumerate(places) if place == rank]
        pieces = [Piece(model, number, len(places)) for number in mine]
        stages = [
            torch_pipelining.PipelineStage(piece, number, len(places), torch.device("cpu"))
            for piece, number in zip(pieces, mine, strict=True)
        ]
        family = getattr(torch_pipelining, kind)
        one = len(stages) == 1
        schedule = family(stages[0] if one else stages, MICROBATCHES, loss_fn=loss_of)
        optimizer = torch.optim.AdamW([p for piece in pieces for p in piece.parameters()], lr=1e-4)
        ids, targets = data()
        last = places[-1] == rank

        def step() -> float:
            losses: list[torch.Tensor] = []
            schedule.step(*([ids] if 0 in mine else []), **({"target": targets, "losses": losses} if last else {}))
            optimizer.step()
            optimizer.zero_grad()
            return float(torch.stack(losses).mean().detach()) if losses else 0.0

        return step

    return made


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a microbatch."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


SIDES: dict[str, tuple[dict[str, Any], Callable[[int], Step]]] = {
    "one": ({"devices": 1, "microbatches": 1}, lambda width: loop(model_of(width), *data())),
    "pp": ({"mesh": {"pp": 2}, "microbatches": MICROBATCHES, "schedule": "1f1b"}, pipelining("Schedule1F1B", (0, 1))),
    "interleaved": (
        {"mesh": {"pp": 2}, "microbatches": MICROBATCHES, "schedule": "interleaved"},
        pipelining("ScheduleInterleaved1F1B", (0, 1, 0, 1)),
    ),
    "interleaved-zb": (
        {"mesh": {"pp": 2}, "microbatches": MICROBATCHES, "schedule": "interleaved-zb"},
        pipelining("ScheduleInterleavedZeroBubble", (0, 1, 0, 1)),
    ),
    "zb-v": (
        {"mesh": {"pp": 2}, "microbatches": MICROBATCHES, "schedule": "zb-v"},
        pipelining("ScheduleZBVZeroBubble", (0, 1, 1, 0)),
    ),
    "dp": ({"mesh": {"dp": 2}, "microbatches": 1, "placement": "ddp"}, ddp),
    "fsdp": ({"mesh": {"dp": 2}, "microbatches": 1, "placement": "fsdp"}, fsdp2),
}


def measure(name: str, side: str, width: int) -> None:
    """A side of a row on the processes of this world; rank 0 hands on what it found."""
    if ROWS[name].processes > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pins, peer = SIDES[name]
    made = {"peer": peer, "autopart": lambda width: ours(width, pins), "ddp": lambda width: ours(width, SIDES["dp"][0])}
    made[side](64)()  # what is loaded and cached once a process does not count
    held: list[int] = []
    steps: list[Step] = []

    def first() -> None:
        steps.append(made[side](width))
        steps[0]()

    def start() -> Step:
        """After the first step, with what it then holds: parameters, gradients' buckets, optimizer states."""
        held.append(held_and_peak(first)[0])
        return steps[0]

    def meet() -> None:
        if dist.is_initialized():
            dist.barrier()

    found = turns(start, meet)
    report({"seconds": found, "held": held[0], "peak": held[0] + held_and_peak(steps[0])[1]})
    meet()


def threads(width: int, rounds: int) -> None:
    """One eager process with the threads of this environment."""
    step = loop(model_of(width), *data())
    report({"seconds": alternate({"eager": step}, rounds)})


def show(name: str, width: int, found: dict[str, Any]) -> str:
    """A row of the table."""
    row, seconds = ROWS[name], {side: each["seconds"] for side, each in found.items()}
    ratio, target = ratios(seconds, "autopart", "peer"), row.targets.get(width)
    verdict = "" if target is None else f"{target:.2f} {'met' if ratio.meets(target) else 'missed'}"
    held, peak = (found["autopart"][what] / found["peer"][what] for what in ("held", "peak"))
    memory = f"{held:.3f} / {peak:.3f}"
    ms = (f"{1000 * bootstrap(seconds[side]).median:7.0f}" for side in ("autopart", "peer"))
    return f"{name:15}{width:6}  {row.peer:22}{'  '.join(ms)}  {ratio!s:>22}  {verdict:>12}  {memory:>15}"


def run_row(name: str, width: int, rounds: int) -> str:
    """Measure one row, each side in processes of its own; what went wrong, if it did, stands in its place."""
    sides = ["peer", "autopart", *["ddp"] * (name == "fsdp")]
    arguments = {side: ["--one", name, "--side", side, "--width", str(width)] for side in sides}
    try:
        found = taking_turns(__file__, arguments, ROWS[name].processes, rounds)
    except (RuntimeError, TimeoutError) as error:
        return f"{name:15}{width:6}  failed: {error}"
    lines = [show(name, width, found)]
    if "ddp" in found:
        saved = (found["ddp"]["held"] - found["autopart"]["held"]) / 1e6
        lines.append(f"{'':21}  fsdp holds {saved:.0f} MB less than ddp between steps")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(ROWS), help="some of the rows, separated by commas")
    parser.add_argument("--width", default="384,128")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    widths = [int(width) for width in options.width.split(",")]
    if options.one == "threads":
        threads(widths[0], options.rounds)
        return
    if options.one:
        measure(options.one, options.side, widths[0])
        return
    names = options.only.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"--only: no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    print(f"{machine()}, {options.rounds} rounds")
    print(
        "row              width  peer                  autopart ms  peer ms     ratio [interval]        target "
        " held / peak"
    )
    for width in widths:
        for count in (1, 2):
            if count <= (os.cpu_count() or 1):
                arguments = ["--one", "threads", "--width", str(width), "--rounds", str(options.rounds)]
                seconds = ranks(__file__, arguments, 1, threads=count)["seconds"]["eager"]
                milliseconds = 1000 * bootstrap(seconds).median
                print(f"{'':15}{width:6}  one eager process, {count} thread{'s' * (count > 1)}: {milliseconds:.0f} ms")
        for name in names:
            print(run_row(name, width, options.rounds), flush=True)


if __name__ == "__main__":
    main()
