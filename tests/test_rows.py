"""Rows that are sorted, computed in groups and brought back: each microbatch sorts its own, and adds up to the batch.

The grouped product is that of Hugging Face's mixtures, one product an expert, which is exact in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.capture import capture, read
from autopart.errors import CaptureError
from autopart.passes.normalise import normalise
from autopart.testing import assert_parity, check_sharding_rule
from autopart.testing.rules import RuleError
from tests.axis_zoo import GROUPED, Widened, _tokens
from tests.own_ops import registered
from tests.zoo import Specimen

moe = pytest.importorskip("transformers.integrations.moe")
grouped = torch.ops.transformers.grouped_mm_fallback
EXPERTS, CHOSEN, WIDTH = 3, 2, 4

Experts = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]
"""From tokens [t, width], the experts of each [t, chosen] and their weights, to what those make of them."""


class Mixture(nn.Module):
    """A mixture of experts and a loss of its own, its experts computed by a function of rows."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = experts
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5))
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
        return (tokens + self.experts(self, tokens, ids, weights)).square().mean()

    def groups(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What each group's expert makes of its rows."""
        made: Tensor = grouped(F.gelu(grouped(rows, self.up, ends)), self.down, ends)
        return made


def ends_of(keys: Tensor) -> Tensor:
    """Where the rows of each expert end."""
    counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return counts.cumsum(0, dtype=torch.int32)


def _inverse_written(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """As Hugging Face writes it."""
    keys, order = ids.flatten().sort()
    y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back].view(-1, CHOSEN, WIDTH).sum(1)


def _inverse_sorted(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Rows repeated before they are sorted; brought back by sorting the order."""
    keys, order = ids.flatten().sort(stable=True)
    rows = x.repeat_interleave(CHOSEN, 0, output_size=len(x) * CHOSEN).index_select(0, order)
    y = s.groups(rows, ends_of(keys)).index_select(0, order.argsort())
    return (y.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1)


def _added(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Added to the tokens that they are of."""
    keys, order = ids.flatten().sort()
    token = order // CHOSEN
    y = s.groups(x[token], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, y)


def _gathered(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Gathered and scattered with an index for each element."""
    keys, order = ids.flatten().sort()
    token = torch.div(order, CHOSEN, rounding_mode="floor").unsqueeze(-1).expand(-1, WIDTH)
    y = s.groups(x.gather(0, token), ends_of(keys)) * weights.flatten().gather(0, order).unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, token, y)


def _counted_first(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Tokens counted before they are sorted, as torchtitan writes it."""
    ends, order = ends_of(ids.view(-1)), ids.view(-1).argsort(stable=True)
    y = s.groups(x[order // CHOSEN], ends) * weights.view(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y)


FORMS = (_inverse_written, _inverse_sorted, _added, _gathered, _counted_first)
WRITTEN = {each.__name__.strip("_"): each for each in FORMS}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mixture_whose_rows_are_sorted_trains_as_on_one_device(name: str) -> None:
    x = torch.randn(6, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    pins: dict[str, Any] = {"mesh": {"dp": 2}, "placement": "fsdp", "microbatches": 3}
    assert_parity(Mixture(WRITTEN[name]), (x,), tolerance=1e-10, **pins)


def hugging_face(name: str = "Mixtral", **sizes: int) -> Specimen:
    """A mixture as `transformers` computes it by default, grouped product after grouped product."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**GROUPED, **sizes, num_experts_per_tok=2)
    assert config._experts_implementation in (None, "grouped_mm"), "which is the default"
    return Specimen(Widened(getattr(transformers, f"{name}ForCausalLM")(config)), (), _tokens())


KINDS: Mapping[str, dict[str, int]] = {
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "Qwen3Moe": {"intermediate_size": 32, "moe_intermediate_size": 24, "num_experts": 4, "head_dim": 8},
    "GptOss": {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
}
MESHES: Mapping[str, dict[str, Any]] = {
    "pp2 dp2": {"mesh": {"pp": 2, "dp": 2}, "placement": "fsdp", "microbatches": 2},
    "pp 2 then 1": {"mesh": {"pp": (2, 1)}, "microbatches": 2},
    "pp2 ep2": {"mesh": {"pp": 2, "ep": 2}, "microbatches": 2},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.soak] if i else []) for i, k in enumerate(KINDS)])
@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.soak] if i else []) for i, m in enumerate(MESHES)])
def test_hugging_faces_mixtures_by_default(mesh: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # torch's own is not for float64
    found = hugging_face(kind, **KINDS[kind])
    assert_parity(found.model, found.args, found.kwargs, tolerance=1e-8, capture="compile", **MESHES[mesh])


def _sample(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(*size, generator=generator).double() for size in ((rows, WIDTH), (EXPERTS, WIDTH, 5)))
    return (*made, torch.tensor([2, 2, rows]))


def test_each_groups_rows_may_be_computed_in_parts() -> None:
    x, w, ends = _sample(7)
    check_sharding_rule(grouped, (x, w, ends))
    check_sharding_rule("transformers::grouped_mm_fallback_backward", (x, w, ends, torch.randn(7, 5).double()))


@torch.library.custom_op("tests_rows::centred", mutates_args=())
def centred(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """A grouped product of rows without their mean, which is that of all rows."""
    made: Tensor = grouped(x - x.mean(0), w, ends)
    return made


@centred.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def test_a_rule_by_which_rows_stand_alone_that_do_not_is_found() -> None:
    rule = {"whole": "t e", "ends": {"t": "ends"}}
    with (
        registered((centred, "t h, e h k, e -> t k", rule)),
        pytest.raises(RuleError, match=r"loop 't' in groups that end at ends: result 0"),
    ):
        check_sharding_rule(centred, _sample(7))


def test_only_a_whole_loop_has_ends() -> None:
    with pytest.raises(ValueError, match="ends: h: expected one of e, t"):
        autopart.register_sharding_rule(centred, "t h, e h k, e -> t k", whole="t e", ends={"h": "ends"})


# ---- what is refused -------------------------------------------------------------------------------------------------


def _wrong(change: str) -> Experts:
    def experts(s: Mixture, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        keys, order = ids.flatten().sort(descending=change == "descending")
        token = order // (CHOSEN if change != "regrouped tokens" else CHOSEN * 3)
        rows = x[token]
        if change == "numbers used":
            rows = rows * order.unsqueeze(-1)
        if change == "neighbours":
            rows = rows + rows.cumsum(0)
        if change == "another order":
            rows = rows + x.repeat_interleave(CHOSEN, 0, output_size=len(x) * CHOSEN)
        if change == "another sort":
            rows = rows + x[weights.flatten().argsort() // CHOSEN]
        if change == "regrouped":
            rows = rows.view(-1, CHOSEN, WIDTH).softmax(1).view(-1, WIDTH)
        if change == "drawn":
            rows = F.dropout(rows, 0.5)
        ends = ends_of(keys.to(torch.int8) if change == "wrapped keys" else keys)
        if change == "other groups":
            ends = ends_of((ids.flatten() + 1) % EXPERTS)
        if change == "other ends":
            ends = ends - 1
        y = s.groups(rows, ends)
        if change == "not brought back":
            return y.view(-1, CHOSEN, WIDTH).sum(1)
        if change == "written in part":
            return x.index_copy(0, token, y)
        return torch.zeros_like(x).index_add(0, token if change != "added elsewhere" else order % len(x), y)

    return experts


REFUSED = {
    "descending": "grouped_mm_fallback",
    "regrouped tokens": "numbers of the samples",
    "numbers used": "numbers of the samples",
    "neighbours": "cumsum",
    "another order": "beside rows in another order",
    "another sort": "beside rows in another order",
    "regrouped": "regroup",
    "drawn": "beside rows in another order",
    "wrapped keys": "grouped_mm_fallback",
    "other groups": "grouped_mm_fallback",
    "other ends": "sub",
    "not brought back": "regroup",
    "written in part": "numbers of the samples",
    "added elsewhere": "numbers of the samples",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_depends_on_where_a_sorted_row_lies_is_refused(change: str) -> None:
    model, x = Mixture(_wrong(change)), torch.randn(6, 3, WIDTH)
    with pytest.raises(CaptureError, match=rf"(?s){REFUSED[change]}.*microbatches=1"):
        normalise(capture(model, read(model, (x,)), route="direct"))


class Returned(nn.Module):
    """Returns rows as they were sorted, or the numbers of the samples."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1).argsort()] if self.what == "rows" else torch.arange(len(x))


@pytest.mark.parametrize(("what", "message"), [("rows", "aten.index.*returned as they lie"), ("numbers", "numbers of")])
def test_neither_sorted_rows_nor_the_numbers_of_samples_are_returned(what: str, message: str) -> None:
    model, x = Returned(what), torch.randn(6, WIDTH)
    with pytest.raises(CaptureError, match=message):
        normalise(capture(model, read(model, (x,)), route="direct"))
