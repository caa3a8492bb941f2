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
        local_model: the parameters and buffers of this worker.
        updates: optimizers and their parameters, by the name of the objective.
    """

    def __init__(self, local_model: LocalModel, updates: Mapping[str, ObjectiveUpdate]) -> None:
        super().__init__(local_model.transport)
        self._local_model = local_model
        self._sync = local_model.prepared.plan.sync
        self._members = local_model.prepared.plan.group(local_model.world.rank, ("data",))
        self._buffers = averaged_buffers(local_model)
        self._progress = {
            name: _start_progress(update.local_parameters, self._sync.outer) for name, update in updates.items()
        }

    @property
    def max_steps_in_flight(self) -> int:  # type: ignore[override]
        # 1 during warmup, when every step all-reduces gradients.
        is_apart = any(objective_state.steps_taken > self._sync.warmup for objective_state in self._progress.values())
        return min(self._sync.every, MOST_APART) if is_apart else 1

    @property
    def weights_differ(self) -> bool:  # type: ignore[override]
        return any(objective_state.samples_seen for objective_state in self._progress.values())

    def is_replica_local(self, objective: str) -> bool:
        return self._progress[objective].steps_taken >= self._sync.warmup

    def update_weights(self, objective: str, update: ObjectiveUpdate, samples: bool) -> None:
        objective_state = self._progress[objective]
        objective_state.record_trained(
            n for n, p in objective_state.parameters.items() if p.requires_grad and n not in objective_state.trained
        )
        super().update_weights(objective, update, samples)

    def after_step(self, objective: str, samples: Sequence[int]) -> None:
        objective_state = self._progress[objective]
        is_apart = objective_state.steps_taken >= self._sync.warmup
        objective_state.steps_taken += 1
        if not is_apart:
            # During warmup replicas are equal after every step: the anchor follows their weights.
            copy_values(
                objective_state.anchor, {name: objective_state.parameters[name] for name in objective_state.anchor}
            )
            return
        objective_state.samples_seen = [
            a + b for a, b in zip(objective_state.samples_seen or [0] * len(samples), samples, strict=True)
        ]
        if (objective_state.steps_taken - self._sync.warmup) % self._sync.every == 0:
            self._synchronize(objective_state)

    def _synchronize(self, objective_state: _ObjectiveProgress) -> None:
        tensors = {**objective_state.trained_parameters, **self._buffers}
        means = average_over_replicas(tensors, objective_state.samples_seen, self._members, self._transport)
        if objective_state.outer_optimizer is not None:
            # DiLoCo: the outer gradient is anchor - mean, so that a step of rate 1 without momentum yields the mean.
            for name, anchor in objective_state.anchor.items():
                anchor.grad = anchor.detach() - means[name]
            objective_state.outer_optimizer.step()
            means |= {name: anchor.detach() for name, anchor in objective_state.anchor.items()}
        copy_values(tensors, means)
        objective_state.samples_seen = []

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        # Objectives without steps since their last synchronization are equal on all replicas already.
        courses = [objective_state for objective_state in self._progress.values() if any(objective_state.samples_seen)]
        tensors: dict[str, Tensor] = {
            n: t for objective_state in courses for n, t in objective_state.trained_parameters.items()
        }
        if courses:
            tensors |= self._buffers
        with restore_values(tensors.values()):
            for objective_state in courses:
                course_tensors = {**objective_state.trained_parameters, **self._buffers}
                means = average_over_replicas(
                    course_tensors, objective_state.samples_seen, self._members, self._transport
                )
                copy_values(tensors, means)
            yield

    def collect_state(self, replica: int) -> WorkerState:
        state = WorkerState()
        for name, objective_state in self._progress.items():
            state.plain[f"local_sgd/{name}"] = {
                "steps": objective_state.steps_taken,
                "samples": objective_state.samples_seen,
                "trained": sorted(objective_state.trained),
            }
            if objective_state.outer_optimizer is None:
                continue
            for parameter, part in self._anchor_parts(objective_state).items():
                state.add(f"anchor/{name}/{parameter}", part.region, part.parameter)
            state.extend(
                collect_optimizer(f"{name}.outer", objective_state.outer_optimizer, self._anchor_parts(objective_state))
            )
        return state

    def restore_state(self, saved: SavedState, replica: int) -> None:
        for name, objective_state in self._progress.items():
            progress = saved.plain.get(f"local_sgd/{name}", {"steps": 0, "samples": []})
            objective_state.steps_taken = progress["steps"]
            objective_state.record_trained(n for n in progress.get("trained", ()) if n in objective_state.parameters)
            # Another number of replicas resumes from the mean of all, and so is synchronized.
            is_alike = len(progress["samples"]) == len(self._members)
            objective_state.samples_seen = list(progress["samples"]) if is_alike else []
            if objective_state.outer_optimizer is None:
                continue
            for parameter, part in self._anchor_parts(objective_state).items():
                if saved.has(f"anchor/{name}/{parameter}"):
                    saved.fill(f"anchor/{name}/{parameter}", part.region, part.parameter.data)
                else:  # of a training without an outer optimizer: it begins with these weights
                    part.parameter.data.copy_(objective_state.parameters[parameter].detach())
            parts, outer = self._anchor_parts(objective_state), objective_state.outer_optimizer
            restore_optimizer(f"{name}.outer", outer, parts, saved.plain, saved.fill)

    def _anchor_parts(self, objective_state: _ObjectiveProgress) -> dict[str, OptimizedPart]:
        return optimized_parts(self._local_model, objective_state.anchor)  # type: ignore[arg-type]  # leaves, no nn.Parameter


def _start_progress(parameters: Mapping[str, nn.Parameter], outer: OuterOptimizer | None) -> _ObjectiveProgress:
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if outer is None or not parameters:
        return _ObjectiveProgress(parameters, trained)
    anchor = {name: parameters[name].detach().clone().requires_grad_() for name in parameters if name in trained}
    # DiLoCo's outer optimizer is SGD with Nesterov momentum; torch refuses Nesterov without momentum.
    nesterov = outer.momentum > 0
    optimizer = torch.optim.SGD(anchor.values(), lr=outer.rate, momentum=outer.momentum, nesterov=nesterov)
    return _ObjectiveProgress(parameters, trained, outer_optimizer=optimizer, anchor=anchor)
