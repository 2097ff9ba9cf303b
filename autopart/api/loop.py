"""`train_loop`: the owner of loops whose steps overlap, so that the pipeline never waits for its own end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from autopart.api.feed import Feed
from autopart.api.lookahead import Lookahead
from autopart.api.module import Parallel, parallelize
from autopart.api.overlapped import Overlapped, begin
from autopart.api.programs import Asked
from autopart.ir.program import Program
from autopart.runtime.looping import Used
from autopart.runtime.transport import Pending
from autopart.runtime.updates import check_steps
from autopart.schedules.stream import check_name, compensates


class Loop(Iterator[torch.Tensor]):
    """A training loop under way: iterate over it for the losses, in the order of the batches.

    `program` is what the ranks run, None before the first batch. `used` has, for each rank of this process, its latest
    actions, each with the version of the weights that it used.
    """

    def __init__(
        self,
        model: Parallel,
        optimizer: torch.optim.Optimizer,
        items: Iterator[Any],
        schedule: str,
        *,
        compensate: bool,
    ) -> None:
        self._model, self._optimizer, self._schedule, self._compensates = model, optimizer, schedule, compensate
        self._feed = Feed(model, items)
        self._running: Overlapped | None = None
        self._ahead: Lookahead[Asked] | None = None
        self._losses: deque[Pending[torch.Tensor]] = deque()
        self._ended = False

    @property
    def program(self) -> Program | None:
        """The program of every rank, verified."""
        return self._running.compiled.program if self._running is not None else None

    @property
    def used(self) -> tuple[tuple[Used, ...], ...]:
        """For each rank here, its latest actions in order, with versions and times."""
        return self._running.used if self._running is not None else ()

    def __next__(self) -> torch.Tensor:
        while not self._ended and (self._running is None or len(self._losses) <= self._running.lag):
            asked = self._following()
            if asked is None or self._running is None:
                self.flush()
            else:
                self._add(self._running.enter(asked))
        if not self._losses:
            raise StopIteration
        return self._losses.popleft().wait().clone()

    def flush(self) -> None:
        """End the loop: no more batches are read, what is under way is finished, and the model has its final weights.

        Collective. The losses that are left can still be taken.
        """
        if not self._ended and self._running is not None:
            self._add(self._running.drain())
            self._model._autopart.loop = None
        self._ended = True

    def _add(self, loss: Pending[torch.Tensor] | None) -> None:
        if loss is not None:
            self._losses.append(loss)

    def _following(self) -> Asked | None:
        """The next batch; with the first one all begins."""
        if self._ahead is not None:
            return self._ahead.take()
        found = self._feed.first()
        if found is None:
            return None
        asked, made = found
        running = begin(self._model, self._optimizer, self._schedule, asked, made, compensates=self._compensates)
        self._ahead = self._feed.rest(made, running.compiled, running.updates.note, running.lag)
        self._running = self._model._autopart.loop = running
        return asked

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()


def train_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer],
    batches: Iterable[Any],
    *,
    schedule: str = "2bw",
    compensate: bool = True,
    **options: Any,
) -> Loop:
    """Train on all `batches` with steps that overlap; returns an iterator over their losses.

    ::

        model = autopart.parallelize(GPT(config), mesh={"pp": 4}, microbatches=8)
        for loss in autopart.train_loop(model, torch.optim.AdamW(model.parameters()), loader, schedule="2bw"):
            print(loss.item())

    The forwards of a batch begin while backwards of those before are still to come, so gradients are late: this trains
    another sequence of weights than an ordinary loop. The program itself takes the optimizer's steps, one a batch and
    stage. With w[t] the weights after t steps, g_t(w) the gradient of the mean loss of batch t, p the pipeline ranks, r
    the rank of a stage, and ``w[t] = w[0]`` for t < 0, a step of plain SGD is (other optimizers likewise, each with the
    gradient given):

    * ``"2bw"`` (PipeDream-2BW): ``w[t+1] = w[t] - lr * g_t(w[t-1])``, on all stages. A batch has at least p
      microbatches (`microbatches`, by default p). Two versions of the weights are kept.
    * ``"pipedream"`` (weight stashing): ``w_r[t+1] = w_r[t] - lr * g_t``, where forward and backward of a stage use
      ``w_r[t-(p-1-r)]``. A batch is one microbatch. Rank r keeps p - r versions.
    * ``"paci"``: a forward uses the newest weights of its stage, and its backward those that are the newest by then, at
      most ``ceil((p-1-r) / microbatches)`` steps later (by default p - 1 microbatches, so at most one). No copies.
    * ``"pb"`` (Pipelined Backpropagation): the same, a microbatch a batch, with D = 2 (p-1-r) steps between forward and
      backward. With `compensate` (for SGD with momentum mu) the forward uses ``w - lr * D * v`` and a step is
      ``v' = mu v + g; w' = w - lr (mu^D v' + (1 - mu^D) / (1 - mu) g)``; without, any optimizer, as it is.

    With a schedule that flushes (``"1f1b"``, ``"interleaved"``, ``"zb-h1"``, ...), weights are those of an ordinary
    loop: ``w[t+1] = w[t] - lr * g_t(w[t])``. It is for models whose first layers are frozen (an encoder): these are
    computed for batch t+1 where pipeline ranks would wait while batch t is trained on, by the predicted timeline, on
    every rank that has the memory to hold them (2p microbatches by default).

    A batch is what the module takes: a tensor, a tuple of arguments, a dict of keyword arguments; with
    ``parallelize(loss_fn=...)`` a pair of that and the target. All have the sizes of the first one but for the number
    of samples. They are copied when they are read, some batches ahead of the loss that is yielded. Step n goes by the
    options (learning rate) that the optimizer's groups had when batch n was read; so change these where batches come
    from::

        def batches():
            for x, y in loader:
                yield x, y
                scheduler.step()

    When the iteration ends everything is flushed: all stages have taken all steps, and `model` can be evaluated and
    saved as usual. To stop early, ``break`` and call `Loop.flush`, or use the loop in a ``with`` statement; until then
    the model refuses other calls. `optimizer` may be a function of the parameters that makes one. A `model` that is not
    parallelised yet is, with `options` (see `parallelize`; without a mesh all ranks are pipeline ranks).

    Raises TypeError or ValueError for bad arguments at once; at the first batch CaptureError for a model of which steps
    cannot overlap: parameters in parts or shared between stages, buffers that forward updates.
    """
    if isinstance(model, Parallel):
        if options:
            raise TypeError(f"{next(iter(options))}: the model is parallelised already; pass it to parallelize")
    elif not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected an nn.Module, not {type(model).__name__}")
    if isinstance(batches, Mapping | str | torch.Tensor) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected an iterable of batches, such as a loader, not {type(batches).__name__}")
    check_name(schedule)
    parallel: Parallel = model if isinstance(model, Parallel) else parallelize(model, **options)
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, parallel)
    if {id(p) for group in made.param_groups for p in group["params"]}.isdisjoint(map(id, parallel.parameters())):
        raise ValueError("optimizer: it has none of the model's parameters; make it from model.parameters()")
    compensate = compensate and compensates(schedule)
    check_steps(made, compensates=compensate)
    return Loop(parallel, made, iter(batches), schedule, compensate=compensate)


def _made(factory: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    made = factory(model.parameters()) if callable(factory) else factory
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch Optimizer or a function that makes one, not {made!r}")
    return made
