"""The demo: a byte-level GPT trained on several processes of this machine, beside the same model on one.

The launcher (`run`) starts one process a rank through torchrun; each trains by `train_rank` and leaves its numbers in
the output folder, which the launcher reads. The model file defines ``GPT``, ``Config``, ``batches`` and ``generate`` as
examples/gpt.py does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from autopart.errors import RankFailure
from autopart.ir.mesh import Sizes

if TYPE_CHECKING:
    from rich.console import Console

SPARKS = "▁▂▃▄▅▆▇█"
REPORTED = ("bytes_sent", "predicted_bytes", "peak_memory", "predicted_memory")
"""The fields of a rank's report that are shown."""

GRACE = 15.0
"""Seconds that torchrun has to end its workers before it is killed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the demo trains and how; `None` leaves the choice to autopart."""

    model: str
    out: str
    nproc: int
    steps: int
    batch: int
    mesh: Sizes | None
    placement: str | None
    schedule: str | None
    microbatches: int | None
    lr: float = 3e-3
    seed: int = 0

    def pins(self) -> dict[str, Any]:
        """The keyword arguments for `autopart.parallelize`."""
        chosen = {
            "mesh": self.mesh,
            "placement": self.placement,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
        }
        return {name: value for name, value in chosen.items() if value is not None}


def default_model() -> Path:
    """examples/gpt.py of the checkout that this package runs from.

    Raises:
        ValueError: the package was installed without its checkout.
    """
    path = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
    if not path.is_file():
        raise ValueError(
            f"model: {path} does not exist, as the package was installed without its examples; pass --model FILE"
        )
    return path


def load_file(path: str | Path) -> ModuleType:
    """The Python file at `path`, imported under its stem.

    Raises:
        ValueError: there is no Python file there.
    """
    path = Path(path).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{path} is not a Python file, or does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def train(model: Any, example: ModuleType, settings: Settings) -> Iterator[float]:
    """The loss of each step of an ordinary training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    data = example.batches(settings.batch, model.config.context, settings.seed)
    for ids, targets in itertools.islice(data, settings.steps):
        loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_rank(settings: Settings) -> None:
    """What each rank does. Rank 0 also writes losses, plan, weights and all ranks' sources; every rank its report."""
    import autopart

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.nproc))
    rank, out = int(os.environ["RANK"]), Path(settings.out)
    example = load_file(settings.model)
    torch.manual_seed(settings.seed)
    # In float64 the two runs stay together: in float32, another order of sums drives any two runs apart in time.
    plain = example.GPT(example.Config()).double()
    model: Any = autopart.parallelize(plain, devices=settings.nproc, **settings.pins())
    with (out / "losses.txt").open("w") if rank == 0 else contextlib.nullcontext() as losses:
        for loss in train(model, example, settings):
            if losses is not None:
                print(loss, file=losses, flush=True)
    report = model.report()
    numbers = {name: getattr(report, name) for name in REPORTED}
    (out / f"report{rank}.json").write_text(json.dumps(numbers))
    weights = model.full_state_dict()
    if rank == 0:
        torch.save(weights, out / "weights.pt")
        (out / "plan.txt").write_text(model.plan.summary())
        model.program.write(out / "program")
    torch.distributed.destroy_process_group()


