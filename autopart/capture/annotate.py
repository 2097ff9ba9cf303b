"""Where each node of a direct trace comes from: the module whose forward made it and the user's line.

Both are put into the metadata that torch copies to every node it makes, backward nodes included, while
``torch.fx.traceback.preserve_node_meta()`` is on.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch.fx import traceback
from torch.overrides import TorchFunctionMode

_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<",
)
"""torch, autopart, and code that is in no file."""


@lru_cache(maxsize=4096)
def is_user_file(path: str) -> bool:
    """Whether a file belongs to the user's program rather than to torch, autopart or Python itself."""
    return not path.startswith(_NOT_THE_USERS) and not path.endswith(f"{os.sep}contextlib.py")


class SourceLines(TorchFunctionMode):
    """Notes the user's line at each torch call made under it, among the frames above the one that makes this object."""

    def __init__(self) -> None:
        super().__init__()
        self.outermost = sys._getframe(1)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.outermost and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        user = [] if frame is None or frame is self.outermost else [_line(frame.f_code.co_filename, frame.f_lineno)]
        traceback.set_stack_trace(user)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        traceback.set_stack_trace([])
        super().__exit__(*exception)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096)
def _line(file: str, number: int) -> str:
    """The line as Python's tracebacks write it."""
    return f'File "{file}", line {number}, in forward\n    {linecache.getline(file, number).strip()}\n'


@contextlib.contextmanager
def module_names(module: torch.nn.Module) -> Iterator[None]:
    """Module names on every node made inside a forward, by hooks that are gone afterwards."""
    open_names: list[contextlib.AbstractContextManager[Any]] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            context = traceback.annotate({"module": name})
            context.__enter__()
            open_names.append(context)

        return hook

    def leave(*_: Any) -> None:
        open_names.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(enter(name)).remove)
            stack.callback(part.register_forward_hook(leave).remove)
        try:
            yield
        finally:
            while open_names:  # an exception skips the forward hooks
                leave()
