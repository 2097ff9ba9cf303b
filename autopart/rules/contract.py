"""Matrix products: rows and columns are free, the inner dim is contracted; groups of rows, or of the inner dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.ir.graph import Dim
from autopart.rules.factor import Call, Family, Rule, common
from autopart.rules.loops import loops


def product(spec: str, *linear: str) -> Family:
    """A product of two operands, plus an operand that is added (in every linear set) where there is one."""
    sets: Sequence[str] = linear or ("self", "mat2")

    def family(call: Call) -> Rule:
        return loops(call, spec, linear=sets)

    return family


GROUPED: Mapping[tuple[int, int], tuple[str, str, tuple[int, ...], tuple[int, ...]]] = {
    (2, 3): ("self:t(hx) mat2:e(hx)(kx) offs:e -> t(kx)", "tex", (1,), (1, 2)),
    (2, 2): ("self:(mx)t mat2:t(nx) offs:e -> e(mx)(nx)", "tex", (0,), (1,)),
    (3, 2): ("self:e(mx)(hx) mat2:(hx)t offs:e -> (mx)t", "tex", (1, 2), (0,)),
    (3, 3): ("self:e(mx)(hx) mat2:e(hx)(kx) -> e(mx)(kx)", "x", (1, 2), (1, 2)),
}
"""Grouped products by the dims of the two operands: the loops, which are whole, and the dims that are not grouped.

Rows t come in the order of their groups e, each of which has a matrix of its own; `offs` says where each group ends.
"""


def _grouped(call: Call) -> Rule:
    """Kernels take rows of whole 16 bytes, so what is not grouped is split between runs of as many (x) alone."""
    spec, whole, left, right = GROUPED[call.ndim("self"), call.ndim("mat2")]
    inner = [*(call.shape("self")[i] for i in left), *(call.shape("mat2")[i] for i in right)]
    lanes: Dim = 16 // call.operands[0].value.dtype.itemsize
    for size in inner:
        lanes = common(lanes, size)
    return loops(call, spec, blocked=whole, known={"x": lanes}, linear=("self", "mat2"), ends={"t": "offs"})


RULES: Mapping[str, Family] = {
    "_grouped_mm": _grouped,
    "mm": product("self:mk mat2:kn -> mn"),
    "bmm": product("self:bmk mat2:bkn -> bmn"),
    "mv": product("self:mk vec:k -> m", "self", "vec"),
    "dot": product("self:k tensor:k ->", "self", "tensor"),
    "vdot": product("self:k other:k ->", "self", "other"),
    "addmm": product("self:mn mat1:mk mat2:kn -> mn", "self mat1", "self mat2"),
    "addmv": product("self:m mat:mk vec:k -> m", "self mat", "self vec"),
    "addr": product("self:mn vec1:m vec2:n -> mn", "self vec1", "self vec2"),
    "addbmm": product("self:mn batch1:bmk batch2:bkn -> mn", "self batch1", "self batch2"),
    "baddbmm": product("self:bmn batch1:bmk batch2:bkn -> bmn", "self batch1", "self batch2"),
    "linear": product("input:*k weight:nk bias:n -> *n", "input bias", "weight bias"),
}
