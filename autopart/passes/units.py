"""units: Segmented + m -> Segmented. The batch counted in units of m samples, so that m places divide it.

before: x: [b, 8]    view(x, [12 * b])           after: x: [2 * b, 8]    view(x, [24 * b])    b counts pairs of samples

A loop over the samples is then split like any other: data parallelism is one of an axis's strategies.
"""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.graph import Size
from autopart.ir.segmented import Body, Function, Segmented


def in_units(segmented: Segmented, samples: int) -> Segmented:
    """The same segments, whose bodies count the batch in units of `samples`; all microbatches must be whole units.

    A share of the batch (`Share`) is the same in either count. Raises ValueError for less than one sample.
    """
    if samples < 1:
        raise ValueError(f"a unit must have at least 1 sample, not {samples}")
    return replace(segmented, bodies=tuple(_body(body, samples) for body in segmented.bodies))


def _body(body: Body, samples: int) -> Body:
    backward = None if body.backward is None else _function(body.backward, samples)
    return replace(body, forward=_function(body.forward, samples), backward=backward)


def _function(function: Function, samples: int) -> Function:
    def counted(size: Size) -> Size:
        """A reciprocal of the batch falls by as much as others grow."""
        per_unit = size.per_sample / samples if size.inverse else size.per_sample * samples
        return replace(size, per_sample=per_unit)

    inputs = tuple(value.sized(counted) for value in function.inputs)
    return Function(inputs, tuple(node.sized(counted) for node in function.nodes), function.outputs)
