"""Closed forms of a transformer layer: the activations it keeps, and what its operators exchange, by way of splitting.

What `ir.calculus` cannot say, because it depends on the layers and not on the modes alone. The layer is that of
Korthikanti et al. 2022 (arXiv 2205.05198): GELU, an MLP of 4 x hidden, attention scores that are stored, 16-bit
activations, dropout masks of one byte, statistics of norms left out. For other layers (fused attention, gated MLPs,
grouped heads) the graph itself has to be asked. Sizes may be numbers or sympy expressions; bytes are per device.
"""

from __future__ import annotations

from autopart.ir.amount import Amount, check_amount

RECOMPUTE = ("none", "selective", "full")
"""What is computed again in the backward: nothing; attention from its scores on; the layer from its input on."""


def activation_bytes(
    *,
    sequence: Amount,
    batch: Amount,
    hidden: Amount,
    heads: Amount,
    tp: Amount = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> Amount:
    """Bytes that a layer keeps of a microbatch of `batch` samples for the backward (Korthikanti et al. 2022, table 2).

    Of s b h bytes: 34 + 5 a s / h on one device (equation 1); with tensor parallelism 10 + 24/t + 5 a s / (h t)
    (equation 2), where 10 is what every device has whole; with sequence parallelism too, all of it over t (equation 4).
    Selective recomputation leaves 5 a s / h out; full recomputation keeps the layer's input, 2, which sequence
    parallelism has split.

    Raises ValueError for a size that is not positive and an unknown `recompute`.
    """
    _check_sizes(sequence=sequence, batch=batch, hidden=hidden, heads=heads, tp=tp)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute: unknown {recompute!r}; one of {', '.join(RECOMPUTE)}")
    token = sequence * batch * hidden
    if recompute == "full":
        return 2 * token / tp if sequence_parallel else 2 * token
    scores = 5 * heads * sequence * sequence * batch if recompute == "none" else 0
    shared, split = (0, 34 * token) if sequence_parallel else (10 * token, 24 * token)
    return shared + (split + scores) / tp


def pipeline_activation_bytes(layer: Amount, *, layers: Amount, stages: Amount, chunks: int = 1) -> Amount:
    """Bytes that the first stage keeps under 1F1B: `layer` bytes of each of all the model's `layers`, in all.

    Its L / p layers keep p microbatches, whatever p is (equation 5); interleaved over `chunks` a device, more by
    (p - 1) / (p v).
    """
    _check_sizes(layers=layers, stages=stages, chunks=chunks)
    whole = layer * layers
    return whole if chunks == 1 else whole + whole * (stages - 1) / (stages * chunks)


def tensor_parallel_bytes(
    *, sequence: Amount, batch: Amount, hidden: Amount, tp: Amount, itemsize: Amount = 2, recompute: bool = False
) -> Amount:
    """Bytes that a device sends over the tensor axis for one layer and microbatch.

    Two all-reduces of b s h elements in the forward and two in the backward: 8 b s h (t-1)/t elements (Narayanan et al.
    2021, arXiv 2104.04473, section 3.2); two more where the forward is computed again. Sequence parallelism sends the
    same, as all-gathers and reduce-scatters.
    """
    _check_sizes(sequence=sequence, batch=batch, hidden=hidden, tp=tp, itemsize=itemsize)
    calls = 6 if recompute else 4
    return 2 * calls * batch * sequence * hidden * itemsize * (tp - 1) / tp


def pipeline_bytes(*, sequence: Amount, batch: Amount, hidden: Amount, itemsize: Amount = 2) -> Amount:
    """Bytes over one stage boundary, in one direction, for one microbatch: b s h elements (Narayanan et al., 3.2)."""
    _check_sizes(sequence=sequence, batch=batch, hidden=hidden, itemsize=itemsize)
    return batch * sequence * hidden * itemsize


def ulysses_bytes(*, sequence: Amount, hidden: Amount, cp: Amount, itemsize: Amount = 2) -> Amount:
    """Bytes over a link for one layer where all-to-alls change between sequence and heads: 4 N h / P elements.

    DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509): 3 N h / P for queries, keys and values, N h / P for the
    output, in the paper's convention for large P, (P-1)/P left out.
    """
    _check_sizes(sequence=sequence, hidden=hidden, cp=cp, itemsize=itemsize)
    return 4 * sequence * hidden * itemsize / cp


def sequence_parallel_bytes(*, sequence: Amount, hidden: Amount, itemsize: Amount = 2) -> Amount:
    """What Ulysses compares itself with, in the same convention: 4 N h elements, two gathers and two reductions."""
    _check_sizes(sequence=sequence, hidden=hidden, itemsize=itemsize)
    return 4 * sequence * hidden * itemsize


def expert_parallel_bytes(
    *, tokens: Amount, hidden: Amount, top_k: Amount, ep: Amount, itemsize: Amount = 2, capacity: Amount = 1
) -> Amount:
    """Bytes that a device sends for one layer of experts in a step: four all-to-alls of its routed tokens.

    To the experts and back, forward and backward: 4 k T h (E-1)/E elements for T tokens of the device, balanced over
    the axis; `capacity` is the factor by which experts' buffers are padded.
    """
    _check_sizes(tokens=tokens, hidden=hidden, top_k=top_k, ep=ep, itemsize=itemsize, capacity=capacity)
    return 4 * top_k * tokens * hidden * itemsize * capacity * (ep - 1) / ep


def pipeline_bubble(*, stages: Amount, microbatches: Amount, chunks: Amount = 1) -> Amount:
    """The idle time of a flushed pipeline over its ideal time: (p-1)/(v m), of GPipe and 1F1B with v = 1.

    Narayanan et al. 2021, sections 2.2.1 and 2.2.2. The part of the whole step is r / (1 + r) of this ratio r.
    """
    _check_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    return (stages - 1) / (chunks * microbatches)


def _check_sizes(**sizes: Amount) -> None:
    for name, size in sizes.items():
        check_amount(name, size, least=1)
