"""Linear algebra on stacks of matrices: leading dims are free; the matrices themselves are blocked.

Loops: m and n are the dims of a matrix, the other letters those of its factors and of right sides, whose columns c are
free where nothing else is returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Draft, Family, Rule, align, broadcast, wrap
from autopart.rules.loops import loops


def _stacked(spec: str, *linear: str) -> Family:
    """An operator on a stack of matrices."""

    def family(call: Call) -> Rule:
        return loops(call, spec, blocked="mnklpqrs", linear=linear)

    return family


def _solve(call: Call) -> Rule:
    """``AX = B`` is also for vectors: B then has one dim less than A."""
    vectors = call.ndim("B") == call.ndim("A") - 1
    columns = "n" if vectors else "nr" if call.args["left"] else "rn"
    return _stacked(f"A:*nm B:*{columns} -> *{columns}, *kl, *p, *")(call)


def _lu_solve(call: Call) -> Rule:
    columns = "nc" if call.args["left"] else "cn"
    return _stacked(f"LU:*mk pivots:*p B:*{columns} -> *{columns}", "B")(call)


def _solve_triangular(call: Call) -> Rule:
    columns = "pc" if call.args["left"] else "cp"
    return _stacked(f"self:*mn B:*{columns} -> *{columns}", "B")(call)


def _svd(call: Call) -> Rule:
    """Without vectors the other results are empty: what they have is blocked."""
    return _stacked("A:*mn -> *pk, *l, *qr" if call.args["compute_uv"] else "A:*mn -> p, *l, q")(call)


def _eigh(call: Call) -> Rule:
    return _stacked("A:*mn -> *k, *pq" if call.args["compute_v"] else "A:*mn -> *k, p")(call)


def _cross(call: Call) -> Rule:
    """The cross product of the vectors along a dim."""
    shape = broadcast([operand.value.shape for operand in call.operands])
    draft = Draft()
    out = draft.dims(shape, blocked=(wrap(call.args["dim"], len(shape)),))
    operands = {operand.slot: align(operand.value.shape, out) for operand in call.operands}
    return draft.rule(call, operands, [out], linear=["self", "other"])


def _distances_backward(call: Call) -> Rule:
    """The gradient of the first points sums over the second ones."""
    return loops(call, "grad:*rs x1:*rk x2:*sk cdist:*rs -> *rk", linear=["grad"])


def _distances(call: Call) -> Rule:
    return loops(call, "x1:*rk x2:*sk -> *rs", blocked="k")


RULES: Mapping[str, Family] = {
    "_linalg_det": _stacked("A:*mn -> *, *kl, *p"),
    "_linalg_slogdet": _stacked("A:*mn -> *, *, *kl, *p"),
    "_linalg_solve_ex": _solve,
    "_linalg_svd": _svd,
    "_linalg_eigh": _eigh,
    "linalg_inv_ex": _stacked("A:*mn -> *kl, *"),
    "linalg_cholesky_ex": _stacked("self:*mn -> *kl, *"),
    "linalg_lu": _stacked("A:*mn -> *pq, *rk, *ls"),
    "linalg_lu_factor_ex": _stacked("A:*mn -> *kl, *p, *"),
    "linalg_lu_solve": _lu_solve,
    "linalg_qr": _stacked("A:*mn -> *pk, *lq"),
    "linalg_matrix_exp": _stacked("self:*mn -> *kl"),
    "linalg_solve_triangular": _solve_triangular,
    "triangular_solve": _stacked("self:*pq A:*mn -> *pq, *mn"),
    "cholesky_solve": _stacked("self:*pc input2:*mn -> *pc", "self"),
    "linalg_cross": _cross,
    "_cdist_forward": _distances,
    "_cdist_backward": _distances_backward,
}