def end_with(launcher: int) -> None:
    """End this process soon after the launcher or torchrun has gone, even if they were killed outright."""
    parent = os.getppid()

    def look() -> None:
        with contextlib.suppress(ProcessLookupError):
            while os.getppid() == parent:
                os.kill(launcher, 0)
                time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def rank_main(path: Path) -> None:
    """The entry of a rank's process: train by the settings in the file; leave an error's message for the launcher."""
    settings = json.loads(path.read_text())
    end_with(settings.pop("launcher"))
    try:
        train_rank(Settings(**settings))
    except Exception as error:
        (path.parent / f"error{os.environ['RANK']}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def ranks(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """The ranks as processes under torchrun, their output in log.txt. However the block is left, none remains."""
    out = Path(settings.out)
    (out / "settings.json").write_text(json.dumps({**asdict(settings), "launcher": os.getpid()}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.nproc)]
    command += ["-m", "autopart.demo", str(out / "settings.json")]
    # A session of its own, so that a Ctrl-C reaches torchrun once, from here, and not half its workers first.
    with (out / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def watch(process: subprocess.Popen[bytes], path: Path, tick: Callable[[int], None]) -> list[float]:
    """Call `tick` with the number of losses that rank 0 has written, until the ranks end; then the losses.

    Raises:
        RankFailure: a rank failed; the message is that of the first one that did.
    """
    while process.poll() is None:
        if path.exists():
            tick(path.read_text().count("\n"))
        time.sleep(0.1)
    if process.returncode != 0:
        failures = sorted(path.parent.glob("error*.txt"), key=lambda file: file.stat().st_mtime_ns)
        cause = failures[0].read_text() if failures else f"the ranks ended with status {process.returncode}"
        raise RankFailure(f"{cause}\nall that the ranks printed is in {path.parent / 'log.txt'}")
    return [float(line) for line in path.read_text().splitlines()]


def sparkline(values: list[float], width: int = 60) -> str:
    """A line of at most `width` bars, each as high as the mean of its stretch of `values`."""
    width = min(width, len(values))
    cuts = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[round((mean - low) / span * (len(SPARKS) - 1))] for mean in means)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest ``|a - b| / |b|`` over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def show(console: Console, settings: Settings, losses: list[float], reference: list[float], text: str) -> None:
    """Print the plan, bytes and memory, both loss curves, the sample of text and where the sources are."""
    from rich.table import Table

    out = Path(settings.out)
    console.rule("plan")
    console.print((out / "plan.txt").read_text(), markup=False, highlight=False)
    console.rule("predicted and measured")
    table = Table(
        "rank", "bytes sent, predicted", "bytes sent, measured", "peak bytes, predicted", "peak bytes, measured"
    )
    for rank in range(settings.nproc):
        report = json.loads((out / f"report{rank}.json").read_text())
        sent = [sum(report[name].values()) for name in ("predicted_bytes", "bytes_sent")]
        row = [*sent, report["predicted_memory"], report["peak_memory"]]
        table.add_row(str(rank), *(f"{number:,}" for number in row))
    console.print(table)
    console.rule("loss")
    table = Table("step", f"{settings.nproc} ranks", "1 process", "relative difference")
    for step in sorted({round(i * (len(losses) - 1) / 8) for i in range(9)}):
        a, b = losses[step], reference[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(b):.1e}")
    console.print(table)
    console.print(f"{settings.nproc} ranks   {sparkline(losses)}\n1 process {sparkline(reference)}", highlight=False)
    console.print(f"largest relative difference over {len(losses)} steps: {largest_difference(losses, reference):.1e}")
    console.rule("text by the trained model")
    console.print(text, markup=False, highlight=False)
    console.rule("sources")
    console.print(f"what each rank ran, as Python: {out / 'program'}", highlight=False)


def run(settings: Settings) -> None:
    """Train on the ranks, then on one process, and show both.

    Raises:
        RankFailure: a rank failed.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console, out, example = Console(), Path(settings.out), load_file(settings.model)
    out.mkdir(parents=True, exist_ok=True)
    for stale in (out / "losses.txt", *out.glob("error*.txt"), *out.glob("report*.json")):
        stale.unlink(missing_ok=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with interruptible(), Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{settings.nproc} ranks", total=settings.steps)
        with ranks(settings) as process:
            losses = watch(process, out / "losses.txt", lambda done: progress.update(bar, completed=done))
        progress.update(bar, completed=len(losses))
        torch.manual_seed(settings.seed)
        model = example.GPT(example.Config()).double()
        bar, reference = progress.add_task("1 process", total=settings.steps), []
        for loss in train(model, example, settings):
            reference.append(loss)
            progress.advance(bar)
    model.load_state_dict(torch.load(out / "weights.pt"))
    show(console, settings, losses, reference, example.generate(model.eval(), "The "))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit, so that the blocks around it clean up as they do for Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
