"""Host memory: what a step frees stays with the process, for the next step to use again.

The C library hands large blocks back to the system when they are freed, and pages that the next step gets in their
place are zeroed as they are first touched: a step that allocates what the last one freed pays for that each time.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's ``mallopt``: how much may lie free at the heap's end, and from which size on a block is outside of it."""

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for this process from now on; whether it will.

    It does not where the environment says how it should (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`,
    `GLIBC_TUNABLES`), nor where it is another library than glibc, or one before 2.35, which limits the threshold.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, 2**30) for what in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
