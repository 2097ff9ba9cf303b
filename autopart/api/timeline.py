"""`simulate`: the timeline of a plan's or a program's pipeline, predicted from what its stages cost."""

from __future__ import annotations

from collections.abc import Callable

from autopart import schedules
from autopart.api.tensor import exchanged
from autopart.cluster import Cluster
from autopart.ir.action import Action
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.passes.costs import costs
from autopart.passes.schedule import built
from autopart.schedules import Timeline
from autopart.solver.timing import action_seconds, timeline

_THIRD = 1 / 3  # of a microbatch's seconds on a stage: for each product of a forward, a backward has two gradients


def simulate(program_or_plan: Program | Plan, cluster: Cluster | None = None) -> Timeline:
    """The timeline of one step's forwards and backwards, in seconds; collectives of the data axis are not in it.

    Of a Program, each stage's forward and backward (of each slice of the sequence) are timed by the roofline of
    `solver.timing` on the `cluster` (by default CPUs), at the plan's largest microbatch, and an edge takes its bytes
    over a link. So are the halves of a backward that is in two. Of a Plan alone a forward is a third of the seconds
    that it predicts, as is each half of a backward (of the first stage's, W is all), and edges take no time. Raises
    ValueError for a cluster with a Plan, which has the costs of one cluster only, or one with too few devices;
    TypeError for anything else.
    """
    if isinstance(program_or_plan, Plan):
        return _of_plan(program_or_plan, cluster)
    if not isinstance(program_or_plan, Program):
        raise TypeError(f"simulate: expected a Program or a Plan, not {type(program_or_plan).__name__}")
    plan, staged = program_or_plan.plan, program_or_plan.staged
    if cluster is not None and cluster.devices < plan.mesh.size:
        raise ValueError(f"cluster: {cluster.devices} devices are too few for the mesh {plan.mesh}")
    cluster = cluster or Cluster.preset("cpu", per_node=plan.mesh.size)
    exchange = None if plan.tensor is None else exchanged(plan.tensor)
    numbers = {cost.name: cost.at(plan.largest) for cost in costs(staged.segmented, exchange)}
    stages = [[numbers[segment.name] for segment in stage] for stage in staged.stages[: staged.depth]]
    seconds = [action_seconds(stage, cluster, first=False) for stage in stages]  # the graph knows which I is empty
    behind = iter(staged.stages[staged.depth :])
    for first, second, count in (("S", "T", staged.parts), ("E", "D", staged.lookups)):
        for own, row in zip(seconds[:count], behind, strict=False):
            part = action_seconds([numbers[segment.name] for segment in row], cluster, first=False)
            own |= {first: part["F"], second: part["B"]}
    width = staged.width
    crossing = [e for e in staged.edges if staged.slices == 1 or e.source % width != e.target % width]
    edge = max((edge.nbytes(plan.largest) for edge in crossing), default=0)
    delay = cluster.link_latency + edge / cluster.link_bandwidth if edge else 0.0

    def taking(kind: str) -> Callable[[Action], float]:
        return lambda action: seconds[action.slice * width + action.stage][kind]

    schedule = built(plan, training=program_or_plan.captured.training)
    return schedules.simulate(schedule, {kind: taking(kind) for kind in seconds[0]}, delay)


def _of_plan(plan: Plan, cluster: Cluster | None) -> Timeline:
    if cluster is not None:
        raise ValueError("cluster: a plan has the seconds of the cluster that it was made for; simulate a program")
    seconds = plan.prediction.stage_seconds
    inner = {"F": _THIRD, "B": 2 * _THIRD, "I": _THIRD, "W": _THIRD, **dict.fromkeys("STED", 0.0)}
    first = {**inner, "I": 0.0, "W": inner["B"]}
    parts = [inner if stage else first for stage in range(len(seconds))]
    shares = [{kind: each * part[kind] for kind in part} for each, part in zip(seconds, parts, strict=True)]
    return timeline(built(plan), shares)
