"""The modes of the moment (grad, autocast, default device, stream), set again in the threads of a local world."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


def caller_modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context that sets, in another thread, the modes of the thread that calls this."""
    grad = torch.is_grad_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocasts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds]
    default = torch.get_default_device()
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    stream = torch.cuda.current_stream() if initialized() else None

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            # a backward that communicates must run in its rank's thread, not in the one that ranks share for a device
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.cuda.stream(stream))
            if default.type != "cpu":
                stack.enter_context(default)
            for kind, dtype, cache in autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return modes
