"""Local SGD and its family: replicas train alone for some steps, and then agree on the mean of their weights.

Local SGD: Stich, ICLR 2019, algorithm 1; after a start with gradients summed in each step: post-local SGD, Lin et al.,
ICLR 2020. Means are weighted by the samples that each replica has seen, as in federated averaging (McMahan et al.,
AISTATS 2017), so that a batch that does not divide evenly counts each of its samples alike. With an optimizer of its
own for what they agree on: DiLoCo, Douillard et al., arXiv 2311.08105, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from polylane.plan.sync import OuterOptimizer, SyncOptions
from polylane.runtime.sync.gradient_sync import GradientSync
from polylane.runtime.sync.replica_mean import average_over_replicas, restore_values
from polylane.runtime.transport.protocol import Transport

# Most steps in flight, however rarely replicas agree: the loss of a step is known that many steps later.
MOST_APART = 32


@dataclass
class _ObjectiveProgress:
    """What one objective has done since its replicas last agreed.

    Attributes:
        parameters: that it trains and this worker holds, or its parts of them.
        steps_taken: of its training, from the start.
        samples_seen: samples of each replica since then.
        outer_optimizer: updates what is agreed on, or None.
        anchor: what the outer optimizer updates: the weights that were agreed on last.
    """

    parameters: Mapping[str, nn.Parameter]
    steps_taken: int = 0
    samples_seen: list[int] = field(default_factory=list)
    outer_optimizer: torch.optim.Optimizer | None = None
    anchor: dict[str, Tensor] = field(default_factory=dict)


class LocalSgd(GradientSync):
    """Replicas agree on the mean of their weights every ``sync.every`` steps of an objective.

    What a replica's optimizer remembers (momenta) stays its own. Running statistics are averaged with the weights.

    Args:
        sync: how often, after which start, with which outer optimizer.
        members: this stage's replicas: ranks that hold the same parts, in the order of the replicas.
        transport: between the workers, with a group of ``members``.
        trained: by objective, the parameters that it trains and this worker holds.
        buffers: this worker's, by name.
    """

    def __init__(
        self,
        sync: SyncOptions,
        members: Sequence[int],
        transport: Transport,
        trained: Mapping[str, Mapping[str, nn.Parameter]],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._sync = sync
        self._members, self._transport = tuple(members), transport
        self._replica_index = self._members.index(transport.rank)
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._progress = {name: _start_progress(parameters, sync.outer) for name, parameters in trained.items()}

    @property
    def max_steps_in_flight(self) -> int:  # type: ignore[override]
        """See :class:`GradientSync`: one while gradients are summed."""
        apart = any(course.steps_taken > self._sync.warmup for course in self._progress.values())
        return min(self._sync.every, MOST_APART) if apart else 1

    @property
    def weights_differ(self) -> bool:  # type: ignore[override]
        return any(course.samples_seen for course in self._progress.values())

    def is_replica_local(self, objective: str) -> bool:
        return self._progress[objective].steps_taken >= self._sync.warmup

    def after_step(self, objective: str, samples: Sequence[int]) -> None:
        course = self._progress[objective]
        apart = course.steps_taken >= self._sync.warmup
        course.steps_taken += 1
        if not apart:
            # While gradients are summed, all replicas agree after every step: the anchor follows.
            with torch.no_grad():
                for name, anchor in course.anchor.items():
                    anchor.copy_(course.parameters[name])
            return
        course.samples_seen = [a + b for a, b in zip(course.samples_seen or [0] * len(samples), samples, strict=True)]
        if (course.steps_taken - self._sync.warmup) % self._sync.every == 0:
            self._synchronize(course)

    def _synchronize(self, course: _ObjectiveProgress) -> None:
        tensors: dict[str, Tensor] = {**course.parameters, **self._buffers}
        found = self._average_tensors(tensors, course.samples_seen)
        if course.outer_optimizer is not None:
            # DiLoCo: how far the mean has moved away from the anchor is the outer optimizer's gradient.
            for name, anchor in course.anchor.items():
                anchor.grad = anchor.detach() - found[name]
            course.outer_optimizer.step()
            found |= {name: anchor.detach() for name, anchor in course.anchor.items()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(found[name])
        course.samples_seen = []

    def _average_tensors(self, tensors: Mapping[str, Tensor], seen: Sequence[int]) -> dict[str, Tensor]:
        """The mean of every tensor over the replicas, weighted by samples."""
        return average_over_replicas(tensors, seen[self._replica_index] / sum(seen), self._members, self._transport)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See :meth:`GradientSync.agreed`: the means of what the replicas have now, which changes nothing of their
        training.
        """
        courses = [course for course in self._progress.values() if any(course.samples_seen)]
        tensors: dict[str, Tensor] = {n: t for course in courses for n, t in course.parameters.items()}
        if courses:
            tensors |= self._buffers
        with restore_values(tensors.values()):
            with torch.no_grad():
                for course in courses:
                    for name, mean in self._average_tensors(
                        {**course.parameters, **self._buffers}, course.samples_seen
                    ).items():
                        tensors[name].copy_(mean)
            yield


def _start_progress(parameters: Mapping[str, nn.Parameter], outer: OuterOptimizer | None) -> _ObjectiveProgress:
    if outer is None or not parameters:
        return _ObjectiveProgress(parameters)
    anchor = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    nesterov = outer.momentum > 0
    optimizer = torch.optim.SGD(anchor.values(), lr=outer.rate, momentum=outer.momentum, nesterov=nesterov)
    return _ObjectiveProgress(parameters, outer_optimizer=optimizer, anchor=anchor)
