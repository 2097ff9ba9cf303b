"""Models built on meta: initial values of a plain build with the same seed or from files, part by part (F014, F111)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autopart
from autopart import _torch
from autopart.api.session import Session
from autopart.runtime.construction import Construction
from autopart.runtime.weights import Files
from autopart.testing import LocalWorld
from tests.launch import launch
from tests.models import GPT

PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"mesh": {"pp": 2}, "microbatches": 2},
    "dp2 fsdp": {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 1},
    "dp2 zero1": {"mesh": {"dp": 2}, "placement": "zero1", "microbatches": 1},
}


class Odd(nn.Module):
    """Every way to initialise that comes to mind, each drawing from the generator before the next."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(width) * 0.1 + 1)
        self.gain = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.first, self.twin = nn.Linear(width, width), nn.Linear(width, width)
        layer = nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)  # copies the layer
        self.norm = nn.LayerNorm(width)
        self.table = nn.Embedding(4, width, padding_idx=1)
        self.last = nn.Linear(width, 1)
        self.register_buffer("steps", torch.arange(width) * torch.rand(1))
        self.register_buffer("centre", self.steps.new_tensor([0.5]), persistent=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]  # values that are no random ones
        self.apply(self._init)
        nn.init.orthogonal_(self.twin.weight)
        nn.init.trunc_normal_(self.last.weight, std=0.3)
        with torch.no_grad():
            self.first.weight[0] += torch.rand(width)
            self.last.weight.mul_(self.raw.sum())

    def _init(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(mean=0.0, std=0.2)
            part.bias.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.twin(torch.tanh(self.first(x + self.table(torch.arange(2, device=x.device)).sum(0))))
        h = self.norm(self.encoder(h[:, None])[:, 0] * self.centre + self.steps)
        return (self.last(h * self.raw) * self.gain.sum()).pow(2).mean()


class Tied(GPT):
    """A small GPT whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__(layers=2, skips=False)


class Layers(nn.Module):
    """Look-alike layers and nothing else: the largest parameter is a small part of the whole."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).pow(2).mean()


def on_meta(kind: Any, seed: int = 7, **pins: Any) -> Any:
    torch.manual_seed(seed)
    with torch.device("meta"):
        return autopart.parallelize(kind, capture="direct", **pins)()


def plain(kind: Any, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return kind()


def batch(kind: Any) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if kind is Tied:
        return tuple(torch.randint(0, 32, (4, 8), generator=generator) for _ in range(2))
    return (torch.randn(4, 64 if kind is Layers else 6, generator=generator),)


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def no_meta(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


# From the seed


def from_the_seed(rank: int, kind: Any, pins: dict[str, Any]) -> tuple[Any, Any]:
    model = on_meta(kind, **pins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    model(*batch(kind)).backward()
    assert torch.equal(torch.get_rng_state(), before) and no_meta(model)
    initial, grads = model.state_dict(), model.full_grads()
    optimizer.step()
    with torch.no_grad():  # a second program
        model(*batch(kind))
    return initial, (grads, model.state_dict())


@pytest.mark.parametrize(("kind", "plan"), [(Tied, "pp2"), (Odd, "pp2"), (Odd, "dp2 fsdp")])
def test_f014_initial_values_are_those_of_a_plain_build_bit_for_bit(kind: Any, plan: str) -> None:
    reference = plain(kind)
    initial = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    reference(*batch(kind)).backward()
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for found, (found_grads, after) in LocalWorld(2).run(from_the_seed, kind, PLANS[plan]):
        equal(found, initial)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)
        for name, tensor in reference.state_dict().items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert not torch.equal(next(iter(initial.values())), next(iter(plain(kind, 8).state_dict().values())))


def test_look_alike_layers_differ_and_ranks_in_one_process_share_whole_values() -> None:
    model = on_meta(Layers, mesh={"pp": 2}, microbatches=2)
    weight = model.layers[1].weight
    model(*batch(Layers)).backward()
    equal(model.state_dict(), plain(Layers).state_dict())
    assert model.layers[1].weight is weight and weight.grad is not None
    assert not torch.equal(weight, model.layers[6].weight)


def a_real_buffer(rank: int, dtype: torch.dtype) -> Any:
    model = on_meta(Odd, **PLANS["pp2"])
    model.steps = torch.full((6,), 0.25)
    model.to(dtype)
    model(*(x.to(dtype) for x in batch(Odd))).backward()
    assert no_meta(model)
    return model.state_dict()


def test_f111_a_real_buffer_stays_and_everything_else_becomes_real() -> None:
    reference = plain(Odd)
    reference.steps = torch.full((6,), 0.25)
    for found in LocalWorld(2).run(a_real_buffer, torch.float64):
        equal(found, reference.double().state_dict())


def hugging_face(rank: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
    reference = plain(lambda: LlamaForCausalLM(config))
    torch.manual_seed(7)
    with torch.device("meta"):
        model = autopart.parallelize(LlamaForCausalLM, capture="direct", **PLANS["pp2"])(config)
    ids = batch(Tied)[0]
    loss = model(input_ids=ids, labels=ids).loss
    assert no_meta(model)
    return model.state_dict(), reference.state_dict(), loss.item(), reference(input_ids=ids, labels=ids).loss.item()


def test_a_hugging_face_model_with_its_own_initialisation() -> None:
    for found, expected, loss, reference in LocalWorld(2).run(hugging_face):
        equal(found, expected)
        assert abs(loss - reference) < 1e-5


# Memory


class Allocations(TorchDispatchMode):
    """The bytes of storages on the CPU that operations within made, alive now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in _torch.pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._seen[_torch.storage_key(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self._seen = {key: item for key, item in self._seen.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return out


def peaks(rank: int, plan: str, weights: str | None) -> tuple[int, int]:
    """The most bytes that were alive while parts were made, and the bytes of this rank's parts."""
    model = on_meta(Layers, **PLANS[plan], weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        modes = []
        for name in ("_adopt", "_materialise"):
            original = getattr(Session, name)

            def counted(self: Any, *args: Any, original: Any = original) -> Any:
                if self.transport.rank != rank:
                    return original(self, *args)
                modes[:1] = modes[:1] or [Allocations()]
                with modes[0]:
                    return original(self, *args)

            patch.setattr(Session, name, counted)
        model(*batch(Layers)).backward()
        assert all(p.is_meta for p in model._autopart.residence.whole_copy(model).parameters())
    return modes[0].peak, sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("plan", ["pp2", "dp2 fsdp"])
@pytest.mark.parametrize("source", ["seed", "file"])
def test_no_rank_ever_holds_more_than_its_parts_and_one_parameter(plan: str, source: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    largest, total = 64 * 64 * 4, sum(p.numel() * 4 for p in Layers().parameters())
    file = tmp_path / "model.safetensors"
    save_file(Layers().state_dict(), file)
    for rank in range(2):
        model = LocalWorld(2).run(peaks_of_one, rank, plan, str(file) if source == "file" else None)[rank]
        peak, parts = model
        assert parts <= peak <= parts + largest + 8192 < total  # a generator's state has 5 KB


def peaks_of_one(rank: int, counted: int, plan: str, weights: str | None) -> tuple[int, int]:
    if rank == counted:
        return peaks(rank, plan, weights)
    on_meta(Layers, **PLANS[plan], weights=weights)(*batch(Layers)).backward()
    return 0, 0


# From files


def from_files(rank: int, path: str, plan: str) -> Any:
    model = on_meta(Odd, 3 + rank, **PLANS[plan], weights=path)
    rows: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        fill = Files.fill
        patch.setattr(
            Files, "fill", lambda self, slot, name: (rows.append(slot.tensor.numel()), fill(self, slot, name))
        )
        model(*batch(Odd)).backward()
    return model.state_dict(), model.centre.clone(), no_meta(model)


@pytest.mark.parametrize(("layout", "plan"), [("file", "pp2"), ("folder", "dp2 fsdp"), ("sharded", "dp2 zero1")])
def test_weights_come_from_a_file_or_a_folder_whatever_the_seed(layout: str, plan: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    expected = plain(Odd).state_dict()
    path = tmp_path / "model.safetensors"
    if layout != "sharded":
        save_file(expected, path)
    else:
        names = list(expected)
        files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: expected[name] for name in names if files[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for found, half, real in LocalWorld(2).run(from_files, str(path if layout == "file" else tmp_path), plan):
        equal(found, expected)
        assert real and torch.equal(half, torch.tensor([0.5]))  # not in the file: what the constructor made of it


def in_processes(path: str) -> Any:
    model = on_meta(Odd, **PLANS["dp2 fsdp"])
    model(*batch(Odd)).backward()
    autopart.save(path, model, step=1)
    resumed = on_meta(Odd, 5, **PLANS["pp2"])
    optimizer = torch.optim.AdamW(resumed.parameters())
    more = autopart.load(path, resumed)
    resumed(*batch(Odd)).backward()
    optimizer.step()
    return model.state_dict(), more, resumed.full_grads(), model.full_grads()


def test_processes_and_a_checkpoint_read_into_a_model_on_meta(tmp_path: Path) -> None:
    for found, more, grads, first in launch(in_processes, 2, [str(tmp_path)], timeout=90).values:
        equal(found, plain(Odd).state_dict())
        assert more == {"step": 1}
        for name, grad in first.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5)


# What is refused


def built_elsewhere() -> Any:
    with torch.device("meta"):
        return autopart.parallelize(Layers(6), capture="direct", mesh={"pp": 2})


def changed_after() -> Any:
    model = on_meta(Odd)
    nn.init.zeros_(model.norm.weight)
    return model


def replaced_after() -> Any:
    model = on_meta(Odd)
    model.last = nn.Linear(6, 1, device="meta")
    return model


class OwnGenerator(Odd):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.last.weight, generator=torch.Generator().manual_seed(0))


class Looks(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.large = bool(self.raw.max() > 1)


class Uninitialised(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.empty(6))


class Attribute(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.note = torch.zeros(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "built elsewhere": (
        built_elsewhere,
        "layers.0.weight is on meta.*ran elsewhere; pass weights=.*decorate the class",
    ),
    "changed after": (changed_after, r"norm.weight is on meta.*was changed after the constructor.*weights="),
    "replaced after": (replaced_after, r"last.weight is on meta.*put there after the constructor"),
    "own generator": (lambda: on_meta(OwnGenerator), "cannot be run again: it draws from a generator of its own"),
    "uninitialised": (lambda: on_meta(Uninitialised), "raw is on meta.*never given a value by the constructor"),
    "attribute": (lambda: on_meta(Attribute), "note is a tensor on meta that is neither a parameter nor a buffer"),
    "no file": (
        lambda: on_meta(Odd, weights="/nowhere"),
        "weights: /nowhere is neither a safetensors file nor a folder",
    ),
    "nothing on meta": (
        lambda: autopart.parallelize(Odd(), capture="direct", weights="/nowhere"),
        "weights: nothing of the module is on meta",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_nothing_gives_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    model = make()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        model(*batch(Odd))
    assert model.plan is None


def test_a_constructor_that_looks_at_what_it_drew_is_refused() -> None:
    with pytest.raises(ValueError, match=r"looks at a value that it drew at random.*build the module on a real device"):
        on_meta(Looks)


def wrong_files(rank: int, folder: str) -> list[str]:
    found = []
    for name in ("short", "long", "shape", "text"):
        try:
            on_meta(Odd, **PLANS["pp2"], weights=f"{folder}/{name}")(*batch(Odd))
        except ValueError as error:
            found.append(str(error))
    return found


def test_files_of_another_model_are_refused_on_every_rank(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole = plain(Odd).state_dict()
    save_file({name: tensor for name, tensor in whole.items() if name != "norm.bias"}, tmp_path / "short")
    save_file({**whole, "odd": torch.zeros(1)}, tmp_path / "long")
    save_file({**whole, "norm.bias": torch.zeros(4)}, tmp_path / "shape")
    (tmp_path / "text").write_text("no tensors here")
    one, two = LocalWorld(2).run(wrong_files, str(tmp_path))
    assert one == two
    words = [
        "does not hold norm.bias",
        "holds odd, which",
        r"norm.bias has shape \[4\], the module's has \[6\]",
        "not a",
    ]
    for message, word in zip(one, words, strict=True):
        assert re.search(word, message), message


def test_a_deep_copy_on_meta_has_the_same_initial_values() -> None:
    import copy

    model = on_meta(Odd, mesh={"pp": 2}, microbatches=2)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(*batch(Odd)).backward()
        equal(each.state_dict(), plain(Odd).state_dict())


def test_only_what_is_needed_is_run_again_where_nothing_is_drawn() -> None:
    construction = Construction()
    module = nn.Module()
    with torch.device("meta"), construction.recording(module):
        module.weight = nn.Parameter(torch.empty(3).normal_())
        module.register_buffer("table", torch.arange(4) * 2 + 1)
    made: list[torch.Tensor] = []
    ran: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        construction.replay([("table", lambda whole: made.append(whole.clone()))], construction.generator)
    assert torch.equal(made[0], torch.arange(4) * 2 + 1) and not any("normal_" in name for name in ran)
