"""What asynchronous training means, in eager torch on one device, without autopart: the oracle of `train_loop`.

A stage is a module. Its weights are swapped in place through ``.data``, which autograd does not see, so a backward
meets what its stage's parameters hold by then, as it does on a rank of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


class Stage:
    """One stage; the newest weights, which its optimizer steps on; its weights after every step.

    The module's own parameters hold the version at hand.
    """

    def __init__(self, module: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], delay: int) -> None:
        self.module, self.delay = module, delay
        self.newest = [nn.Parameter(p.data.clone()) for p in module.parameters()]
        self.optimizer = optimizer(self.newest)
        self.history = [[w.data.clone() for w in self.newest]]
        self.given: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}
        self.used: dict[int, int] = {}

    def fill(self, version: int) -> None:
        for p, w in zip(self.module.parameters(), self.history[version], strict=True):
            p.data.copy_(w)

    def predict(self) -> None:
        """Linear weight prediction: w - lr D v."""
        for p, w in zip(self.module.parameters(), self.newest, strict=True):
            if w in self.optimizer.state:
                p.data -= self.group["lr"] * self.delay * self.optimizer.state[w]["momentum_buffer"]

    def step(self, *, compensate: bool) -> None:
        for p, w in zip(self.module.parameters(), self.newest, strict=True):
            w.grad, p.grad = p.grad, None
        if compensate:
            self.spike()
        else:
            self.optimizer.step()
        self.history.append([w.data.clone() for w in self.newest])

    def spike(self) -> None:
        """Spike compensation: v' = mu v + g, w -= lr (mu^D v' + (1 - mu^D) / (1 - mu) g)."""
        mu = self.group["momentum"]
        for w in self.newest:
            state = self.optimizer.state[w]
            state["momentum_buffer"] = mu * state.get("momentum_buffer", 0.0) + w.grad
            move = mu**self.delay * state["momentum_buffer"] + (1 - mu**self.delay) / (1 - mu) * w.grad
            w.data -= self.group["lr"] * move

    @property
    def group(self) -> dict[str, float]:
        (group,) = self.optimizer.param_groups
        return group


def train(
    modules: Sequence[nn.Module],
    loss: Loss,
    optimizer: Callable[..., torch.optim.Optimizer],
    data: Sequence[tuple[Tensor, Tensor]],
    policy: str,
    pieces: int = 1,
    *,
    compensate: bool = False,
) -> list[float]:
    """Train the stages' modules in place; the losses of the batches, each cut into `pieces` of equal size."""
    last, lead = len(modules) - 1, 2 if policy == "pb" else 1
    stages = [Stage(m, optimizer, lead * (last - r)) for r, m in enumerate(modules)]
    micro = [(x, y) for batch in data for x, y in zip(*(t.tensor_split(pieces) for t in batch), strict=True)]
    losses = [0.0] * len(data)
    for tick in range(len(micro) + stages[0].delay):
        for r, stage in enumerate(stages if tick < len(micro) else []):
            x = micro[tick][0] if r == 0 else stages[r - 1].made[tick].detach().requires_grad_()
            stage.used[tick] = max(tick // pieces - 1, 0) if policy == "2bw" else len(stage.history) - 1
            stage.fill(stage.used[tick])
            if compensate:
                stage.predict()
            y = stage.module(x)
            stage.given[tick], stage.made[tick] = x, y if r < last else loss(y, micro[tick][1]) / pieces
        for r, stage in reversed([*enumerate(stages)]):
            k = tick - stage.delay
            if 0 <= k < len(micro):
                stage.fill(stage.used[k] if policy in ("2bw", "pipedream") else -1)
                stage.made[k].backward(stages[r + 1].given[k].grad if r < last else None)
                losses[k // pieces] += stage.made[k].item() if r == last else 0.0
                if (k + 1) % pieces == 0:
                    stage.step(compensate=compensate)
    for stage in stages:
        stage.fill(-1)
    return losses
