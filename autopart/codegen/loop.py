"""The text of a loop whose steps overlap: ``step(world, batches)`` for each batch, then ``drain(world, batches)``.

What outlives a step stays in stores that the world keeps by name. Microbatches are counted over the whole loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from autopart.codegen.functions import call, indented
from autopart.codegen.parsed import PROLOGUE
from autopart.codegen.stages import stage_outputs, stage_prologue
from autopart.codegen.step import computed, prologue_arguments, receive, send, stores
from autopart.ir.action import Kind, Weights
from autopart.ir.graph import Value
from autopart.ir.staged import Staged
from autopart.schedules.stream import Stream

MEANING = {
    Weights.STASH: "a backward uses the weights that its forward used",
    Weights.DOUBLE: "w[t+1] = w[t] - lr * g(w[t-1])",
    Weights.CURRENT: "forwards and backwards use the newest weights",
}
"""What an asynchronous schedule means, in a line."""


def loop(staged: Staged, stream: Stream, stage: int, degree: int) -> list[str]:
    """The functions ``step``, ``backward`` and ``drain`` of the rank that holds `stage`; `degree` is that of dp."""
    return [*_step(staged, stream, stage), *_backward(staged, stream, stage, degree), *_drain(staged, stream, stage)]


def _step(staged: Staged, stream: Stream, stage: int) -> list[str]:
    ahead = stream.ahead[stage]
    lines = [f"{name} = {{}}" for name in stage_outputs(staged, stage)]
    lines += ["for k in batches.entering:", "    batch = batches.of(k)"]
    tick = [receive(staged, edge.source, stage, "k") for edge in staged.into(stage, forward=True)]
    tick += [f"used_{stage}[k] = world.version(stage={stage})"] if stream.weights is Weights.STASH else []
    tick += [*_action(staged, stream, stage, Kind.F), *_sends(staged, stage, forward=True)]
    tick += [f"if k >= {ahead}:", f"    {_later(ahead)}"] if ahead else [_later(0)]
    tick += _received(staged, stream, stage, late=False)
    lines += [*indented(tick), f"return {total(staged, [stage])}"]
    count = f"{stream.batch} microbatch{'es' * (stream.batch > 1)}"
    doc = f"A batch of {count} comes: {MEANING[stream.weights]}."
    return function("step(world, batches)", doc, lines, _stores(staged, stream, stage))


def _backward(staged: Staged, stream: Stream, stage: int, degree: int) -> list[str]:
    lines = ["batch = batches.of(k)", *_action(staged, stream, stage, Kind.B), *_sends(staged, stage, forward=False)]
    step = reductions(staged, [stage], degree)
    delay = f", delay={stream.delay[stage]}" if stream.delay[stage] else ""
    number = f"k // {stream.batch}" if stream.batch > 1 else "k"
    step.append(f"world.update(stage={stage}, step={number}, keep={stream.keep[stage]}{delay})")
    lines += [f"if (k + 1) % {stream.batch} == 0:", *indented(step)] if stream.batch > 1 else step
    doc = "The backward of microbatch k; after the last one of a batch the optimizer steps."
    return function("backward(world, batches, k)", doc, lines, _stores(staged, stream, stage))


def _drain(staged: Staged, stream: Stream, stage: int) -> list[str]:
    ahead = stream.ahead[stage]
    # Fewer microbatches may have come than this rank is ahead.
    few = ahead > stream.batch
    tick = [f"if k >= {ahead}:", f"    {_later(ahead)}"] if few else [_later(ahead)]
    tick += _received(staged, stream, stage, late=True)
    lines = [f"for k in batches.left({ahead}):", *indented(tick)] if ahead else ["pass  # there are none"]
    doc = "No batch comes any more: the backwards that are left."
    return function("drain(world, batches)", doc, lines, _stores(staged, stream, stage))


def reductions(staged: Staged, stages: Sequence[int], degree: int) -> list[str]:
    """The lines that sum the gradients of some stages over dp before steps of the optimizer."""
    units = [unit for unit in staged.trained() if degree > 1 and not {*stages}.isdisjoint(unit.stages)]
    return [f'world.all_reduce("{unit.name}", axis="dp")' for unit in units] + ["world.wait()"] * bool(units)


def total(staged: Staged, stages: Sequence[int]) -> str:
    """What a step hands out: the loss of its batch, for which nobody waits yet."""
    loss = loss_of(staged)
    here = any(loss.name in stage_outputs(staged, stage) for stage in stages)
    parts = f"list({loss.name}.values())" if here else "[]"
    return f'{{"{loss.name}": world.begin_total({parts}, shape={loss.at(1)}, dtype={loss.dtype})}}'


def function(name: str, doc: str, body: Sequence[str], kept: Iterable[str]) -> list[str]:
    """A function, which begins with those of the stores that it uses; the world keeps these from step to step."""
    words = {word for line in body for word in re.findall(r"\w+", line)}
    stores = [f'{store} = world.store("{store}")' for store in kept if store in words]
    return ["", "", f"def {name}:", *indented([f'"""{doc}"""', *stores, *body])]


def _later(ahead: int) -> str:
    return f"backward(world, batches, k - {ahead})" if ahead else "backward(world, batches, k)"


def _stores(staged: Staged, stream: Stream, stage: int) -> list[str]:
    """The names of a rank's stores."""
    names = store_names(staged, [stage])
    return [*names, f"used_{stage}"] if stream.weights is Weights.STASH else names


