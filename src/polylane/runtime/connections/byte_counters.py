"""Byte counters: bytes that left one worker, step by step, by purpose; counted by its transports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from polylane.runtime.transport.protocol import TransportCounters

# Purposes of bytes: sync between replicas, values between stages, collectives of sharded operators, and statistics: of
# batches, and the norms of gradients.
AGREEMENT, STAGES, OPERATORS, STATISTICS = "agreement", "stages", "operators", "statistics"
NORMS = "norms"  # kind of the main transport's sums of gradients' norms


@dataclass
class ByteCounters:
    """Counts the bytes that one worker sends in its steps.

    Attributes:
        main: counters of the transport for gradients and for values between stages.
        others: counters of further transports, by purpose.
        theory: returns the bytes for sync that the worker should send, given an objective's name, the number of its
            step (0, 1, ...) and the number of microbatches.
        served: counters of the channels of parameter servers in this process: these answer at any time, so all bytes
            are counted from now on, between steps as well.
        settle: waits until every worker has received what was sent to it in its steps; collective.
        cycle: the step from which on ``theory`` is periodic, and its period in steps.
        steps_counted: number of counted steps, by objective.
        bytes_sent: bytes over all counted steps, by purpose; without those of ``served``.
        expected_bytes: bytes for sync over all counted steps, by theory.
    """

    main: TransportCounters
    others: Mapping[str, Sequence[TransportCounters]]
    theory: Callable[[str, int, int], float]
    served: Sequence[TransportCounters] = ()
    settle: Callable[[], None] = lambda: None
    cycle: tuple[int, int] = (0, 1)
    steps_counted: Counter[str] = field(default_factory=Counter)
    bytes_sent: Counter[str] = field(default_factory=Counter)
    expected_bytes: float = 0.0

    def __post_init__(self) -> None:
        self._in_theory: dict[tuple[str, int, int], float] = {}  # by objective, step of the cycle, microbatches
        self._served_before = sum(counter.sent for counter in self.served)

    @contextmanager
    def count_step(self, objective: str, microbatches: int) -> Iterator[None]:
        """Context manager: count the bytes sent inside it as one step of an objective."""
        start_bytes = self._current_bytes()
        yield
        self.bytes_sent.update(self._current_bytes() - start_bytes)
        self.expected_bytes += self._step_in_theory(objective, microbatches)
        self.steps_counted[objective] += 1

    def _step_in_theory(self, objective: str, microbatches: int) -> float:
        (begin, period), step = self.cycle, self.steps_counted[objective]
        key = objective, step if step < begin else begin + (step - begin) % period, microbatches
        # The closed form walks all parameters: it is evaluated once for each step of the cycle.
        if key not in self._in_theory:
            self._in_theory[key] = self.theory(*key)
        return self._in_theory[key]

    def _current_bytes(self) -> Counter[str]:
        # On the main transport point-to-point messages are values between stages; its collectives are sync, or norms.
        between, norms = self.main.wire["send"], self.main.wire[NORMS]
        totals = Counter({STAGES: between, STATISTICS: norms, AGREEMENT: self.main.sent - between - norms})
        for purpose, counters in self.others.items():
            totals[purpose] += sum(counter.sent for counter in counters)
        return totals

    def mean_bytes(self) -> dict[str, float]:
        """Return the mean bytes of a step by purpose, and ``"theory"``; collective."""
        self.settle()
        steps, sent = max(self.steps_counted.total(), 1), Counter(self.bytes_sent)
        sent[AGREEMENT] += sum(counter.sent for counter in self.served) - self._served_before
        return {purpose: sent[purpose] / steps for purpose in (AGREEMENT, STAGES, OPERATORS, STATISTICS)} | {
            "theory": self.expected_bytes / steps
        }
