"""What a call returns, and what ``backward()`` of it delivers: gradients to parameters and inputs, now or later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopart import _torch
from autopart.api.boundary import deferred_outputs, input_gradients
from autopart.api.compiler import predicted_of
from autopart.api.step import Step, gradients
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.runtime import guards
from autopart.runtime.autograd import Later, Pairs, delivering
from autopart.runtime.executor import release
from autopart.runtime.report import Report
from autopart.runtime.unreduced import Share, Unreduced


class Delivery:
    """The gradients of a module's calls on their way to ``.grad``, and the last step: what ran, what was measured.

    `waiting` says that calls are made under ``no_sync()``; what they leave is in `unreduced`. `ran` is the program of
    the last step, with the samples of each data rank.
    """

    def __init__(self) -> None:
        self.waiting = False
        self.unreduced = Unreduced()
        self.report: Report | None = None
        self.ran: tuple[Program, tuple[int, ...]] | None = None
        self._predicted: tuple[Program, tuple[int, ...], Plan] | None = None

    def copied(self) -> Delivery:
        """That of a copy of the module, of which nothing waits."""
        made = Delivery()
        made.waiting, made.report, made.ran = self.waiting, self.report, self.ran
        made._predicted = self._predicted
        return made

    def predicted(self) -> Plan | None:
        """The plan of what ran, with its predictions for those samples; kept until another step is asked about."""
        if self.ran is None:
            return None
        program, shares = self.ran
        known = self._predicted
        if known is None or known[0] is not program or known[1] != shares:
            known = self._predicted = program, shares, predicted_of(program, shares)
        return known[2]

    @property
    def holds(self) -> bool:
        """Whether a training call now holds its reductions: under `no_sync`, and to go with those of such calls."""
        return self.waiting or self.unreduced.waits()

    def returned(self, step: Step, *, delivers: bool = True) -> Any:
        """What the module's forward returns, of the step that ran in its place; its loss `delivers`, or is alone."""
        self.report, self.ran = step.report, (step.program, step.shares)
        captured, outputs = step.captured, step.outputs()
        if captured.deferred:
            outputs |= self._deferred(step)
        elif captured.training and delivers:
            assert captured.loss is not None
            inputs = input_gradients(captured, step.call, step.results[0].outputs)
            outputs[captured.loss] = delivering(outputs[captured.loss], self._pairs(step, wait=self.waiting), inputs)
        given, tensors = step.passed_through, dict(step.call.tensors)
        leaves = [
            item[1] if isinstance(item, tuple) else tensors[given[item]] if item in given else outputs.get(item)
            for item in captured.result
        ]
        return _torch.pytree.tree_unflatten(leaves, captured.tree)

    def _deferred(self, step: Step) -> dict[str, torch.Tensor]:
        """The outputs of a step without a loss, whose backward runs the rest of it."""
        wait = self.waiting

        def rest(tangents: Mapping[str, torch.Tensor]) -> Pairs:
            done = step.resumed(tangents)
            self.report, self.ran = done.report, (done.program, done.shares)
            pairs = self._pairs(done, wait=wait)
            made = pairs(torch.ones(())) if callable(pairs) else pairs
            return [*made, *input_gradients(step.captured, step.call, done.results[0].outputs)]

        outputs, transport = step.results[0].outputs, step.ranks.transport
        return deferred_outputs(step.model, step.program, step.call, outputs, transport, rest)

    def _pairs(self, step: Step, *, wait: bool) -> Pairs | Later:
        """The gradients of a step; where its reductions are held, what adds them to those that wait.

        With `wait`, the call was inside ``no_sync()``; otherwise everything that waits is reduced then.
        """
        if not step.holds:
            return step.gradients()
        share = Share(step.program, tuple(result.world for result in step.results))

        def added(factor: torch.Tensor) -> Pairs:
            self.unreduced.add(share, factor, dict(step.model.named_parameters(remove_duplicate=False)))
            guards.watch()
            return [] if wait else [pair for each in self.unreduced.take() for pair in self._reduced(step, each)]

        return added

    def _reduced(self, step: Step, share: Share) -> Pairs:
        """The gradients of a share, reduced on the ranks of a step."""
        sent = step.on_each(lambda transport, world: release(world, transport), share.worlds)
        self.report = self.report.plus(sent) if self.report is not None else None
        return gradients(step.model, share.program, step.residence, [world.states for world in share.worlds])
