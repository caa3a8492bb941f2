"""Local SGD reference: a copy of the model for each replica, trained one after the other in one process.

The rule is that of Stich, "Local SGD Converges Fast and Communicates Little", 2019; with ``outer`` that of Douillard et
al., "DiLoCo", 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polylane.graph.python_state.gradient_hooks import copy_hooks
from polylane.plan.sync import OuterOptimizer, SyncOptions
from polylane.verify.record import ComparedTraining, ReferenceRun, ReferenceStep
from polylane.verify.reference import ReferenceModel


class ReferenceReplica(ReferenceModel):
    """The model, optimizer and scheduler of one replica, separate from all others.

    Args:
        training: the training, of whose model and loss the replica takes copies.
        number: number of this replica, from 0.
        count: number of replicas that share each microbatch.
    """

    def __init__(self, training: ComparedTraining, number: int, count: int) -> None:
        prepared = training.prepared
        objective = next(iter(prepared.objectives.values()))
        self.model, loss = copy.deepcopy((prepared.model, objective.loss))
        copy_hooks(prepared.model, self.model)
        prepared_copy = replace(prepared, model=self.model, objectives={objective.name: replace(objective, loss=loss)})
        super().__init__(replace(training, prepared=prepared_copy), number, count)

    def averaged_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that replicas average: trained parameters and running statistics, by name."""
        buffers = {f"buffer {name}": b for name, b in self.loop.modules.named_buffers() if b.is_floating_point()}
        return {**self.trained_parameters, **buffers}

    def copy_from(self, source: ReferenceReplica) -> None:
        """Copy the weights, optimizer state and scheduler of another replica."""
        self.loop.modules.load_state_dict(source.loop.modules.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        if self.scheduler is not None and source.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(source.scheduler.state_dict()))


def train_local_sgd(training: ComparedTraining) -> ReferenceRun:
    """Train by the rule of a plan's ``sync.every`` in this process."""
    plan = training.prepared.plan
    replicas = [ReferenceReplica(training, number, plan.data) for number in range(plan.data)]
    average = ReplicaAverage(plan.sync, replicas)
    losses, steps = list[float](), list[tuple[ReferenceStep, ...]]()
    starts = [replica.copy_state() for replica in replicas]
    for number in range(len(training.batches)):
        # In a warm-up step gradients are summed over replicas: one replica computes it on the whole batch, and the
        # others copy the result.
        is_warmup = number < plan.sync.warmup
        passed = []
        for replica in replicas[:1] if is_warmup else replicas:
            passed.append(replica.run_passes(number, together=is_warmup))
            replica.update_weights(bool((replica.whole_loop if is_warmup else replica.loop).count_samples(number)))
        updated = [
            {n: p.detach().clone() for n, p in r.trained_parameters.items()} for r in ([] if is_warmup else replicas)
        ]
        # The printed loss is the mean over all replicas' samples, not the mean of the replicas' means.
        losses.append(sum(total for (total, _), *_ in passed) / sum(count for (_, count), *_ in passed))
        if is_warmup:
            for follower in replicas[1:]:
                follower.copy_from(replicas[0])
            average.reset_anchor()
        else:
            average.record_step(number, number)
        ends = [replica.copy_state() for replica in replicas]
        rows = zip(passed, starts, ends, updated or [{}], strict=False)  # not strict: a warm-up step has one record
        steps.append(
            tuple(
                ReferenceStep(total / count if count else 0.0, earlier, later, gradients, floors, updated_weights)
                for ((total, count), gradients, floors), earlier, later, updated_weights in rows
            )
        )
        starts = ends
    average.finish_training()
    state = {name: value.detach().clone() for name, value in replicas[0].model.state_dict().items()}
    return ReferenceRun(losses, steps[0][0].gradients, state, steps, replicas[0].loop.is_eager)


class ReplicaAverage:
    """The averages of the replicas' weights, weighted by the samples that each has seen since the last average."""

    def __init__(self, sync: SyncOptions, replicas: Sequence[ReferenceReplica]) -> None:
        self._sync, self._replicas = sync, replicas
        self._samples_seen = [0] * len(replicas)
        self._anchor: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}
        self.reset_anchor()

    def reset_anchor(self) -> None:
        """Take the weights of replica 0, which all replicas share now, as those from which DiLoCo measures change."""
        self._anchor = {name: p.detach().clone() for name, p in self._replicas[0].trained_parameters.items()}

    def restore(self, samples: Sequence[int], anchors: Mapping[str, Tensor], velocities: Mapping[str, Tensor]) -> None:
        """Go on from the last average of another run.

        Args:
            samples: samples of each replica since then; empty right after one.
            anchors: the weights that replicas shared then, by name, where an outer optimizer moves them.
            velocities: the outer optimizer's momentum, by name.
        """
        self._samples_seen = list(samples) or [0] * len(self._replicas)
        self._anchor, self._velocity = dict(anchors), dict(velocities)

    def record_step(self, number: int, step: int) -> None:
        """Count the samples of a local step, and average the weights after every ``every`` steps.

        Args:
            number: of the step among those whose batches are there.
            step: number of the step in the training.
        """
        for index, replica in enumerate(self._replicas):
            self._samples_seen[index] += replica.loop.count_samples(number)
        if (step + 1 - self._sync.warmup) % self._sync.every == 0:
            means = self._compute_means()
            if self._sync.outer is not None:
                self._apply_outer_step(self._sync.outer, means)
                means |= self._anchor  # the outer optimizer moves weights; running statistics are plain means
            self._set_weights(means)

    def finish_training(self) -> None:
        """Average what the replicas have trained since the last average, at the end of the training."""
        if any(self._samples_seen):
            self._set_weights(self._compute_means())

    def _compute_means(self) -> dict[str, Tensor]:
        total, replica_tensors = sum(self._samples_seen), [replica.averaged_tensors() for replica in self._replicas]
        weighted = [
            (samples / total, tensors) for samples, tensors in zip(self._samples_seen, replica_tensors, strict=True)
        ]
        return {name: sum((w * t[name].detach() for w, t in weighted), torch.zeros(())) for name in replica_tensors[0]}

    def _apply_outer_step(self, outer: OuterOptimizer, means: Mapping[str, Tensor]) -> None:
        """Apply Nesterov momentum to the mean change since the last average (DiLoCo's outer optimizer)."""
        for name, anchor in self._anchor.items():
            change = anchor - means[name]
            velocity = self._velocity.get(name, torch.zeros_like(anchor))
            self._velocity[name] = outer.momentum * velocity + change
            self._anchor[name] = anchor - outer.rate * (change + outer.momentum * self._velocity[name])

    def _set_weights(self, means: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for replica in self._replicas:
                for name, tensor in replica.averaged_tensors().items():
                    tensor.copy_(means[name])
        self._samples_seen = [0] * len(self._replicas)
