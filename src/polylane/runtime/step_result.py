"""Step result: loss and spans of all workers, all-reduced as one vector while the next step runs.

The vector is [total, count, changes, digests of what each worker read, by rank, facts of each worker where the step is
observed, by rank, then NUMBERS for each action of each worker's program, by rank, then norms of gradients where their
noise is measured]. A worker fills in its own numbers and leaves zeros elsewhere, so that the sum is a gather; an action
that it skipped stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.observe.timeline import Span, Timeline
from polylane.program.program import Program
from polylane.runtime.pipeline.batch_tables import BatchTables
from polylane.runtime.pipeline.running_statistics import Kept
from polylane.runtime.pipeline.sample_witness import WitnessedCall
from polylane.runtime.plain_data.serialization import serializable
from polylane.runtime.span_clock import TimedSpan
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.worker_facts import WorkerFacts, read_facts
from polylane.runtime.transport.protocol import PendingTransfer, Transport
from polylane.runtime.transport.staged import HostStaging
from polylane.schedule.action import Action, ActionKind

HEAD = 3  # numbers of a step before its digests
NUMBERS = 4  # float64 numbers of a span in the vector: start, end, waited, bytes

# Of all workers, by rank, with zeros for the others; an accelerator computes some of them, which nobody waits for.
Digests = list[int | Tensor]

# Beyond this many workers the spans of a step are no longer gathered with its loss.
TIMELINE_WORKERS = 64


# Number of last steps whose spans a worker keeps.
STEPS_KEPT = 8


for _kind in (ActionKind, Action, Span):
    serializable(_kind)


# By the name of a reduce, the groups of ranks that have it, see :attr:`.Timeline.groups`.
Groups = dict[str, tuple[tuple[int, ...], ...]]

# What a worker says of its last steps: its spans on rank 0's clock, and the groups of the latest step's reduces.
Lane = tuple[Sequence[Span], Groups]

# A pass of this worker: stage and microbatch.
Pass = tuple[int, int]


class SendKey(NamedTuple):
    """A message of this worker in a step: a value of one pass, or its gradient, to one peer."""

    stage: int
    microbatch: int
    value: str
    peer: int
    is_gradient: bool


class PendingSend(NamedTuple):
    """A send whose buffer is still in use, and the microbatch before whose backward pass the stage waits for it."""

    transfer: PendingTransfer
    until: int


@dataclass
class StepState:
    """The state of one worker in one step; most of it is by stage and microbatch, then by name of the value.

    Attributes:
        sample_slices: description of this worker's samples of each microbatch for the operators, by microbatch.
        tables: shares, message boxes and shapes for batches of this size.
        samples_in_mean: number of samples over which gradients are means.
        first_pass: number of this batch's first microbatch among all whose passes may be under way at the same time.
        values: values from other stages, until their forward pass.
        gradients: gradients of outgoing values from the stages that read them, until their backward pass; and those of
            incoming values from further stages of this worker that read them too.
        input_gradients: gradients of incoming values, until they have been sent.
        output_values: outgoing values, until their backward pass.
        pending_receives: receives that were posted ahead, by their action.
        pending_sends: sends whose buffers are still in use.
        kept_statistics: by microbatch, statistics of batch normalizations that move running ones at the step's end.
        witnessed_calls: by stage, calls of the user's own Python that are checked before the batch's update.
        loss_totals: loss of each microbatch, summed over its samples.
        loss_counts: number of samples, or sum of weights, of each of these.
        outputs: by microbatch, what the loss's computation returns besides the loss.
        changes: how many parameters of this worker the update has frozen or unfrozen.
        spans: start, end and bytes of every action so far; on an accelerator they are known once it has ended them.
    """

    sample_slices: dict[int, SampleSlice]
    tables: BatchTables
    samples_in_mean: int
    first_pass: int = 0
    values: dict[Pass, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[Pass, dict[str, Tensor]] = field(default_factory=dict)
    input_gradients: dict[Pass, dict[str, Tensor]] = field(default_factory=dict)
    output_values: dict[Pass, dict[str, Tensor]] = field(default_factory=dict)
    pending_receives: dict[Action, PendingTransfer] = field(default_factory=dict)
    pending_sends: dict[SendKey, PendingSend] = field(default_factory=dict)
    kept_statistics: dict[int, Kept] = field(default_factory=dict)
    witnessed_calls: list[list[WitnessedCall]] = field(default_factory=list)
    loss_totals: list[Tensor] = field(default_factory=list)
    loss_counts: list[Tensor | float] = field(default_factory=list)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    changes: int = 0
    spans: list[TimedSpan] = field(default_factory=list)

    def wait_sent(self, key: SendKey) -> None:
        """Wait until a message has been sent, if it has not been waited for, and release its buffer."""
        if (sent := self.pending_sends.pop(key, None)) is not None:
            sent.transfer.wait()

    def sums(self, device: torch.device) -> Tensor:
        """Return the loss that this worker computed, as float64 tensor [total, count] on a device; nobody waits."""
        return torch.stack([_add_up(self.loss_totals, device), _add_up(self.loss_counts, device)])

    def to_vector(self, numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
        """Return [total, count, *numbers] as a float64 tensor on a device, where some may be scalars; nobody waits."""
        if device.type == "cpu":
            return torch.cat([self.sums(device), torch.tensor(numbers, dtype=torch.float64)])
        values = [0.0 if isinstance(number, Tensor) else number for number in numbers]
        # torch.tensor(..., device=device) would wait for all that the device has still to compute.
        vector = HostStaging(device).to_device(torch.tensor(values, dtype=torch.float64))
        for at, number in enumerate(numbers):
            if isinstance(number, Tensor):
                vector[at] = number
        return torch.cat([self.sums(device), vector])


def _add_up(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return the sum of numbers, in order, as a float64 scalar on a device; those in tensors are on that device."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number in numbers:
        total += number
    return total


@dataclass(eq=False, repr=False)
class StepResult:
    """The result of a step, the same on every worker; it is complete a little after the step, and reading it waits.

    Where replicas are asynchronous (parameter servers with a ``staleness``), it is that of this worker's replica alone,
    so that no replica waits for another.

    Attributes:
        step: number of the step, from 0.
        samples: samples of the batch, over all replicas.

    Examples:
        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 1)
        >>> batch = torch.ones(16, 8), torch.zeros(16, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> job = polylane.parallelize(model, torch.nn.MSELoss(), sgd, example=batch, audit="off")
        >>> result = job.step(batch)
        >>> result.step, result.samples
        (0, 16)
    """

    step: int
    samples: int
    # This worker's numbers, then the sum over workers; see the module for the layout.
    _vector: Tensor
    # The all-reduce under way; None once it is complete, or where there is none.
    _pending: PendingTransfer | None = None
    # Programs of all workers, by rank, in the order of the vector; and this worker's spans, where none are gathered.
    _programs: Sequence[Program] = ()
    _local_spans: Sequence[TimedSpan] = ()
    # How many of the numbers are digests, and the comparison of them, which raises; None: there is none, or no more.
    _digests: int = 0
    _compare: Callable[[Sequence[float]], None] | None = None
    # How many of them are facts of workers; 0 where the step is not observed.
    _facts: int = 0
    # What the last numbers are, where the gradient noise is measured.
    _noise: NoiseReading | None = None
    # The numbers on their way to the host.
    _copy: PendingTransfer | None = None

    def __repr__(self) -> str:
        # To look at a result must not wait for the other workers.
        loss = f"loss {self.loss:.6g}" if self.is_complete else "still being summed"
        return f"<StepResult: step {self.step}, {self.samples} samples, {loss}>"

    def _repr_html_(self) -> str:
        """Return the facts, with the swimlane of the step once it is complete, for a notebook's cell."""
        from polylane.observe.swimlane.notebook_cell import draw_cell, draw_facts

        facts: dict[str, object] = {"step": self.step, "samples": self.samples}
        if not self.is_complete:
            return draw_facts("step, still being summed", facts)
        return draw_facts("step", {**facts, "loss": f"{self.loss:.6g}"}) + draw_cell(self.timeline)

    @property
    def loss(self) -> float:
        """The loss of the whole batch, before the step changed the weights.

        Examples:
            >>> result.loss == torch.nn.functional.mse_loss(model(batch[0]), batch[1]).item()  # that of before the step
            False
        """
        total, count = self.sums
        return total / count if count else float("nan")

    @property
    def sums(self) -> tuple[float, float]:
        """The loss as (total, count), for means over several batches: sum of the totals over sum of the counts.

        Examples:
            >>> total, count = result.sums
            >>> result.loss == total / count
            True
        """
        numbers = self._read_numbers()
        self.check_read()
        total, count = numbers[:2].tolist()
        return total, count

    @property
    def changes(self) -> int:
        """How many parameters the update has frozen or unfrozen, summed over the workers that know it."""
        return round(self._read_numbers()[HEAD - 1].item())

    @property
    def timeline(self) -> Timeline:
        """The spans of every worker, in seconds from the step's start; on accelerators of this worker alone.

        Of all workers there: ``polylane.runtime.job.Job.timeline``, which waits for their devices.

        Examples:
            >>> result.timeline.unit
            'seconds'
        """
        vector, spans = self._read_numbers(), list[Span]()
        end = len(vector) - (0 if self._noise is None else self._noise.size(self._noise.layout))
        numbers = vector[HEAD + self._digests + self._facts : end].tolist()
        if not numbers:
            title = "measured (this worker)"
            return Timeline(
                tuple(span.resolve() for span in self._local_spans), len(self._programs), title=title
            ).from_zero()
        at = 0
        for program in self._programs:
            for action in program.actions:
                start, end, waited, size = numbers[at : at + NUMBERS]
                at += NUMBERS
                if end > 0:  # zeros: an action that was skipped, or a worker that is not in the group
                    spans.append(Span(program.rank, action, start, end, waited, round(size)))
        return Timeline(tuple(spans), len(self._programs), title="measured", groups=self.groups).from_zero()

    @property
    def groups(self) -> Groups:
        """The groups of ranks of its reduces, of those that several groups have under one name."""
        return groups_of_buckets(self._programs)

    @property
    def facts(self) -> tuple[WorkerFacts, ...]:
        """What each worker says of the step, by rank; empty where the step was not observed."""
        begin = HEAD + self._digests
        return read_facts(self._read_numbers()[begin : begin + self._facts].tolist()) if self._facts else ()

    @property
    def noise(self) -> NoiseReading | None:
        """The norms of the gradients of the batch's parts and of their sum; None where they were not measured."""
        if (noise := self._noise) is None:
            return None
        return replace(noise, numbers=tuple(self._read_numbers()[-noise.size(noise.layout) :].tolist()))

    @property
    def is_complete(self) -> bool:
        """Whether the all-reduce has been waited for: before, its numbers are those of this worker alone.

        Examples:
            >>> result.is_complete
            True
        """
        return self._pending is None

    def wait_complete(self) -> None:
        """Wait until the all-reduce is complete.

        Examples:
            >>> result.wait_complete()
        """
        if self._copy is not None:
            return
        if self._pending is not None:
            self._vector = self._pending.wait()
            self._pending = None
        # Behind this step's kernels and before the next one's: who reads the loss later waits for this step alone.
        self._copy = HostStaging(self._vector.device).begin_to_host(self._vector)
        if self._vector.device.type == "cpu":  # an accelerator would have to be waited for
            self.check_read()

    def _read_numbers(self) -> Tensor:
        """Return the numbers of all workers, on the host; waits for an accelerator to have ended the step."""
        self.wait_complete()
        assert self._copy is not None
        return self._copy.wait()

    def check_read(self) -> None:
        """Compare what workers have read for this step, once it is complete; waits for an accelerator.

        Raises:
            PolylaneError: on every worker, if they have read different batches.
        """
        if self._compare is not None:
            compare, self._compare = self._compare, None
            compare(self._read_numbers()[HEAD : HEAD + self._digests].tolist())


def groups_of_buckets(programs: Sequence[Program]) -> Groups:
    """Return the groups of ranks of the buckets that several groups have under one name, for `Timeline.groups`."""
    groups: dict[str, dict[tuple[int, ...], None]] = {}
    for program in programs:
        for bucket in program.buckets:
            groups.setdefault(bucket.name, {})[bucket.ranks] = None
    return {name: tuple(ranks) for name, ranks in groups.items() if len(ranks) > 1}


def gather_result(
    step: int,
    programs: Sequence[Program],
    state: StepState,
    ahead: float,
    transport: Transport,
    device: torch.device,
    ranks: Sequence[int] | None,
    digests: Digests,
    compare: Callable[[Sequence[float]], None],
    facts: Sequence[float | Tensor] = (),
    noise: tuple[Tensor, NoiseReading] | None = None,
) -> StepResult:
    """Start the all-reduce of a step's loss and spans.

    Args:
        step: number of the step, from 0.
        programs: programs of all workers, by rank.
        state: loss and spans of this worker in the step.
        ahead: seconds that this worker's clock is ahead of rank 0's.
        transport: transport between all workers.
        device: device of the vector, as the transport's backend needs it.
        ranks: ranks whose loss and spans are summed, this worker's among them; the lanes of others stay empty. None:
            all.
        digests: of what this worker has read, by rank, with zeros for the others.
        compare: called with the digests of all these workers; it raises where they have read different batches.
        facts: what this worker says of the step, with zeros for the others; empty where the step is not observed.
        noise: this worker's numbers of the gradient noise, and what all of them are; None where it is not measured.
    """
    ranks = range(transport.size) if ranks is None else ranks
    # Spans of an accelerator are known when it has ended them, for which no step waits.
    gather = transport.size <= TIMELINE_WORKERS and device.type == "cpu"
    numbers = [0.0] * (NUMBERS * sum(len(program.actions) for program in programs) if gather else 0)
    if gather:
        # Shifted to rank 0's clock before they are summed, so that all lanes have one origin.
        begin = sum(len(program.actions) for program in programs[: transport.rank])
        positions = {action: begin + i for i, action in enumerate(programs[transport.rank].actions)}
        for span in (timed.resolve() for timed in state.spans):
            at = NUMBERS * positions[span.action]
            numbers[at : at + NUMBERS] = span.start - ahead, span.end - ahead, span.waited, span.bytes
    vector = state.to_vector([state.changes, *digests, *facts, *numbers], device)
    vector = vector if noise is None else torch.cat([vector, noise[0]])
    pending = transport.all_reduce(vector, ranks) if len(ranks) > 1 else None
    compare_read = compare if pending else None
    sizes = len(digests), compare_read, len(facts), None if noise is None else noise[1]
    return StepResult(step, state.tables.samples, vector, pending, programs, state.spans, *sizes)


def align_clocks(steps: Sequence[Sequence[TimedSpan]], ahead: float) -> list[Span]:
    """Shift the spans of several steps to rank 0's clock; ``ahead``: seconds that this worker's is ahead of it."""
    resolved_spans = [timed.resolve() for spans in steps for timed in spans]
    return [replace(span, start=span.start - ahead, end=span.end - ahead) for span in resolved_spans]


def merge_timelines(lanes: Sequence[Lane], workers: int) -> Timeline:
    """Merge the spans of all workers, by rank, into a timeline from zero; servers' earlier spans are left out.

    Args:
        lanes: of each worker, by rank.
        workers: number of workers that train; the lanes behind them are those of dedicated servers.
    """
    begin = min((span.start for lane, _ in lanes[:workers] for span in lane), default=0.0)
    spans = tuple(span for lane, _ in lanes for span in lane if span.start >= begin)
    groups = lanes[0][1] if lanes else {}
    return Timeline(spans, len(lanes), title="measured", groups=groups).from_zero()
