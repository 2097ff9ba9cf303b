"""Fourier transforms: linear; the transformed dims are blocked, all others are free."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.rules.factor import Call, Draft, Family, Rule, each, wrap


def _transform(call: Call) -> Rule:
    """Between real and complex numbers the last transformed dim changes its size."""
    shape = call.shape("self")
    over = {wrap(dim, len(shape)) for dim in call.args["dim"]}
    result = call.results[0]
    draft = Draft()
    own = draft.dims(shape, blocked=sorted(over))
    out = tuple(
        draft.new(result.shape[i], blocked=True) if i in over and result is not None else dim
        for i, dim in enumerate(own)
    )
    return draft.rule(call, {"self": own}, [out], linear=["self"])


RULES: Mapping[str, Family] = each("_fft_r2c _fft_c2c _fft_c2r", _transform)
