"""What all tests share: `--update-golden`, `--soak`, seeded hypothesis profiles, one torch thread, rare collections."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our own options."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing with them"
    )
    parser.addoption(
        "--soak", action="store_true", help="run everything: the tests marked soak too, many drawn examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same few examples each time, unless `--soak` asks for many new ones."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("test", max_examples=25, derandomize=True, deadline=None, suppress_health_check=checks)
    settings.register_profile("soak", max_examples=300, deadline=None, print_blob=True, suppress_health_check=checks)
    settings.load_profile("soak" if config.getoption("--soak") else "test")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked soak to `--soak`."""
    if not config.getoption("--soak"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="runs with --soak only"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage seldom, and never in what was imported: that takes a fifth of the time of tests that compile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same torch seed, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that `text` is what tests/golden/<name> holds; `--update-golden` writes it there."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), (
            f"no golden file {path.name}: look at the text below, then run with --update-golden\n{text}"
        )
        assert text == path.read_text(), f"not as in {path.name}; if the change is meant, run with --update-golden"

    return check
