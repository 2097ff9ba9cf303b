"""A progress line for a search that takes long: on the terminal, after a second; elsewhere nothing is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

SECONDS = 1.0
"""How long a search may take before it is shown."""


@contextmanager
def shown(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to be told how much is done, and of how much; the line is gone at the end."""
    began = time.monotonic()
    bar: Any = None
    with ExitStack() as stack:

        def progress(done: int, count: int) -> None:
            nonlocal bar
            if bar is None and sys.stderr.isatty() and time.monotonic() - began > SECONDS:
                from rich.console import Console
                from rich.progress import Progress

                bar = stack.enter_context(Progress(transient=True, console=Console(stderr=True)))
                bar.add_task(what)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=count)

        yield progress
