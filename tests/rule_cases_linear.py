"""Calls of the linear algebra and the Fourier transforms in the rule table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.rule_cases import Case, Sizes, aten


def _square(s: Sizes, n: int, *, definite: bool = False) -> torch.Tensor:
    """A stack of well-conditioned matrices."""
    made = s.normal(*s.shape(0, 2), n, n)
    return made @ made.mT + torch.eye(n, dtype=made.dtype) if definite else made + 3 * torch.eye(n, dtype=made.dtype)


def _stack(op: Any, *rest: Any, definite: bool = False) -> Case:
    return lambda s: (op, _square(s, s.size(2, 3), definite=definite), *rest)


def _right_side(s: Sizes, matrix: torch.Tensor, columns: int) -> torch.Tensor:
    return s.normal(*matrix.shape[:-1], columns)


def _solve(s: Sizes) -> tuple[Any, ...]:
    matrix, left = _square(s, 3), s.flag()
    if s.flag():  # vectors, of which torch asks for one a matrix
        return aten._linalg_solve_ex.default, matrix, s.normal(*matrix.shape[:-1])
    side = s.normal(*matrix.shape[:-2], *((3, 2) if left else (2, 3)))
    return aten._linalg_solve_ex.default, (matrix, side), {"left": left}


def _triangular(s: Sizes) -> tuple[Any, ...]:
    matrix = _square(s, 3).tril()
    right = _right_side(s, matrix, s.size())
    left = s.flag()
    return aten.linalg_solve_triangular.default, (matrix, right if left else right.mT), {"upper": False, "left": left}


def _old_triangular(s: Sizes) -> tuple[Any, ...]:
    matrix = _square(s, 3).triu()
    return aten.triangular_solve.default, _right_side(s, matrix, s.size()), matrix


def _cholesky_solve(s: Sizes) -> tuple[Any, ...]:
    matrix = torch.linalg.cholesky(_square(s, 3, definite=True))
    return aten.cholesky_solve.default, _right_side(s, matrix, s.size()), matrix


def _lu_solve(s: Sizes) -> tuple[Any, ...]:
    matrix, left = _square(s, 3), s.flag()
    factors, pivots, _ = aten.linalg_lu_factor_ex(matrix)
    side = s.normal(*matrix.shape[:-2], *((3, 2) if left else (2, 3)))
    return aten.linalg_lu_solve.default, (factors, pivots, side), {"left": left}


def _distances(backward: bool) -> Case:
    def case(s: Sizes) -> tuple[Any, ...]:
        lead, width = s.shape(0, 2), s.size()
        one, two = s.normal(*lead, s.size(), width), s.normal(*lead, s.size(), width)
        found = aten._cdist_forward(one, two, 2.0, None)
        if backward:
            return aten._cdist_backward.default, s.normal(*found.shape), one, two, 2.0, found
        return aten._cdist_forward.default, one, two, 2.0, None

    return case


def _transform(op: Any, made: Callable[[Sizes, int], torch.Tensor], last: Callable[[Sizes], tuple[Any, ...]]) -> Case:
    """A transform over the last dim, or over it and the one before it."""

    def case(s: Sizes) -> tuple[Any, ...]:
        return op, made(s, s.size()), [1, 2] if s.flag() else [2], 0, *last(s)

    return case


def _real(s: Sizes, rows: int) -> torch.Tensor:
    return s.normal(rows, 3, 4)


def _complex(s: Sizes, rows: int) -> torch.Tensor:
    return torch.complex(s.normal(rows, 3, 4), s.normal(rows, 3, 4))


def _grouped(left: str, right: str) -> Case:
    """A grouped product of operands with these dims, t in e groups; all else, and here t too, of whole 16 bytes."""

    def case(s: Sizes) -> tuple[Any, ...]:
        sizes = {"e": 2, **{loop: 4 * s.size(1, 3) for loop in "thkm"}}
        one, two = (s.normal(*(sizes[loop] for loop in dims)).float() for dims in (left, right))
        if "t" not in left + right:
            return aten._grouped_mm.default, one, two
        return aten._grouped_mm.default, one, two, torch.tensor([s.size(0, 3), sizes["t"]], dtype=torch.int32)

    return case


LINEAR: Mapping[str, Case] = {
    "_grouped_mm": _grouped("th", "ehk"),
    "_grouped_mm of the inner dim": _grouped("mt", "tk"),
    "_grouped_mm of columns": _grouped("emh", "ht"),
    "_grouped_mm of stacks": _grouped("emh", "ehk"),
    "_linalg_det": _stack(aten._linalg_det.default),
    "_linalg_slogdet": _stack(aten._linalg_slogdet.default),
    "_linalg_solve_ex": _solve,
    "_linalg_svd": lambda s: (aten._linalg_svd.default, s.normal(*s.shape(0, 2), 3, 2), s.flag(), True),
    "_linalg_svd without vectors": lambda s: (aten._linalg_svd.default, s.normal(*s.shape(1, 2), 3, 2), False, False),
    "_linalg_eigh": _stack(aten._linalg_eigh.default, definite=True),
    "linalg_inv_ex": _stack(aten.linalg_inv_ex.default),
    "linalg_cholesky_ex": _stack(aten.linalg_cholesky_ex.default, definite=True),
    "linalg_lu": _stack(aten.linalg_lu.default),
    "linalg_lu_factor_ex": _stack(aten.linalg_lu_factor_ex.default),
    "linalg_lu_solve": _lu_solve,
    "linalg_qr": lambda s: (
        aten.linalg_qr.default, s.normal(*s.shape(0, 2), 3, 2), "complete" if s.flag() else "reduced"
    ),
    "linalg_matrix_exp": _stack(aten.linalg_matrix_exp.default),
    "linalg_solve_triangular": _triangular,
    "triangular_solve": _old_triangular,
    "cholesky_solve": _cholesky_solve,
    "linalg_cross": lambda s: (
        aten.linalg_cross.default, (s.normal(s.size(), 3, 2), s.normal(1, 3, 2)), {"dim": s.size(0, 1) * 3 - 2}
    ),
    "_cdist_forward": _distances(False),
    "_cdist_backward": _distances(True),
    "_fft_r2c": _transform(aten._fft_r2c.default, _real, lambda s: (s.flag(),)),
    "_fft_c2c": _transform(aten._fft_c2c.default, _complex, lambda s: (s.flag(),)),
    "_fft_c2r": _transform(aten._fft_c2r.default, _complex, lambda s: (s.size(6, 7),)),
}  # fmt: skip
