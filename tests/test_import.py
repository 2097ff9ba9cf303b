"""`import autopart` is light: what is public is loaded when it is asked for, what only some calls need by them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("networkx", "z3", "sympy", "rich", "typer", "safetensors", "transformers", "hypothesis", "torch._dynamo")
SCRIPT = """
import sys, torch
before = set(sys.modules)
import autopart
print("autopart.api" in sys.modules)
assert set(autopart.__all__) <= set(dir(autopart)) and all(getattr(autopart, name) for name in autopart.__all__)
print(*sorted(set(sys.modules) - before))
"""


def test_nothing_heavy_is_loaded() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    first, *loaded = done.stdout.split()
    assert first == "False" and "autopart.api.session" in loaded
    assert not set(HEAVY) & set(loaded)
