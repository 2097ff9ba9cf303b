"""What of a plan, a batch and a placement pin does not go with the captured step is refused here, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopart.ir.captured import Captured
from autopart.ir.plan import Plan, around


def fingerprint(captured: Captured) -> str:
    """A hash of the parameters' names, shapes and dtypes."""
    text = "\n".join(sorted(f"{i.target} {i.value.at(1)} {i.value.dtype}" for i in captured.of_kind("parameter")))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fingerprint(plan: Plan, captured: Captured) -> None:
    """Refuse a plan that was made for another model."""
    if plan.fingerprint not in ("", fingerprint(captured)):
        raise ValueError("plan: it was made for another model (parameter names, shapes or dtypes differ); plan again")


def check_cut(shares: Sequence[int], plan: Plan, least: int) -> None:
    """Refuse a batch, of so many samples a data rank, that the plan cannot cut into slices of at least `least`."""
    degree, count, few = plan.mesh.degree("dp"), plan.microbatches, min(shares)
    if few >= count * least:
        return
    each = f" of {least} samples, without which a BatchNorm has no variance" if least > 1 else ""
    batch = (
        f"the {few} samples of data rank {shares.index(few)} cannot be cut into the plan's {count} microbatches{each}"
        if plan.inputs == "local"
        else f"{sum(shares)} samples cannot be cut into {degree * count} pieces{each} (dp x microbatches of the plan)"
    )
    raise ValueError(
        f"batch: {batch}; pass more samples (a loader's last batch may be small: drop_last=True), or pin fewer "
        "microbatches"
    )


def check_chunked(chunks: Sequence[tuple[str, int]], captured: Captured) -> None:
    """Refuse a pattern of modules in chunks that matches no module which computes anything."""
    known = {path for node in captured.nodes if not node.backward and node.module for path in around(node.module)}
    for pattern, _ in chunks:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = get_close_matches(pattern, known, n=3)
            hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
            raise ValueError(f"chunks: no module that computes anything is called {pattern!r}{hint}")


def check_patterns(placement: object, captured: Captured) -> None:
    """Refuse a placement pattern that matches no parameter."""
    if not isinstance(placement, Mapping):
        return
    names = [item.target for item in captured.of_kind("parameter")]
    known = {candidate for name in names for candidate in around(name)}
    for pattern in placement:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = get_close_matches(pattern, known, n=3)
            hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
            raise ValueError(f"placement: no parameter or module is called {pattern!r}{hint}")
