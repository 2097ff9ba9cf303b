"""Freed host memory is kept: counted in pages that a process touches for the first time."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from autopart.runtime.host_memory import keep_freed_memory

LIBRARY, VERSION = platform.libc_ver()
glibc = pytest.mark.skipif(
    LIBRARY != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35), reason="other C libraries keep no such blocks"
)


@glibc
def test_what_a_step_frees_the_next_one_uses_again() -> None:
    """Three blocks of 40 MB, each of which glibc would otherwise give back: 10,000 pages a block and round."""

    def pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.empty(10_000_000).fill_(1) for _ in range(3)]
        assert len(blocks) == 3
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert keep_freed_memory()
    assert min(pages() for _ in range(8)) < 1000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory.__wrapped__()
