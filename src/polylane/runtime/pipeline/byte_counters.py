"""Traffic: bytes that left one worker, step by step, by what they are for; counted by its transports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from polylane.runtime.transport.protocol import TransportCounters

# What bytes are for: that replicas agree, values between stages, inside split operators, statistics of batches.
AGREEMENT, STAGES, OPERATORS, STATISTICS = "agreement", "stages", "operators", "statistics"


class ByteCounters:
    """What one worker sent in its steps.

    Args:
        main: of the transport for gradients and for values between stages.
        others: of further transports, by what they are for.
        theory: bytes that the worker sends in a step (0, 1, ...) of so many microbatches of an objective so that
            replicas agree, by theory.
        served: of the lines to parameter servers, where some live in this process: these answer in their own time, so
            all is counted that leaves from now on, between steps as well.
        settle: waits until every worker has what was sent to it in its steps; all must call it.
        cycle: from which step on ``theory`` repeats itself, and after how many steps.

    Attributes:
        steps_counted: that were counted, of each objective.
        bytes_sent: bytes, over all of them, by purpose; without what ``served`` counted.
        expected_bytes: bytes for agreement, over all of them, by theory.
    """

    def __init__(
        self,
        main: TransportCounters,
        others: Mapping[str, Sequence[TransportCounters]],
        theory: Callable[[str, int, int], float],
        served: Sequence[TransportCounters] = (),
        settle: Callable[[], None] = lambda: None,
        cycle: tuple[int, int] = (0, 1),
    ) -> None:
        self._main, self._others, self._expected_step_bytes = main, others, theory
        self._served, self._wait_settled, self._cycle = tuple(served), settle, cycle
        self._in_theory: dict[tuple[str, int, int], float] = {}  # by objective, step of the cycle, microbatches
        self._served_before = sum(each.sent for each in self._served)
        self.expected_bytes = 0.0
        self.steps_counted: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()

    @contextmanager
    def count_step(self, objective: str, microbatches: int) -> Iterator[None]:
        """Count what is sent meanwhile as that of one step of an objective, in so many microbatches."""
        before = self._current_bytes()
        yield
        self.bytes_sent.update(self._current_bytes() - before)
        self.expected_bytes += self._step_in_theory(objective, microbatches)
        self.steps_counted[objective] += 1

    def _step_in_theory(self, objective: str, microbatches: int) -> float:
        (begin, period), step = self._cycle, self.steps_counted[objective]
        key = objective, step if step < begin else begin + (step - begin) % period, microbatches
        if key not in self._in_theory:
            self._in_theory[key] = self._expected_step_bytes(*key)
        return self._in_theory[key]

    def _current_bytes(self) -> Counter[str]:
        between = self._main.wire["send"]
        found = Counter({STAGES: between, AGREEMENT: self._main.sent - between})
        for purpose, counters in self._others.items():
            found[purpose] += sum(each.sent for each in counters)
        return found

    def mean_bytes(self) -> dict[str, float]:
        """Bytes of a step by purpose, and ``"theory"``, the mean over all steps; all workers must ask for it."""
        self._wait_settled()
        steps, sent = max(self.steps_counted.total(), 1), Counter(self.bytes_sent)
        sent[AGREEMENT] += sum(each.sent for each in self._served) - self._served_before
        return {purpose: sent[purpose] / steps for purpose in (AGREEMENT, STAGES, OPERATORS, STATISTICS)} | {
            "theory": self.expected_bytes / steps
        }
