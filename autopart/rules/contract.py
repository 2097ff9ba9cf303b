"""Matrix products: rows and columns are free, the inner dim is contracted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.rules.factor import Call, Family, Rule
from autopart.rules.loops import loops


def product(spec: str, *linear: str) -> Family:
    """A product of two operands, plus an operand that is added (in every linear set) where there is one."""
    sets: Sequence[str] = linear or ("self", "mat2")

    def family(call: Call) -> Rule:
        return loops(call, spec, linear=sets)

    return family


RULES: Mapping[str, Family] = {
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
