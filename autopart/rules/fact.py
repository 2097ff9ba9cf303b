"""What is known of how a value depends on the batch, and of the order of its rows where that is not the batch's own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopart.ir.graph import Dim
from autopart.ir.placement import TensorPlacement


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: that of `indices`, the value by which a sort says it, by `keys`.

    Rows of equal keys are together, in ascending order of these, whole numbers; "" where the keys are of another kind.
    """

    indices: str
    keys: str = ""


@dataclass(frozen=True, slots=True)
class Picks:
    """Numbers that say of each row of a value which of `rows` rows is meant, counted from 0 in the microbatch at hand.

    Those rows lie in this `order` (see `Fact`). `once`: each of them is meant once; `own`: the j-th row
    means the j-th, as ``arange`` has it.
    """

    rows: Dim
    order: Order | None = None
    once: bool = True
    own: bool = False


class Of(Enum):
    """What a value has to do with groups of rows."""

    KEYS = "the keys by which rows were sorted, ascending"
    COUNTS = "how many rows each group has"
    ENDS = "where each group of rows ends"


@dataclass(frozen=True, slots=True)
class Groups:
    """That a value is something `of` the groups which rows form that are sorted by `keys`."""

    of: Of
    keys: str


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a value.

    `free`: no parameter, tangent or random number enters it; `zero`: it is all zero; `uniform`: all its samples are
    alike; `picks`: it says which rows of the microbatch are meant, and may only be used to pick those; `order`: that of
    its rows, None for that of the batch; `groups`: what it has to do with groups of sorted rows; `whole`: the value
    whose whole numbers, one a row, it has.
    """

    place: TensorPlacement
    free: bool
    zero: bool = False
    uniform: bool = False
    picks: Picks | None = None
    order: Order | None = None
    groups: Groups | None = None
    whole: str = ""

    def named(self) -> frozenset[str]:
        """The values that it speaks of: no two sorts, say, give the same order."""
        keys = self.groups.keys if self.groups is not None else ""
        return frozenset({keys, self.whole, *((self.order.indices, self.order.keys) if self.order is not None else ())})
