"""What of a plan, a batch and a placement pin does not go with the captured step is refused here, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopart.ir.captured import Captured
from autopart.ir.placement import executable
from autopart.ir.plan import Plan, around

WHAT = ("names", "shapes", "dtypes")
"""Of what of the parameters a fingerprint has a hash."""


def fingerprint(captured: Captured) -> str:
    """How many parameters there are, and a hash each of their names, of their shapes and of their dtypes, by name."""
    named = sorted((item.target, item.value.shape, str(item.value.dtype)) for item in captured.of_kind("parameter"))
    columns = ("\n".join(str(each[column]) for each in named) for column in range(len(WHAT)))
    return "-".join([str(len(named)), *(hashlib.sha256(text.encode()).hexdigest()[:8] for text in columns)])


def check_fingerprint(plan: Plan, captured: Captured) -> None:
    """Refuse a plan that was made for another model, with what differs."""
    found = fingerprint(captured)
    if plan.fingerprint in ("", found):
        return
    (count, *ours), (before, *theirs) = found.split("-"), plan.fingerprint.split("-")
    differ = [what for what, one, other in zip(WHAT, ours, theirs, strict=False) if one != other] or ["parameters"]
    raise ValueError(
        f"plan: it was made for another model: {' and '.join(differ)} differ"
        + (f"; it has {before} parameters, this one {count}" if before != count and before.isdigit() else "")
        + "; plan again"
    )


def check_executable(plan: Plan) -> None:
    """Refuse a plan that keeps states where programs cannot keep them yet: on the host."""
    for _, placement in plan.placements:
        executable(placement)


def check_cut(shares: Sequence[int], plan: Plan, least: int) -> None:
    """Refuse a batch, of so many samples a data rank, that the plan cannot cut into slices of at least `least`."""
    degree, count, few = plan.mesh.parts * plan.mesh.widest, plan.microbatches, min(shares)
    if few >= count * least * plan.mesh.widest:
        return
    each = f" of {least} samples, without which a BatchNorm has no variance" if least > 1 else ""
    dealt = f" ({plan.mesh} deals {sum(shares)} as {tuple(shares)})" if plan.inputs != "local" else ""
    batch = (
        f"the {few} samples of data rank {shares.index(few)}{dealt} cannot be cut into the plan's {count} microbatches"
        f"{each}"
        if plan.inputs == "local" or plan.mesh.shares
        else f"{sum(shares)} samples cannot be cut into {degree * count} pieces{each} (dp x microbatches of the plan)"
    )
    raise ValueError(
        f"batch: {batch}; pass more samples (a loader's last batch may be small: drop_last=True), or pin fewer "
        f"microbatches{', or shares that are less uneven' if plan.mesh.shares and plan.inputs != 'local' else ''}"
    )


def check_chunked(chunks: Sequence[tuple[str, int]], captured: Captured) -> None:
    """Refuse a pattern of modules in chunks that matches no module which computes anything."""
    known = {path for node in captured.nodes if not node.backward and node.module for path in around(node.module)}
    _check_matches((pattern for pattern, _ in chunks), known, "chunks: no module that computes anything")


def check_patterns(placement: object, captured: Captured) -> None:
    """Refuse a placement pattern that matches no parameter."""
    if isinstance(placement, Mapping):
        known = {path for item in captured.of_kind("parameter") for path in around(item.target)}
        _check_matches(placement, known, "placement: no parameter or module")


def _check_matches(patterns: Iterable[str], known: Collection[str], none: str) -> None:
    """Raise ValueError for a pattern that matches nothing that is known, with the names that are near."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = get_close_matches(pattern, known, n=3)
            hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
            raise ValueError(f"{none} is called {pattern!r}{hint}")
