"""What `model.report()` returns: the last step's measurements beside what was predicted of that step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopart.ir.plan import Plan
from autopart.ir.plan_text import format_bytes


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's last step. Bytes are those sent by this rank, by kind of communication.

    `peak_memory` is the largest total of parameters, gradients, live activations and transient buffers seen at the
    end of an action (the optimizer's states are not autopart's to count; `predicted_memory` leaves them out too).
    `log` has (action, start, end) in seconds. The predictions are those that `Report.beside` filled in.
    """

    rank: int
    stage: int
    bytes_sent: dict[str, int]
    peak_memory: int
    peak_activations: int
    log: tuple[tuple[str, float, float], ...]
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    predicted_memory: int = 0
    predicted_activations: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The reports of the ranks of this process: one under torchrun, all of them in the local world."""

    ranks: tuple[RankReport, ...]

    def plus(self, sent: Sequence[Mapping[str, int]]) -> Report:
        """With bytes that each rank sent after the step, such as those of reductions that had waited."""
        return Report(
            tuple(
                replace(rank, bytes_sent={kind: count + more.get(kind, 0) for kind, count in rank.bytes_sent.items()})
                for rank, more in zip(self.ranks, sent, strict=True)
            )
        )

    def beside(self, plan: Plan) -> Report:
        """With what a plan predicts of the step that was measured."""
        made = []
        for rank in self.ranks:
            memory = plan.prediction.memory[rank.stage]
            made.append(
                replace(
                    rank,
                    predicted_bytes=plan.prediction.sent_by(rank.rank),
                    predicted_memory=memory.total - memory.optimizer,
                    predicted_activations=memory.activations,
                )
            )
        return Report(tuple(made))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that the first rank here sent in its last step, by kind."""
        return self.ranks[0].bytes_sent

    @property
    def predicted_bytes(self) -> dict[str, int]:
        """What was predicted of `bytes_sent`."""
        return self.ranks[0].predicted_bytes

    @property
    def peak_memory(self) -> int:
        """Peak bytes of the first rank here."""
        return self.ranks[0].peak_memory

    @property
    def predicted_memory(self) -> int:
        """What was predicted of `peak_memory`."""
        return self.ranks[0].predicted_memory

    @property
    def log(self) -> tuple[tuple[str, float, float], ...]:
        """(action, start, end) of the first rank here."""
        return self.ranks[0].log

    def __str__(self) -> str:
        """A table with a line a rank."""
        lines = ["rank  stage  sent (predicted)          peak memory (predicted)   busy"]
        for r in self.ranks:
            sent = f"{format_bytes(sum(r.bytes_sent.values()))} ({format_bytes(sum(r.predicted_bytes.values()))})"
            peak = f"{format_bytes(r.peak_memory)} ({format_bytes(r.predicted_memory)})"
            busy = sum(end - start for _, start, end in r.log)
            lines.append(f"{r.rank:4}  {r.stage:5}  {sent:24}  {peak:24}  {busy:.3f} s")
        return "\n".join(lines)
