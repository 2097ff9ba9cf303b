"""Sends that go on in the background, with the tensors they read."""

from __future__ import annotations

import atexit
import queue
import threading

import torch
import torch.distributed as dist

LINGER = 5.0
"""Seconds that a process waits at its end for sends that nobody may take any more: its peers end within that."""


class Outbox:
    """Posted sends. Where `waits`, a thread waits for each: gloo says nothing unasked."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._posted: list[tuple[dist.Work, torch.Tensor]] = []
        self._queue: queue.Queue[tuple[dist.Work, torch.Tensor]] = queue.Queue()
        self._error: RuntimeError | None = None
        if waits:
            threading.Thread(target=self._drain, name="autopart sends", daemon=True).start()
            # An interpreter that ends while the thread is on its way back from gloo ends in an abort.
            atexit.register(self.settle, LINGER)

    def post(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """Keep the tensor until the work is done."""
        self._check()
        if self._waits:
            self._queue.put((work, tensor))
        else:
            self._posted = [each for each in self._posted if not each[0].is_completed()] + [(work, tensor)]

    def flush(self) -> None:
        """Return when all is done."""
        self._queue.join()
        for work, _ in self._posted:
            work.wait()
        self._posted.clear()
        self._check()

    def settle(self, seconds: float) -> None:
        """Return when all is done or has failed, as it has once the receiver is gone, or after some seconds."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _drain(self) -> None:
        while True:
            work, _ = item = self._queue.get()
            try:
                work.wait()
            except RuntimeError as error:
                self._error = error
            del work, item, _
            self._queue.task_done()
