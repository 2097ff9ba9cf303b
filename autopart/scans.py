"""Sums along a dim from each element to the last: what the backward of a cumulative sum computes, as one operator.

``autopart::cumsum_from_end(x, dim)`` is ``x.flip(dim).cumsum(dim).flip(dim)``, bit for bit. As three operators it could
not be split along the dim without handing all of it from place to place, twice.
"""

from __future__ import annotations

from typing import Any

import torch


def cumsum_from_end(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of each element and all that come after it along `dim`."""
    return x.flip((dim,)).cumsum(dim).flip((dim,))


def _register() -> Any:
    library: Any = torch.library.Library("autopart", "FRAGMENT")  # type: ignore[no-untyped-call]
    name = library.define("cumsum_from_end(Tensor self, int dim) -> Tensor")
    library.impl(name, cumsum_from_end, "CompositeExplicitAutograd")
    torch.library.register_fake("autopart::cumsum_from_end", lambda x, dim: torch.empty_like(x), lib=library)
    return library


_LIBRARY = _register()

FROM_END: Any = torch.ops.autopart.cumsum_from_end.default
"""The operator, for graphs."""
