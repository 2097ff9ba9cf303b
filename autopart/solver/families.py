"""Which schedules a search looks at, by name: one copy of the model, whole sequences, a whole output layer.

COMMON          where a cluster is given and no schedule: those in wide use, up to four stages a rank
PORTFOLIO       with ``schedule="auto"``: every family that programs run, likely ones first
FORWARDS_FIRST  the same for steps without a loss, whose forwards all come first
LEAN            those that hold little, for each number of stages a rank: they say whether something fits
"""

from __future__ import annotations

from autopart.schedules.spell import AUTO

WHOLE = ("1f1b", "gpipe")
"""Schedules with one stage a rank and whole backwards, which there are for any numbers."""

COMMON = (
    *("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved", "interleaved(chunks=3)", "interleaved(chunks=4)"),
    *("gpipe", "bfs"),
)

PORTFOLIO = (
    *("1f1b", "zb-h1", "zb-auto", "zb-h2", "zb-v", "vhalf", "interleaved-zb", "interleaved", "v1f1b", "vzb", "vmin"),
    *("hanayo", "dualpipev", "zeropp", "gis", "2bp-1f1b", "2bp-gpipe", "gpipe", "bfs", "hanayo(waves=2)"),
    *(f"{name}(chunks={v})" for v in (3, 4) for name in ("interleaved-zb", "interleaved", "zeropp", "gis", "bfs")),
)

FORWARDS_FIRST = ("gpipe", "2bp-gpipe", "bfs", "bfs(chunks=3)", "bfs(chunks=4)")

LEAN = ("1f1b", "v1f1b", "vhalf", "vmin", *(f"{name}(chunks={v})" for v in (3, 4) for name in ("interleaved", "bfs")))

ANYWHERE = frozenset({*COMMON, *PORTFOLIO, *FORWARDS_FIRST} - {"dualpipev"})
"""Those that there are for any numbers of ranks and microbatches, their places and kinds of actions being the same."""


def looked_at(text: str, *, free: bool, forwards_first: bool) -> tuple[str, ...]:
    """The schedules that are looked at for a text, or where none was given and the search is `free` to choose."""
    if text == AUTO:
        return FORWARDS_FIRST if forwards_first else PORTFOLIO
    return COMMON if free and not forwards_first else (text,)
