"""Local SGD and its family: replicas train alone for some steps, and then average their weights.

    every    warmup    outer optimizer    algorithm
    > 1      0         none               local SGD (Stich, ICLR 2019, algorithm 1)
    > 1      > 0       none               post-local SGD: all-reduce at first (Lin et al., ICLR 2020)
    > 1      any       SGD, momentum      DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1)

Means are weighted by the samples that each replica has seen since the last synchronization, as in federated averaging
(McMahan et al., AISTATS 2017), so that each sample counts equally when a batch does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from polylane.plan.sync import OuterOptimizer
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.model_state import optimized_parts
from polylane.runtime.state.optimizer_state import OptimizedPart, collect_optimizer, restore_optimizer
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.gradient_sync import GradientSync
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.sync.replica_mean import average_over_replicas, averaged_buffers, copy_values, restore_values

# Upper bound on steps in flight, however rarely replicas synchronize: a step's loss is known that many steps later.
MOST_APART = 32


@dataclass
class _ObjectiveProgress:
    """Progress of one objective since its replicas were last synchronized.

    Attributes:
        parameters: this worker's parameters or shards that the objective's optimizer holds, by name.
        trained: names of those that have required a gradient in some step: others are equal on all replicas.
        steps_taken: steps of the objective since the training began.
        samples_seen: samples of each replica since the last synchronization; empty right after one.
        outer_optimizer: DiLoCo's outer optimizer on ``anchor``, or None.
        anchor: the synchronized weights, which the outer optimizer updates, by name.
    """

    parameters: Mapping[str, nn.Parameter]
    trained: set[str] = field(default_factory=set)
    steps_taken: int = 0
    samples_seen: list[int] = field(default_factory=list)
    outer_optimizer: torch.optim.Optimizer | None = None
    anchor: dict[str, Tensor] = field(default_factory=dict)

    @property
    def trained_parameters(self) -> dict[str, Tensor]:
        """The parameters that replicas may have changed, each for itself, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if name in self.trained}

    def record_trained(self, names: Iterable[str]) -> None:
        """Record names of parameters that replicas train from now on; until now they are equal on all replicas."""
        for name in names:
            self.trained.add(name)
            if self.outer_optimizer is not None and name not in self.anchor:
                self.anchor[name] = self.parameters[name].detach().clone().requires_grad_()
                self.outer_optimizer.param_groups[0]["params"].append(self.anchor[name])


