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

from polylane.plan.sync import Outer, Sync
from polylane.runtime.sync.mean import means, restore_values
from polylane.runtime.sync.rule import Rule
from polylane.runtime.transport.protocol import Transport

# Most steps in flight, however rarely replicas agree: the loss of a step is known that many steps later.
MOST_APART = 32


@dataclass
class _Course:
    """What one objective has done since its replicas last agreed.

    Attributes:
        parameters: that it trains and this worker holds, or its parts of them.
        steps: of its training, from the start.
        seen: samples of each replica since then.
        outer: updates what is agreed on, or None.
        anchor: what the outer optimizer updates: the weights that were agreed on last.
    """

    parameters: Mapping[str, nn.Parameter]
    steps: int = 0
    seen: list[int] = field(default_factory=list)
    outer: torch.optim.Optimizer | None = None
    anchor: dict[str, Tensor] = field(default_factory=dict)


class LocalSteps(Rule):
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
        sync: Sync,
        members: Sequence[int],
        transport: Transport,
        trained: Mapping[str, Mapping[str, nn.Parameter]],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._sync = sync
        self._members, self._transport = tuple(members), transport
        self._index = self._members.index(transport.rank)
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._courses = {name: _started(parameters, sync.outer) for name, parameters in trained.items()}

    @property
    def slack(self) -> int:  # type: ignore[override]
        """See :class:`Rule`: one while gradients are summed."""
        apart = any(course.steps > self._sync.warmup for course in self._courses.values())
        return min(self._sync.every, MOST_APART) if apart else 1

    @property
    def differs(self) -> bool:  # type: ignore[override]
        return any(course.seen for course in self._courses.values())

    def alone(self, objective: str) -> bool:
        return self._courses[objective].steps >= self._sync.warmup

    def stepped(self, objective: str, samples: Sequence[int]) -> None:
        course = self._courses[objective]
        apart = course.steps >= self._sync.warmup
        course.steps += 1
        if not apart:
            # While gradients are summed, all replicas agree after every step: the anchor follows.
            with torch.no_grad():
                for name, anchor in course.anchor.items():
                    anchor.copy_(course.parameters[name])
            return
        course.seen = [a + b for a, b in zip(course.seen or [0] * len(samples), samples, strict=True)]
        if (course.steps - self._sync.warmup) % self._sync.every == 0:
            self._agree(course)

    def _agree(self, course: _Course) -> None:
        tensors: dict[str, Tensor] = {**course.parameters, **self._buffers}
        found = self._means(tensors, course.seen)
        if course.outer is not None:
            # DiLoCo: how far the mean has moved away from the anchor is the outer optimizer's gradient.
            for name, anchor in course.anchor.items():
                anchor.grad = anchor.detach() - found[name]
            course.outer.step()
            found |= {name: anchor.detach() for name, anchor in course.anchor.items()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(found[name])
        course.seen = []

    def _means(self, tensors: Mapping[str, Tensor], seen: Sequence[int]) -> dict[str, Tensor]:
        """The mean of every tensor over the replicas, weighted by samples."""
        return means(tensors, seen[self._index] / sum(seen), self._members, self._transport)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """See :meth:`Rule.agreed`: the means of what the replicas have now, which changes nothing of their training."""
        courses = [course for course in self._courses.values() if any(course.seen)]
        tensors: dict[str, Tensor] = {n: t for course in courses for n, t in course.parameters.items()}
        if courses:
            tensors |= self._buffers
        with restore_values(tensors.values()):
            with torch.no_grad():
                for course in courses:
                    for name, mean in self._means({**course.parameters, **self._buffers}, course.seen).items():
                        tensors[name].copy_(mean)
            yield


def _started(parameters: Mapping[str, nn.Parameter], outer: Outer | None) -> _Course:
    if outer is None or not parameters:
        return _Course(parameters)
    anchor = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    nesterov = outer.momentum > 0
    optimizer = torch.optim.SGD(anchor.values(), lr=outer.rate, momentum=outer.momentum, nesterov=nesterov)
    return _Course(parameters, outer=optimizer, anchor=anchor)
