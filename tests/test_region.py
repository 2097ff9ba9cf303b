"""``torch.compile(..., backend="autopart")``: what eager computes, from a text that can be read."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopart.api.region import backend

ROOT = Path(__file__).parent.parent


class Mixed(nn.Module):
    """Attention, normalisation with running statistics, a constant and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.BatchNorm1d(5), nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        top = y.topk(2, dim=-1)
        out = self.head(y) + torch.tensor([0.0, 1.0, 2.0], dtype=x.dtype)
        return out.square().mean() + top.values.sum(), {"out": out, "index": top.indices}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def test_values_gradients_and_buffers_equal_eager() -> None:
    texts: list[str] = []
    models: list[Any] = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = Mixed().double()
        call: Any = model
        if compiled:
            call = torch.compile(model, backend=backend, dynamic=False, options={"show": texts.append})
        results = []
        for step, size in enumerate((4, 4, 6)):
            x = torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(step)).double().requires_grad_()
            loss, rest = call(x)
            (loss * 3).backward()
            results += [loss, rest["out"], rest["index"], x.grad]
        model.eval()
        with torch.no_grad():
            results.append(call(x)[0])
        models.append((model, results))
    (mine, found), (plain, expected) = models
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(found, expected, strict=True))
    for (name, a), (_, b) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-14), name
    assert all(torch.allclose(a, b) for a, b in zip(mine.buffers(), plain.buffers(), strict=True))
    assert len(texts) == 5, "two shapes forward and backward, one forward without gradients"
    forward, backward = next(t for t in texts if "def forward" in t), next(t for t in texts if "def backward" in t)
    assert "test_region.py:" in forward and "self.head(y)" in forward and "aten.addmm" in forward
    assert "# qkv | test_region.py:" in forward and "L[" not in forward + backward
    assert "qkv" in backward and "aten.mm" in backward


def test_a_function_with_a_break_in_it() -> None:
    texts: list[str] = []

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).relu()
        torch._dynamo.graph_break()
        return (y * 2).sum()

    x, w = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    loss = torch.compile(f, backend=backend, dynamic=False, options={"show": texts.append})(x, w)
    loss.backward()
    assert w.grad is not None
    found, w.grad = w.grad, None
    f(x, w).backward()
    assert torch.equal(found, w.grad) and len(texts) == 4


def test_what_is_refused() -> None:
    x = torch.randn(4, 4)
    for options, message in (({"plan": 1}, "option 'plan'"), ({"show": 3}, "show must be a function")):
        with pytest.raises(Exception, match=message):
            torch.compile(lambda t: t * 2, backend=backend, options=options)(x)
    with pytest.raises(Exception, match="dynamic=False"):
        torch.compile(lambda t: t * 2, backend=backend, dynamic=True)(x)


def test_torch_finds_it_by_name(tmp_path: Path) -> None:
    """Through the entry point that pyproject.toml declares, which an installation writes down like this."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "autopart_points-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: autopart-points\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "import torch\n"
        "f = torch.compile(lambda x: (x * 2).sum(), backend='autopart', options={'show': print})\n"
        "x = torch.ones(3, requires_grad=True); f(x).backward(); print(x.grad.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "def forward(" in done.stdout and "def backward(" in done.stdout and "[2.0, 2.0, 2.0]" in done.stdout
