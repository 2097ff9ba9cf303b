"""Loss scaling on parts: all ranks agree on whether gradients are finite, so that a scaler steps or skips on all."""

from __future__ import annotations

from typing import Any

import torch

from autopart.runtime import unreduced
from autopart.runtime.holders import holders_of


def unscale(
    original: Any,
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    *rest: Any,
) -> Any:
    """What ``GradScaler`` does before a step or in ``unscale_``; `original` is torch's own.

    Returns, by device, a number that is not 0 where a gradient of any rank is not finite. A rank without gradients of
    its own takes part all the same.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unreduced.check(parameters, type(scaler).__name__)
    found = original(scaler, optimizer, inv_scale, found_inf, *rest)
    holders = list(dict.fromkeys(held[0] for held in holders_of(parameters) if held is not None))
    if not holders:
        return found
    worst = max((flag.to(found_inf.device) for flag in found.values()), default=found_inf, key=float)
    for holder in holders:
        worst = holder.sum_over_world(worst, largest=True).to(found_inf)
    return {found_inf.device: worst}
