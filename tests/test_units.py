"""units: with the batch in units of the axis's places, data parallelism is found like any other split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopart.cluster import Cluster
from autopart.ir.graph import Size
from autopart.ir.placement import Shard
from autopart.passes.consistent import faults
from autopart.passes.units import in_units
from autopart.solver.axis import Axis
from autopart.solver.place import place
from tests.tensor_cases import run, steps

CHEAP = Cluster.uniform(8, 2**40, 1e8, 1e18, 1e9, 1e-8)
"""Computing takes long, messages nothing: all that can be split is."""


@pytest.mark.parametrize(("name", "degree"), [("mlp", 3), pytest.param("conv", 2, marks=pytest.mark.soak)])
def test_data_parallelism_is_found(name: str, degree: int) -> None:
    made, each, batch = steps(name)
    units = in_units(made, degree)
    found = place(units, Axis("tp", degree, CHEAP, batch // degree))
    split = []
    for step, placed in zip(each, found.segments, strict=True):
        assert faults(placed, step.segment) == ()
        given = replace(step, body=units.bodies[step.segment.body])
        assert run(placed, given, batch // degree).worst < 1e-12
        heavy = zip(placed.forward.function.nodes, placed.forward.strategies, strict=True)
        split += [s.gives[0] for node, s in heavy if "mm" in node.opname or "convolution" in node.opname]
    assert split.count(Shard(0)) > len(split) // 2


def test_without_units_no_split_depends_on_the_batch() -> None:
    made, _, batch = steps("mlp")
    found = place(made, Axis("tp", 3, CHEAP, batch))
    assert all(s.gives[0] != Shard(0) for placed in found.segments for s in placed.forward.strategies)


def test_sizes_are_counted_anew_by_keyword_too() -> None:
    """In units, and as the plain numbers that FLOPs are counted with."""
    made, _, _ = steps("mlp")
    node = replace(made.bodies[0].forward.nodes[0], kwargs=(("size", (Size(2, 1), 7)), ("alpha", 3)))
    forward = replace(made.bodies[0].forward, nodes=(node,))
    other = replace(made, bodies=(replace(made.bodies[0], forward=forward), *made.bodies[1:]))
    found = in_units(other, 3).bodies[0].forward.nodes[0]
    assert found.kwargs == (("size", (Size(6, 1), 7)), ("alpha", 3))
    plain = node.sized(lambda size: int(size.at(5)))
    assert plain.kwargs == (("size", (11, 7)), ("alpha", 3))
    assert [out.shape for out in plain.outs if out] == [out.at(5) for out in node.outs if out]


def test_sizes_and_reciprocals() -> None:
    made, _, _ = steps("mlp")
    before, after = (m.bodies[0].forward.inputs[0].shape for m in (made, in_units(made, 3)))
    assert before == (Size(1), 10) and after == (Size(3), 10)
    node = replace(made.bodies[0].forward.nodes[0], args=(Size(2, inverse=True), Size(1, 4, whole=True)))
    forward = replace(made.bodies[0].forward, nodes=(node,))
    other = replace(made, bodies=(replace(made.bodies[0], forward=forward), *made.bodies[1:]))
    one, two = in_units(other, 2).bodies[0].forward.nodes[0].args
    assert one.at(3) == node.args[0].at(6) and two.at(3) == node.args[1].at(6)
    with pytest.raises(ValueError, match="at least 1 sample"):
        in_units(made, 0)
