"""``inputs="local"``: each data rank passes its own samples; the step is that of all of them, in data-rank order."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.errors import CaptureError, VerificationError
from autopart.ir.mesh import Mesh
from autopart.testing import LocalWorld
from tests.launch import launch

VALID = [0, -1, 2, 3, -1, -1, 1, 4, -1]


class Counted(nn.Module):
    """A classifier whose loss is a mean over the valid targets; in eval it returns the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.down(torch.tanh(self.up(x)))
        logits = logits if scale is None else logits * scale
        return nn.functional.cross_entropy(logits, y, ignore_index=-1) if self.training else logits


def made() -> tuple[Counted, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return Counted().double(), (torch.randn(9, 4).double(), torch.tensor(VALID))


def cut(batch: tuple[torch.Tensor, ...], shares: tuple[int, ...], part: int) -> tuple[torch.Tensor, ...]:
    """The samples of one data rank."""
    return tuple(tensor.split(shares)[part] for tensor in batch)


def train(rank: int, pins: dict[str, Any], shares: tuple[int, ...]) -> Any:
    """Two steps and an evaluation on a rank's own samples."""
    model, batch = made()
    mesh = Mesh.of(pins["mesh"])
    mine = cut(batch, shares, mesh.coordinate(rank).get("dp", 0))
    parallel = autopart.parallelize(model, inputs="local", capture="direct", **pins)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    losses, grads = [], []
    for _ in range(2):
        losses.append(loss := parallel(*mine))
        loss.backward()
        grads.append(parallel.full_grads())
        report = parallel.report()
        optimizer.step()
        optimizer.zero_grad()
    parallel.eval()
    with torch.no_grad():
        logits = parallel(*mine)
    return [loss.detach() for loss in losses], grads, logits, report, parallel.program.ranks[rank].source


@pytest.mark.parametrize(
    ("pins", "shares"),
    [
        ({"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 2}, (7, 2)),
        ({"mesh": {"pp": 2, "dp": 2}, "placement": "zero1", "microbatches": 2}, (4, 5)),
        ({"mesh": {"dp": 3}, "placement": "ddp", "microbatches": 1}, (3, 3, 3)),
        ({"mesh": {"dp": (3, 1)}, "placement": "zero1", "microbatches": 2}, (7, 2)),
    ],
)
def test_ragged_shares_train_as_their_concatenation(pins: dict[str, Any], shares: tuple[int, ...]) -> None:
    plain, batch = made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        expected.append((loss.detach(), {name: p.grad.clone() for name, p in plain.named_parameters()}))
        optimizer.step()
    whole = plain.eval()(*batch).detach()
    mesh = Mesh.of(pins["mesh"])
    for rank, (losses, grads, logits, report, source) in enumerate(LocalWorld(mesh.size).run(train, pins, shares)):
        for step, (loss, reference) in enumerate(expected):
            torch.testing.assert_close(losses[step], loss, rtol=1e-12, atol=0)
            for name, grad in reference.items():
                torch.testing.assert_close(grads[step][name], grad, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(logits, cut((whole,), shares, mesh.coordinate(rank).get("dp", 0))[0])
        last = mesh.coordinate(rank).get("pp", 0) == mesh.degree("pp") - 1
        assert ("world.summed(" in source) == last, "the ranks that read the count add it up"
        assert report.bytes_sent == report.predicted_bytes


def distributed_loop() -> Any:
    """An ordinary loop with a distributed sampler on 9 samples and 2 processes, the last one without its double."""
    import os

    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank = int(os.environ["RANK"])
    model, batch = made()
    sampler = DistributedSampler(TensorDataset(*batch), num_replicas=2, rank=rank, shuffle=False, drop_last=True)
    parallel = autopart.parallelize(model, mesh={"dp": 2}, placement="fsdp", inputs="local", capture="direct")
    losses = []
    for x, y in DataLoader(TensorDataset(*batch), batch_size=2, sampler=sampler):
        loss = parallel(x, y)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, parallel.full_grads()


def test_a_distributed_sampler_on_processes() -> None:
    plain, batch = made()
    losses = []
    for order in ([0, 2, 1, 3], [4, 6, 5, 7]):
        loss = plain(*(tensor[order] for tensor in batch))
        loss.backward()
        losses.append(float(loss.detach()))
    for found, grads in launch(distributed_loop, 2, timeout=60).values:
        torch.testing.assert_close(found, losses)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-14)


def refused(rank: int, case: str) -> str:
    model, batch = made()
    mesh = {"pp": 2, "dp": 2} if case == "column" else {"dp": 2}
    inputs = "global" if case == "sampler" else "local"
    parallel = autopart.parallelize(model, mesh=mesh, inputs=inputs, microbatches=2, capture="direct")
    before = [p.detach().clone() for p in model.parameters()]
    shares, part = {"few": ((8, 1), rank), "column": ((4, 5), rank // 2)}.get(case, ((4, 4, 1), rank))
    extra = (torch.full((5,), 1.0 + rank).double(),) if case == "shared" else ()
    with pytest.raises(ValueError) as caught:
        parallel(*cut(batch, shares, part), *extra)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sampler", "contents .* of rank 1 differ from rank 0's.*inputs='local' to parallelize"),
        ("column", "batch size of rank 2 differ from rank 0's; .*the data rank, not the rank"),
        ("shared", "contents .what is not split. of rank 1 differ from rank 0's"),
        ("few", "the 1 samples of data rank 1 cannot be cut into the plan's 2 microbatches.*drop_last"),
    ],
)
def test_calls_that_do_not_fit_are_refused_alike(case: str, words: str) -> None:
    messages = LocalWorld(4 if case == "column" else 2).run(refused, case)
    assert len(set(messages)) == 1
    with pytest.raises(ValueError, match=words):
        raise ValueError(messages[0])


def test_worlds_and_arguments() -> None:
    model, batch = made()
    with pytest.raises(ValueError, match=r"inputs: 'local' needs a call by each rank, but all 2 ranks run inside"):
        autopart.parallelize(copy.deepcopy(model), mesh={"dp": 2}, inputs="local")(*batch)
    with pytest.raises(ValueError, match=r"inputs: 'mine' is not known; one of global, local"):
        autopart.parallelize(copy.deepcopy(model), inputs="mine")
    alone = autopart.parallelize(copy.deepcopy(model), inputs="local", capture="direct")
    torch.testing.assert_close(alone(*batch), model(*batch))

    def unpinned(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            autopart.parallelize(made()[0], inputs="local")(*batch)
        return str(caught.value)

    assert all("mesh={'dp': 2}" in message for message in LocalWorld(2).run(unpinned))


def local_program() -> Any:
    model, batch = made()
    plan = autopart.plan(model, batch, mesh={"dp": 2}, placement="ddp", microbatches=1, capture="direct")
    return autopart.compile(model, replace(plan, inputs="local"), batch, capture="direct")


def test_verify_wants_counts_added_up_once() -> None:
    program = local_program()
    line = next(line for line in program.ranks[0].source.splitlines() if "world.summed" in line)
    for edited, words in (("", "samples alone; make it whole first"), (f"{line}\n{line}", "it is whole already")):
        ranks = tuple(replace(rank, source=rank.source.replace(line, edited)) for rank in program.ranks)
        with pytest.raises(VerificationError, match=words):
            autopart.verify(replace(program, ranks=ranks))
    ranks = (program.ranks[0], replace(program.ranks[1], source=program.ranks[1].source.replace(', axis="dp")', ")")))
    with pytest.raises(VerificationError):
        autopart.verify(replace(program, ranks=ranks))
    with pytest.raises(ValueError, match="the program was made for inputs='local', not 'global'"):
        autopart.parallelize(made()[0], plan=program)


class Weighted(nn.Module):
    """A loss divided by what is no plain sum over the samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 1), kind

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if self.kind == "largest":
            return (self.fc(x).squeeze(1) * w).sum() / w.max()
        return (self.fc(x).squeeze(1) * w).sum() / (w / w.sum()).square().sum()


@pytest.mark.parametrize("kind", ["largest", "nested"])
def test_what_is_no_sum_is_refused(kind: str) -> None:
    batch = (torch.randn(4, 4), torch.rand(4))

    def rank_main(rank: int) -> str:
        torch.manual_seed(0)
        model = autopart.parallelize(Weighted(kind), mesh={"dp": 2}, inputs="local", capture="direct")
        with pytest.raises(CaptureError) as caught:
            model(*batch)
        return str(caught.value)

    for message in LocalWorld(2).run(rank_main):
        assert "inputs='global'" in message and "test_local_inputs.py" in message