def store_names(staged: Staged, stages: Sequence[int]) -> list[str]:
    """The names of the stores of some stages."""
    return [*dict.fromkeys(line.split(" = ")[0].strip() for line in stores(staged, stages))]


def _received(staged: Staged, stream: Stream, stage: int, *, late: bool) -> Iterator[str]:
    """The gradients that later stages make in tick k; `late`: after the last batch."""
    for edge in staged.into(stage, forward=False):
        by = stream.ahead[edge.source]
        if late and not by:  # the stage's last backward came with the last forward
            continue
        guards = [f"k >= {by}"] * (by > 0 if not late else by > stream.batch)
        guards += [f"k < batches.count + {by}"] * late
        k = f"k - {by}" if by else "k"
        line = receive(staged, edge.source, stage, k, f"batches.of({k})" if by or late else "batch")
        yield from [f"if {' and '.join(guards)}:", f"    {line}"] if guards else [line]


def _sends(staged: Staged, stage: int, *, forward: bool) -> Iterator[str]:
    for edge in staged.out_of(stage, forward=forward):
        yield send(staged, stage, edge.target, "k")


def _action(staged: Staged, stream: Stream, stage: int, kind: Kind) -> Iterator[str]:
    """The action of microbatch k, with the version of the weights that it uses where that is not the newest."""
    yield from once(staged, stage_prologue(staged, stage, kind))
    version = _version(stream, stage, kind)
    yield f'with world.action("{kind}", stage={stage}, microbatch=k{version}):'
    yield from indented(computed(staged, stage, kind, "k"))


def _version(stream: Stream, stage: int, kind: Kind) -> str:
    match stream.weights, kind:
        case Weights.DOUBLE, _:
            return f", version=max(k // {stream.batch} - 1, 0)" if stream.batch > 1 else ", version=max(k - 1, 0)"
        case Weights.STASH, Kind.B:
            return f", version=used_{stage}.pop(k)"
        case _, Kind.F if stream.delay[stage]:
            return f", delay={stream.delay[stage]}"
        case _:
            return ""


def once(staged: Staged, wanted: Iterable[str]) -> list[str]:
    """The lines that make some values of what depends on the whole batch's inputs alone, computed once a batch."""
    names = [item.value.name for item in staged.segmented.captured.of_kind("prologue")]
    made: list[str] = []
    for name in wanted:
        at = f"[{names.index(name)}]" if len(names) > 1 else ""
        made += call(f"{name} = batch.once", [PROLOGUE, *prologue_arguments(staged)], at)
    return made


def loss_of(staged: Staged) -> Value:
    """The loss of a step that has one."""
    captured = staged.segmented.captured
    return next(value for value in captured.values() if value.name == captured.loss)