class LocalSgd(GradientSync):
    """Averages weights over replicas every ``sync.every`` steps of an objective.

    Optimizer states (momenta) stay replica-local. Running statistics are averaged with the weights.

    Args:
        holding: the parameters and buffers of this worker.
        trainers: optimizers and their parameters, by the name of the objective.
    """

    def __init__(self, holding: LocalModel, trainers: Mapping[str, ObjectiveUpdate]) -> None:
        super().__init__(holding.transport)
        self._local_model = holding
        self._sync = holding.prepared.plan.sync
        self._members = holding.prepared.plan.group(holding.world.rank, ("data",))
        self._buffers = averaged_buffers(holding)
        self._progress = {
            name: _start_progress(trainer.local_parameters, self._sync.outer) for name, trainer in trainers.items()
        }

    @property
    def max_steps_in_flight(self) -> int:  # type: ignore[override]
        # 1 during warmup, when every step all-reduces gradients.
        is_apart = any(course.steps_taken > self._sync.warmup for course in self._progress.values())
        return min(self._sync.every, MOST_APART) if is_apart else 1

    @property
    def weights_differ(self) -> bool:  # type: ignore[override]
        return any(course.samples_seen for course in self._progress.values())

    def is_replica_local(self, objective: str) -> bool:
        return self._progress[objective].steps_taken >= self._sync.warmup

    def update_weights(self, objective: str, trainer: ObjectiveUpdate, samples: bool) -> None:
        course = self._progress[objective]
        course.record_trained(n for n, p in course.parameters.items() if p.requires_grad and n not in course.trained)
        super().update_weights(objective, trainer, samples)

    def after_step(self, objective: str, samples: Sequence[int]) -> None:
        course = self._progress[objective]
        is_apart = course.steps_taken >= self._sync.warmup
        course.steps_taken += 1
        if not is_apart:
            # During warmup replicas are equal after every step: the anchor follows their weights.
            copy_values(course.anchor, {name: course.parameters[name] for name in course.anchor})
            return
        course.samples_seen = [a + b for a, b in zip(course.samples_seen or [0] * len(samples), samples, strict=True)]
        if (course.steps_taken - self._sync.warmup) % self._sync.every == 0:
            self._synchronize(course)

    def _synchronize(self, course: _ObjectiveProgress) -> None:
        tensors = {**course.trained_parameters, **self._buffers}
        means = average_over_replicas(tensors, course.samples_seen, self._members, self._transport)
        if course.outer_optimizer is not None:
            # DiLoCo: the outer gradient is anchor - mean, so that a step of rate 1 without momentum yields the mean.
            for name, anchor in course.anchor.items():
                anchor.grad = anchor.detach() - means[name]
            course.outer_optimizer.step()
            means |= {name: anchor.detach() for name, anchor in course.anchor.items()}
        copy_values(tensors, means)
        course.samples_seen = []

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        # Objectives without steps since their last synchronization are equal on all replicas already.
        courses = [course for course in self._progress.values() if any(course.samples_seen)]
        tensors: dict[str, Tensor] = {n: t for course in courses for n, t in course.trained_parameters.items()}
        if courses:
            tensors |= self._buffers
        with restore_values(tensors.values()):
            for course in courses:
                course_tensors = {**course.trained_parameters, **self._buffers}
                means = average_over_replicas(course_tensors, course.samples_seen, self._members, self._transport)
                copy_values(tensors, means)
            yield

    def collect_state(self, replica: int) -> WorkerState:
        state = WorkerState()
        for name, course in self._progress.items():
            state.plain[f"local_sgd/{name}"] = {
                "steps": course.steps_taken,
                "samples": course.samples_seen,
                "trained": sorted(course.trained),
            }
            if course.outer_optimizer is None:
                continue
            for parameter, part in self._anchor_parts(course).items():
                state.add(f"anchor/{name}/{parameter}", part.region, part.parameter)
            state.extend(collect_optimizer(f"{name}.outer", course.outer_optimizer, self._anchor_parts(course)))
        return state

    def restore_state(self, saved: SavedState, replica: int) -> None:
        for name, course in self._progress.items():
            progress = saved.plain.get(f"local_sgd/{name}", {"steps": 0, "samples": []})
            course.steps_taken = progress["steps"]
            course.record_trained(n for n in progress.get("trained", ()) if n in course.parameters)
            # Where another number of replicas goes on from the mean of all, they are synchronized.
            is_alike = len(progress["samples"]) == len(self._members)
            course.samples_seen = list(progress["samples"]) if is_alike else []
            if course.outer_optimizer is None:
                continue
            for parameter, part in self._anchor_parts(course).items():
                if saved.has(f"anchor/{name}/{parameter}"):
                    saved.fill(f"anchor/{name}/{parameter}", part.region, part.parameter.data)
                else:  # of a training without an outer optimizer: it begins with these weights
                    part.parameter.data.copy_(course.parameters[parameter].detach())
            parts, outer = self._anchor_parts(course), course.outer_optimizer
            restore_optimizer(f"{name}.outer", outer, parts, saved.plain, saved.fill)

    def _anchor_parts(self, course: _ObjectiveProgress) -> dict[str, OptimizedPart]:
        return optimized_parts(self._local_model, course.anchor)  # type: ignore[arg-type]  # leaves, no nn.Parameter


def _start_progress(parameters: Mapping[str, nn.Parameter], outer: OuterOptimizer | None) -> _ObjectiveProgress:
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if outer is None or not parameters:
        return _ObjectiveProgress(parameters, trained)
    anchor = {name: parameters[name].detach().clone().requires_grad_() for name in parameters if name in trained}
    # DiLoCo's outer optimizer is SGD with Nesterov momentum; torch refuses Nesterov without momentum.
    nesterov = outer.momentum > 0
    optimizer = torch.optim.SGD(anchor.values(), lr=outer.rate, momentum=outer.momentum, nesterov=nesterov)
    return _ObjectiveProgress(parameters, trained, outer_optimizer=optimizer, anchor=anchor)
