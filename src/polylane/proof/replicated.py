"""The reference for replicas that train alone: a copy of the model for each of them, in one process, in turn."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.export import snapshot
from polylane.plan.sync import Outer, Sync
from polylane.proof.reference import Loop, Reference
from polylane.proof.rounding import Rounding, zero_up_to_rounding
from polylane.runtime.prepare import Prepared, named_parameters


class Replica:
    """One replica's model, optimizer and scheduler, apart from all others.

    Args:
        prepared: of which it takes copies.
        example: a batch, for its form.
        number, count: which replica of how many.
        clip_norm, seed: as in training.
    """

    def __init__(
        self, prepared: Prepared, example: Any, number: int, count: int, clip_norm: float | None, seed: int
    ) -> None:
        objective = next(iter(prepared.objectives.values()))
        model, loss = copy.deepcopy((prepared.model, objective.loss))
        own = replace(prepared, model=model, objectives={objective.name: replace(objective, loss=loss)})
        named = named_parameters(model, [loss])
        self.model, self.optimizer = model, objective.optimizer(list(named))
        self.scheduler = objective.scheduler(self.optimizer) if objective.scheduler else None
        taken = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        optimized = {name: p for name, p in named if id(p) in taken}
        self.share = Loop(own, example, optimized, clip_norm, seed, number, count)
        self.whole = Loop(own, example, optimized, clip_norm, seed)
        self.trained: dict[str, nn.Parameter] = optimized

    def step(self, samples: bool = True) -> None:
        """The optimizer's step, where there were samples, and the scheduler's."""
        if samples:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        """What replicas agree on: trained parameters and running statistics, by name."""
        buffers = {f"buffer {name}": b for name, b in self.share.modules.named_buffers() if b.is_floating_point()}
        return {**self.trained, **buffers}

    def follow(self, other: Replica) -> None:
        """Be as another one is, its optimizer's memory included."""
        self.share.modules.load_state_dict(other.share.modules.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        if self.scheduler is not None and other.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))


def replicated_run(
    prepared: Prepared, batches: Sequence[Any], *, clip_norm: float | None, seed: int, tolerance: float
) -> Reference:
    """Train by the rule of a plan's ``sync.every``, in this process."""
    plan = prepared.plan
    replicas = [Replica(prepared, batches[0], r, plan.data, clip_norm, seed) for r in range(plan.data)]
    average = _Average(plan.sync, replicas)
    losses, rounding = list[float](), list[list[dict[str, Rounding]]]()
    first: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        together = step < plan.sync.warmup
        sums, zeros = list[tuple[float, float]](), list[dict[str, Rounding]]()
        for replica in replicas[:1] if together else replicas:
            loop = replica.whole if together else replica.share
            restore = snapshot(loop.modules, loop.loss)
            sums.append(loop.backward(batch, step))
            gradients = loop.gradients()
            if step == 0 and replica is replicas[0]:
                first = {name: g.clone() for name, g in gradients.items()}
            zeros.append(zero_up_to_rounding(gradients, loop.again(batch, step, restore), tolerance))
            replica.step(bool(loop.samples(batch)))
        losses.append(sum(total for total, _ in sums) / sum(count for _, count in sums))
        rounding.append(zeros)
        if together:
            for other in replicas[1:]:
                other.follow(replicas[0])
            average.restart()
        else:
            average.after(batch, step)
    average.settle()
    state = {name: value.detach().clone() for name, value in replicas[0].model.state_dict().items()}
    return Reference(losses, first, state, rounding, replicas[0].share.eager)


class _Average:
    """Weights of replicas and their means, weighted by the samples that each has seen."""

    def __init__(self, sync: Sync, replicas: Sequence[Replica]) -> None:
        self._sync, self._replicas = sync, replicas
        self._seen = [0] * len(replicas)
        self._anchor: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """All replicas are alike."""
        self._anchor = {name: p.detach().clone() for name, p in self._replicas[0].trained.items()}

    def after(self, batch: Any, step: int) -> None:
        """A step was taken apart."""
        for number, replica in enumerate(self._replicas):
            self._seen[number] += replica.share.samples(batch)
        if (step + 1 - self._sync.warmup) % self._sync.every == 0:
            means = self._means()
            if self._sync.outer is not None:
                self._move(self._sync.outer, means)
                means |= self._anchor
            self._set(means)

    def settle(self) -> None:
        """At the end: the mean of what there is."""
        if any(self._seen):
            self._set(self._means())

    def _means(self) -> dict[str, Tensor]:
        total, every = sum(self._seen), [replica.tensors() for replica in self._replicas]
        weighted = [(seen / total, tensors) for seen, tensors in zip(self._seen, every, strict=True)]
        return {name: sum((w * t[name].detach() for w, t in weighted), torch.zeros(())) for name in every[0]}

    def _move(self, outer: Outer, means: Mapping[str, Tensor]) -> None:
        """Nesterov's momentum on the mean change, as DiLoCo writes it."""
        for name, anchor in self._anchor.items():
            change = anchor - means[name]
            before = self._velocity.get(name, torch.zeros_like(anchor))
            self._velocity[name] = outer.momentum * before + change
            self._anchor[name] = anchor - outer.rate * (change + outer.momentum * self._velocity[name])

    def _set(self, means: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for replica in self._replicas:
                for name, tensor in replica.tensors().items():
                    tensor.copy_(means[name])
        self._seen = [0] * len(self._replicas)
