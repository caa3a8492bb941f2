"""What a job tells of how its workers went, and of how they agreed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polylane.observe.timeline import Span, Timeline
from polylane.plan.plan import Plan
from polylane.runtime.connections import Connections
from polylane.runtime.result import joined, on_one_clock
from polylane.runtime.sync.rule import Rule, Stepping
from polylane.runtime.sync.server_log import Update
from polylane.runtime.traffic import Traffic
from polylane.runtime.trainer import Trainer
from polylane.runtime.transport.protocol import Counters


class Accounts:
    """The part of a :class:`polylane.runtime.job.Job` that looks back.

    Attributes:
        plan: how the training is split.
    """

    plan: Plan
    _connections: Connections
    _rule: Rule
    _trainers: Mapping[str, Trainer]
    _traffic: Traffic
    _spans: deque[tuple[Span, ...]]
    _ahead: float
    _step: int

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first objective's optimizer, over the parameters that this worker holds."""
        raise NotImplementedError

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Gradients of the last step, of the parameters that this worker holds."""
        raise NotImplementedError

    def stepping(self) -> list[Stepping]:
        """The first objective's optimizers that step in this process: this worker's, or those of parameter servers."""
        trainer = next(iter(self._trainers.values()))
        elsewhere = self._rule.stepping()
        return [Stepping(trainer.optimizer, trainer.held, lambda: self._step)] if elsewhere is None else elsewhere

    @property
    def staleness(self) -> int:
        """Of this worker's last step, updates by others between reading the weights and its own (parameter servers)."""
        return self._rule.staleness

    @property
    def apart(self) -> bool:
        """Whether replicas go at their own pace: each worker knows the losses of its own replica only."""
        return self.plan.sync.serves and self.plan.sync.alone

    @property
    def counters(self) -> tuple[Counters, ...]:
        """Of every transport of this process: what was handed over, and what left, since the job was made."""
        own = (self._connections.transport, *self._connections.apart.values())
        return (*(transport.counters for transport in own), *self._rule.counters())

    def updates(self) -> tuple[tuple[Update, ...], ...]:
        """What every parameter server did, update by update, in its order; all workers must call it."""
        return self._rule.updates()

    def gathered(self, value: Any) -> list[Any]:
        """Every worker's value, by rank; all must call it.

        Args:
            value: plain: numbers, text, tensors, None, and lists, tuples, sets, dicts of these.
        """
        return self._rule.gathered(value)

    def traffic(self) -> list[dict[str, float]]:
        """Bytes that every worker sent in a step, the mean over all steps; all workers must call it.

        Of each worker, by rank: for ``"agreement"`` between replicas (gradients, weights), values between
        ``"stages"``, inside split ``"operators"``, ``"statistics"`` of batches; and as ``"theory"`` what the closed
        forms of :mod:`polylane.cost.agreement` give for agreement. Counted where tensors leave, without headers.
        """
        return self.gathered(self._traffic.means())

    def timeline(self, steps: int = 1) -> Timeline:
        """What every worker did in its last steps, on one clock; all must call it.

        Unlike :attr:`StepResult.timeline` it shows replicas beside each other that go at their own pace.

        Args:
            steps: how many; the last :data:`STEPS_KEPT` are there.
        """
        return joined(self._rule.gathered(on_one_clock([*self._spans][-steps:], self._ahead)), self.plan.workers)
