"""What a step gave: loss and spans, summed over all workers as one vector that travels while the next step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polylane.observe.timeline import Span, Timeline
from polylane.program.program import Program
from polylane.runtime.pipeline.step_state import StepState
from polylane.runtime.transport.protocol import PendingTransfer, Transport
from polylane.runtime.transport.serialization import serializable
from polylane.schedule.action import Action, ActionKind

NUMBERS = 4  # of a span, as they travel: start, end, waited, bytes

# Beyond this many workers the spans of a step are no longer gathered with its loss.
TIMELINE_WORKERS = 64


# Of as many steps a worker keeps its spans.
STEPS_KEPT = 8


for _kind in (ActionKind, Action, Span):
    serializable(_kind)


class StepResult:
    """What a step gave, the same on every worker. It is complete a little after the step: reading it waits for that.

    Where replicas go at their own pace (parameter servers with a ``staleness``), it is what the replica of this worker
    gave: nobody waits for the others to know more.
    """

    def __init__(self, step: int, samples: int, report: StepReport) -> None:
        self.step = step
        self.samples = samples
        self._report = report

    @property
    def loss(self) -> float:
        """The loss of the whole batch, before the step changed the weights."""
        return self._report.loss()

    @property
    def sums(self) -> tuple[float, float]:
        """The loss as (total, count), for means over several batches: sum of the totals over sum of the counts."""
        return self._report.sums()

    @property
    def timeline(self) -> Timeline:
        """What every worker did and when, in seconds from the step's start."""
        return self._report.timeline()


@dataclass
class StepReport:
    """Loss and spans of one step, summed over all workers as one vector that is on its way."""

    pending: PendingTransfer | None
    vector: Tensor
    programs: Sequence[Program]
    local_spans: Sequence[Span]

    def wait_complete(self) -> None:
        """Wait until it is here."""
        if self.pending is not None:
            self.vector = self.pending.wait()
            self.pending = None

    def sums(self) -> tuple[float, float]:
        self.wait_complete()
        total, count = self.vector[:2].tolist()
        return total, count

    def loss(self) -> float:
        total, count = self.sums()
        return total / count if count else float("nan")

    def timeline(self) -> Timeline:
        self.wait_complete()
        spans: list[Span] = []
        numbers = self.vector[2:].tolist()
        if not numbers:
            return Timeline(tuple(self.local_spans), len(self.programs), title="measured (this worker)").from_zero()
        at = 0
        for program in self.programs:
            for action in program.actions:
                start, end, waited, size = numbers[at : at + NUMBERS]
                at += NUMBERS
                if end > 0:
                    spans.append(Span(program.rank, action, start, end, waited, round(size)))
        return Timeline(tuple(spans), len(self.programs), title="measured").from_zero()


class StepReports:
    """The reports that are under way."""

    def __init__(self) -> None:
        self._waiting: deque[StepReport] = deque()

    def limit_in_flight(self, most: int) -> None:
        """Before a step: wait for those that were begun so many steps ago."""
        while len(self._waiting) >= most:
            self._waiting.popleft().wait_complete()

    def add_report(self, report: StepReport) -> None:
        """One more has begun."""
        self._waiting.append(report)

    def wait_all(self) -> None:
        """Wait for all."""
        while self._waiting:
            self._waiting.popleft().wait_complete()


def gather_report(
    programs: Sequence[Program],
    state: StepState,
    ahead: float,
    transport: Transport,
    device: torch.device,
    ranks: Sequence[int] | None = None,
) -> StepReport:
    """Start to gather what every worker did in a step.

    Args:
        programs: of all workers, by rank.
        state: what this worker gathered.
        ahead: seconds that its clock is ahead of rank 0's.
        transport: between all workers.
        device: where the vector travels.
        ranks: whose loss and spans are gathered, this worker's among them; the others' lanes stay empty. Default: all.
    """
    ranks = range(transport.size) if ranks is None else ranks
    gather = transport.size <= TIMELINE_WORKERS
    numbers = [0.0] * (NUMBERS * sum(len(program.actions) for program in programs) if gather else 0)
    if gather:
        begin = sum(len(program.actions) for program in programs[: transport.rank])
        place = {action: begin + i for i, action in enumerate(programs[transport.rank].actions)}
        for span in state.spans:
            at = NUMBERS * place[span.action]
            numbers[at : at + NUMBERS] = span.start - ahead, span.end - ahead, span.waited, span.bytes
    vector = torch.tensor([*state.sums(), *numbers], dtype=torch.float64, device=device)
    pending = transport.all_reduce(vector, ranks) if len(ranks) > 1 else None
    return StepReport(pending, vector, programs, state.spans)


def align_clocks(steps: Sequence[Sequence[Span]], ahead: float) -> list[Span]:
    """The spans of several steps on rank 0's clock; ``ahead``: seconds that this worker's is ahead of it."""
    return [replace(span, start=span.start - ahead, end=span.end - ahead) for spans in steps for span in spans]


def merge_timelines(lanes: Sequence[Sequence[Span]], workers: int) -> Timeline:
    """What every worker did, by rank, from zero; of those behind the first ``workers`` what they did meanwhile."""
    begin = min((span.start for lane in lanes[:workers] for span in lane), default=0.0)
    spans = tuple(span for lane in lanes for span in lane if span.start >= begin)
    return Timeline(spans, len(lanes), title="measured").from_zero()
