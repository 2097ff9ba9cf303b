"""Published training runs in the planner's model: what it predicts of their layouts, and what it would do itself.

    python benchmarks/published.py [--only 1.7B 39B 22B-frontier llama ...] [--quick]

Nothing is run and no weights are in memory: modules are on the meta device. Of every run: the step predicted for its
mesh, microbatch, schedule and recomputation, pinned; the published FLOP/s over the predicted ones; beside it the
fastest plan of ours for the same devices and batch, at most as long, and which single change of theirs comes how near
to it. A run is a matter of minutes for the largest models; `--only` picks some, `--quick` leaves the single changes
out.

The runs:

* "Megatron": Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (2021),
  Table 1, on nodes of 8 A100; microbatches and chunks are those of Megatron-LM's `examples/sc21/run_table_1.sh`.
  Attention there is not one kernel, every layer is recomputed. FLOPs by its equation 3, which counts that; here the
  last product of a layer is not, as no backward needs its result, which is a twelfth of these FLOPs.
* "Frontier": Dash et al., Optimizing Distributed Training on Frontier for Large Language Models (2023): 38.38, 36.14
  and 31.96% of the peak of a die of an MI250X, 8 to a node; with flash attention, ZeRO-1 and every layer recomputed,
  FLOPs by the same equation. As far as known to us, the recipes are (t, p) = (4, 16) and (8, 64) with microbatches of
  1, and 640 and 1600 samples for each replica; of 22B it is not: the fastest on a node is taken.
* "Llama": Hagemann et al., Efficient Parallelization Layouts for Large-Scale Distributed Model Training (2023):
  Llama-13B with 128,000 words on 64 A100, 2048 samples of 2048 tokens, ZeRO-1: 70.5% of the peak at best, with
  microbatches of 1 and nothing recomputed; FLOPs 6 a parameter and token, 12 l h s for attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from planner import Shape, sample

import autopart
from autopart.api import compiler
from autopart.capture import read
from autopart.ir.captured import Captured
from autopart.ir.plan import Plan

WORDS, LENGTH = 51200, 2048


@dataclass(frozen=True)
class Run:
    """A published run: its model, its devices and how it used them, and what it reached."""

    name: str
    shape: Shape
    devices: int
    batch: int
    tensor: int
    pipeline: int
    microbatch: int
    teraflops: float  # per device and second
    chunks: int = 1  # stages a pipeline rank
    placement: str = "ddp"
    device: str = "a100-80"

    @property
    def data(self) -> int:
        """The data degree."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def microbatches(self) -> int:
        """Those of each data rank."""
        return self.batch // (self.data * self.microbatch)

    @property
    def cluster(self) -> autopart.Cluster:
        """Its devices, 8 to a node."""
        return autopart.Cluster.preset(self.device, nodes=-(-self.devices // 8), per_node=min(8, self.devices))


def gpt(layers: int, width: int, heads: int, *, fused: bool = False) -> Shape:
    """A GPT as Megatron has it, its output layer tied to the embedding."""
    return Shape(layers, width, heads, 4 * width, WORDS, LENGTH, fused=fused, tied=True)


MEGATRON = (
    Run("1.7B", gpt(24, 2304, 24), 32, 512, 1, 1, 16, 137),
    Run("3.6B", gpt(30, 3072, 32), 64, 512, 2, 1, 16, 138),
    Run("7.5B", gpt(36, 4096, 32), 128, 512, 4, 1, 16, 142),
    Run("18B", gpt(40, 6144, 48), 256, 1024, 8, 1, 8, 135),
    Run("39B", gpt(48, 8192, 64), 512, 1536, 8, 2, 4, 138),
    Run("76B", gpt(60, 10240, 80), 1024, 1792, 8, 4, 2, 140, chunks=3),
    Run("145B", gpt(80, 12288, 96), 1536, 2304, 8, 8, 2, 148, chunks=2),
    Run("310B", gpt(96, 16384, 128), 1920, 2160, 8, 16, 1, 155, chunks=2),
    Run("530B", gpt(105, 20480, 128), 2520, 2520, 8, 35, 1, 163, chunks=3),
    Run("1T", gpt(128, 25600, 160), 3072, 3072, 8, 64, 1, 163),
)
"""In the paper's order, the parameters in billions: 1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0."""

DIE = 191.5
"""The peak of a die of an MI250X in TFLOP/s."""

FRONTIER = (
    Run("22B-frontier", gpt(48, 6144, 48, fused=True), 8, 640, 8, 1, 1, 0.3838 * DIE, 1, "zero1", "mi250x"),
    Run("175B-frontier", gpt(96, 12288, 96, fused=True), 1024, 16 * 640, 4, 16, 1, 0.3614 * DIE, 1, "zero1", "mi250x"),
    Run("1T-frontier", gpt(128, 25600, 128, fused=True), 3072, 6 * 1600, 8, 64, 1, 0.3196 * DIE, 1, "zero1", "mi250x"),
)

LLAMA = Shape(40, 5120, 40, 13824, 128000, LENGTH, groups=40)
LLAMA_DEVICES, LLAMA_BATCH, LLAMA_UTILISATION = 64, 2048, 0.705
A100, A100_MEMORY = 312e12, "79GiB"
"""The peak of an A100, and what CUDA leaves of its 80 GiB."""


def parameters(shape: Shape) -> float:
    """Equation 2 of Narayanan et al.: the parameters of a GPT."""
    layers, width = shape.layers, shape.width
    rest = 13 / (12 * width) + (shape.vocabulary + shape.length) / (12 * layers * width)
    return 12 * layers * width**2 * (1 + rest)


def flops(shape: Shape, batch: int) -> float:
    """Equation 3 of Narayanan et al.: the FLOPs of a step whose layers are all recomputed, products alone."""
    layers, width, length = shape.layers, shape.width, shape.length
    rest = length / (6 * width) + shape.vocabulary / (16 * layers * width)
    return 96 * batch * length * layers * width**2 * (1 + rest)


def model_flops(shape: Shape, batch: int) -> float:
    """The FLOPs of a step of a Llama without recomputation: 6 a parameter and token, and those of attention."""
    products = 4 * shape.width**2 + 3 * shape.width * shape.inner
    count = shape.layers * products + 2 * shape.vocabulary * shape.width
    return batch * shape.length * (6 * count + 12 * shape.layers * shape.width * shape.length)


def captured(shape: Shape, batch: int) -> Captured:
    """One step of a model, captured once for all its plans."""
    module, args = sample(shape, batch)
    return compiler.captured_step(module, read(module, args), None, False, "compile")


def mesh(tensor: int, pipeline: int, devices: int) -> dict[str, int]:
    """A mesh as Megatron's, the tensor axis within a node."""
    sizes = {"pp": pipeline, "dp": devices // (tensor * pipeline)}
    return {**sizes, "tp": tensor} if tensor > 1 else sizes


def theirs(run: Run) -> dict[str, Any]:
    """The pins of a published run: all that a plan decides, but how tensors lie on the tensor axis."""
    layers, stages = run.shape.layers, run.pipeline * run.chunks
    each = layers // stages
    return {
        "mesh": mesh(run.tensor, run.pipeline, run.devices),
        "microbatches": run.microbatches,
        "placement": run.placement,
        "schedule": "1f1b" if run.chunks == 1 else f"interleaved(chunks={run.chunks})",
        "stages": [f"blocks.{first}" for first in range(each, layers, each)] or None,
        "recompute": [f"blocks.{layer}" for layer in range(layers)],
    }


def attempts(run: Run) -> Iterator[dict[str, Any]]:
    """What we ask the planner for: anything at all; their mesh, also with half the stages; their mesh and schedule."""
    yield {}
    for stages in dict.fromkeys((run.pipeline, max(1, run.pipeline // 2))):
        yield {"mesh": mesh(run.tensor, stages, run.devices)}
    yield {each: theirs(run)[each] for each in ("mesh", "schedule", "microbatches")}


def planned(step: Captured, run: Run, pins: Mapping[str, Any]) -> Plan | None:
    """The plan of some pins, None where nothing fits or pins contradict each other."""
    try:
        return compiler.planned(step, **{"cluster": run.cluster, "precision": "mixed", **pins})
    except (autopart.PlanInfeasible, ValueError):
        return None


def changes(run: Run, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """One choice of our plan at a time, and the pins of their run with it.

    With another mesh the samples of a microbatch stay as they were; stages begin where they did, unless they cannot.
    """
    pins = theirs(run)
    sizes, rules = dict(plan.mesh.axes), dict(plan.placements)
    if {axis: size for axis, size in sizes.items() if size > 1} != {a: n for a, n in pins["mesh"].items() if n > 1}:
        count = max(1, run.batch // (plan.mesh.degree("dp") * run.microbatch))
        yield f"mesh {plan.mesh}", {**pins, "mesh": plan.mesh, "microbatches": count, "stages": None}
    if plan.schedule != pins["schedule"]:
        yield f"schedule {plan.schedule}", {**pins, "schedule": plan.schedule, "stages": None}
    if plan.largest != run.microbatch:
        count = max(1, run.batch // (run.data * plan.largest))
        yield f"microbatches of {plan.largest}", {**pins, "microbatches": count}
    if str(rules["*"]) != run.placement:
        yield f"placement {rules['*']}", {**pins, "placement": rules}
    if len(plan.recompute) < run.shape.layers:
        yield "recomputation of no more than memory asks for", {**pins, "recompute": None}
    if pins["stages"]:
        yield "stages that begin anywhere", {**pins, "stages": None}


@dataclass(frozen=True)
class Outcome:
    """What came out of a run: the plan of its pins, our plan, and the plans with one change each."""

    run: Run
    pinned: Plan
    ours: Plan
    changed: tuple[tuple[str, Plan | None], ...]

    def reached(self, plan: Plan) -> float:
        """The predicted TFLOP/s of a device, by the FLOPs that the run is counted in."""
        return flops(self.run.shape, self.run.batch) / self.run.devices / plan.prediction.step_seconds / 1e12

    @property
    def ratio(self) -> float:
        """Published over predicted."""
        return self.run.teraflops / self.reached(self.pinned)

    @property
    def choice(self) -> str:
        """The single change that shortens their step most, and by how much of the whole difference."""
        before, after = self.pinned.prediction.step_seconds, self.ours.prediction.step_seconds
        found = [(plan.prediction.step_seconds, name) for name, plan in self.changed if plan is not None]
        least, name = min(found, default=(before, ""))
        if after >= before or least >= before:
            return "none alone" if after < before else "none"
        return f"{name} ({(before - least) / (before - after):.0%} of it)"

    def __str__(self) -> str:
        """Lines to read."""
        run, ours = self.run, self.ours
        pins, after = self.pinned.prediction, ours.prediction
        lines = [
            f"{run.name}: {self.pinned.mesh}, microbatches {self.pinned.microbatches} of {run.microbatch}, "
            f"{self.pinned.schedule}, every layer recomputed",
            f"  theirs: {pins.step_seconds:.2f} s, {self.reached(self.pinned):.0f} TFLOP/s predicted, "
            f"{run.teraflops:.0f} published, ratio {self.ratio:.2f}; bubble {pins.bubble:.1%}, "
            f"{pins.peak / 1e9:.0f} GB",
            f"  ours: {after.step_seconds:.2f} s: {ours.mesh}, microbatches {ours.microbatches} of {ours.largest}, "
            f"{ours.schedule}, {ours.placements[-1][1]}, {len(ours.recompute)} of {len(ours.segments)} segments "
            f"recomputed; bubble {after.bubble:.1%}, {after.peak / 1e9:.0f} GB",
        ]
        for name, plan in self.changed:
            change = plan and plan.prediction.step_seconds / pins.step_seconds - 1
            lines.append(f"  theirs with {name}: " + ("does not fit" if change is None else f"{change:+.1%}"))
        return "\n".join(lines)

    @property
    def row(self) -> str:
        """A row of the table."""
        seconds = [plan.prediction.step_seconds for plan in (self.pinned, self.ours)]
        return (
            f"| {self.run.name} | {self.run.teraflops:.0f} | {self.reached(self.pinned):.0f} | {self.ratio:.2f} | "
            f"{seconds[0]:.2f} | {seconds[1]:.2f} | {self.choice} |"
        )


HEADER = """| run | published TFLOP/s | predicted of theirs | ratio | their step, s | ours, s | which choice |
|---|---|---|---|---|---|---|"""


def outcome(run: Run, step: Captured, *, quick: bool = False) -> Outcome:
    """Predict a run. Raises AssertionError where its own layout does not fit, or where our plan is slower."""
    pinned = planned(step, run, theirs(run))
    assert pinned is not None, f"{run.name}: what was run does not fit"
    plans = [plan for pins in attempts(run) if (plan := planned(step, run, pins)) is not None]
    ours = min((pinned, *plans), key=lambda plan: plan.prediction.step_seconds)
    asked = () if quick or ours is pinned else changes(run, ours)
    return Outcome(run, pinned, ours, tuple((name, planned(step, run, pins)) for name, pins in asked))


def on_a_node(run: Run, step: Captured) -> Run:
    """The run with the tensor and pipeline degrees that are predicted to be fastest on its devices."""
    options = [replace(run, tensor=t, pipeline=run.devices // t) for t in (1, 2, 4, 8)]
    found = [(plan.prediction.step_seconds, o) for o in options if (plan := planned(step, o, theirs(o))) is not None]
    return min(found, key=lambda each: each[0])[1]


def llama() -> None:
    """Llama-13B: the utilisation predicted for every layout that Hagemann et al. tried of these."""
    step, work = captured(LLAMA, LLAMA_BATCH), model_flops(LLAMA, LLAMA_BATCH)
    found: list[tuple[float, str]] = []
    for tensor, stages, size, again in product((1, 2), (1, 2), (1, 2, 4, 8), (False, True)):
        run = Run("llama", LLAMA, LLAMA_DEVICES, LLAMA_BATCH, tensor, stages, size, 0.0, placement="zero1")
        pins = {**theirs(run), "recompute": theirs(run)["recompute"] if again else False, "memory": A100_MEMORY}
        plan = planned(step, run, pins)
        name = f"t={tensor} p={stages} microbatches of {size}, {'every layer' if again else 'nothing'} recomputed"
        if plan is None:
            print(f"llama: {name}: does not fit", flush=True)
            continue
        used = work / LLAMA_DEVICES / plan.prediction.step_seconds / A100
        found.append((used, name))
        print(f"llama: {name}: {used:.1%} of the peak, {plan.prediction.peak / 1e9:.1f} GB", flush=True)
    used, name = max(found)
    print(
        f"llama: best is {name}: {used:.1%}; published {LLAMA_UTILISATION:.1%}, ratio {LLAMA_UTILISATION / used:.2f}\n"
    )


def main() -> None:
    """Predict and print."""
    runs = {run.name: run for run in (*MEGATRON, *FRONTIER)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*runs, "llama"), default=(*runs, "llama"))
    parser.add_argument("--quick", action="store_true", help="leave the single changes out")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        if name == "llama":
            llama()
            continue
        began, run = time.perf_counter(), runs[name]
        step = captured(run.shape, run.batch)
        capture = time.perf_counter() - began
        run = on_a_node(run, step) if run.devices == 8 else run
        found = outcome(run, step, quick=arguments.quick)
        rows.append(found.row)
        print(f"{found}\n  took {time.perf_counter() - began:.0f} s, of which capture {capture:.0f}\n", flush=True)
    if rows:
        print("\n".join((HEADER, *rows)))


if __name__ == "__main__":
    main()
