"""The reference: one worker in a plain loop over a plan's microbatches, without any of the runtime's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import bounds, cloned, flatten, part_count, sample_count, sampled_leaves, take
from polylane.graph.export import Loss, Whole, snapshot
from polylane.graph.graph import Code
from polylane.graph.part import Part
from polylane.graph.precision import Promoted
from polylane.proof.rounding import Rounding, nudge, zero_up_to_rounding
from polylane.runtime.lane import Tensors
from polylane.runtime.prepare import Prepared, named_parameters


@dataclass(frozen=True)
class Record:
    """What a training leaves behind.

    Attributes:
        losses: one a step.
        gradients: of the first step, by parameter, as the optimizer would take them.
        state: weights and buffers after the last step.
    """

    losses: list[float]
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference(Record):
    """What one worker leaves behind.

    Attributes:
        rounding: of every step, the gradients that are zero up to rounding: of each replica, or once for all of them.
        eager: whether the model itself was run: so it is unless it draws random numbers, which only its graph draws by
            key, or has a kernel that knows no float64.
    """

    rounding: list[list[dict[str, Rounding]]]
    eager: bool


def reference_run(
    prepared: Prepared, batches: Sequence[Any], *, clip_norm: float | None, seed: int, tolerance: float
) -> Reference:
    """Train the model of a prepared training, in this process. The model itself is trained."""
    objective = next(iter(prepared.objectives.values()))
    named = named_parameters(prepared.model, [objective.loss])
    optimizer = objective.optimizer(list(named))
    scheduler = objective.scheduler(optimizer) if objective.scheduler else None
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    loop = Loop(prepared, batches[0], {name: p for name, p in named if id(p) in taken}, clip_norm, seed)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    rounding: list[list[dict[str, Rounding]]] = []
    for step, batch in enumerate(batches):
        restore = snapshot(loop.modules, loop.loss)
        total, count = loop.backward(batch, step)
        losses.append(total / count)
        gradients = loop.gradients()
        if step == 0:
            first = {name: g.clone() for name, g in gradients.items()}
        rounding.append([zero_up_to_rounding(gradients, loop.again(batch, step, restore), tolerance)])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    state = {name: value.detach().clone() for name, value in prepared.model.state_dict().items()}
    return Reference(losses, first, state, rounding, loop.eager)


Run = Callable[[Sequence[Any], Part], tuple[Tensor, ...]]


class Loop:
    """Forward and backward passes of one worker over whole batches, or a replica's share of them, by microbatches.

    Args:
        prepared: of which it takes the model, the first objective's loss, and the number of microbatches.
        example: a batch, for its form.
        optimized: the parameters that the optimizer takes.
        clip_norm, seed: as in training.
        replica, replicas: of each microbatch, only the samples of this one of so many; gradients are of their mean.

    Attributes:
        modules: all that a step may change.
        loss: the user's.
        eager: whether the model itself is run.
    """

    def __init__(
        self,
        prepared: Prepared,
        example: Any,
        optimized: Mapping[str, nn.Parameter],
        clip_norm: float | None,
        seed: int,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._replica, self._replicas = replica, replicas
        self._graph, self._microbatches = prepared.main.graph, prepared.plan.microbatches
        self._fewest = prepared.fewest.samples
        self._optimized, self._clip_norm, self._seed = optimized, clip_norm, seed
        self._sampled = sampled_leaves(flatten(example)[0])
        self.loss = loss = next(iter(prepared.objectives.values())).loss
        self.modules = nn.ModuleList([prepared.model, *([loss] if isinstance(loss, nn.Module) else [])])
        self._run, self.eager = self._loss(prepared.model, loss, example)

    def _loss(self, model: nn.Module, loss: Loss, example: Any) -> tuple[Run, bool]:
        """How a loss is computed, and whether that is by the model itself."""
        leaves, rebuild = flatten(example)
        whole = Whole(model, loss, rebuild)
        tensors = Tensors(model, [loss], torch.device("cpu"))

        def by_graph(leaves: Sequence[Any], part: Part) -> tuple[Tensor, ...]:
            return run_whole(self._graph.code, tensors, leaves, part)[0]

        def by_model(leaves: Sequence[Any], part: Part) -> tuple[Tensor, ...]:
            with Promoted():
                result: tuple[Tensor, ...] = whole(*leaves)
            return result

        if self._graph.code.random:  # which only the graph draws by key
            return by_graph, False
        part = Part(sample_count(leaves))
        plain = _runs(self.modules, loss, lambda: by_model(cloned(leaves), part))
        return (by_model, True) if plain else (by_graph, False)

    def backward(self, batch: Any, step: int) -> tuple[float, float]:
        """Leave the gradients of the mean over a batch in the parameters, clipped; its value, as (total, count)."""
        self.modules.zero_grad()
        sums = self._accumulate(batch, step)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._optimized.values()), self._clip_norm)
        return sums

    def samples(self, batch: Any) -> int:
        """How many samples of a batch are in hand."""
        return sum(stop - start for _, start, stop in self._shares(sample_count(flatten(batch)[0])))

    def _shares(self, samples: int) -> list[tuple[int, int, int]]:
        """The samples in hand of every microbatch that has any: its number, the first and the end."""
        found = []
        for microbatch, (begin, end) in enumerate(
            bounds(samples, part_count(samples, self._microbatches, self._fewest))
        ):
            start, stop = bounds(end - begin, self._replicas)[self._replica]
            found.append((microbatch, begin + start, begin + stop))
        return [share for share in found if share[1] < share[2]]

    def _accumulate(self, batch: Any, step: int) -> tuple[float, float]:
        leaves = cloned(flatten(batch)[0])  # a model may write into its batch
        samples, sampled = sample_count(leaves), self._sampled if len(self._sampled) == len(leaves) else None
        shares = self._shares(samples)
        own = sum(stop - start for _, start, stop in shares)
        total, count = 0.0, 0.0
        for microbatch, start, stop in shares:
            part = Part(stop - start, start, samples, microbatch, step, self._seed)
            try:
                result = self._run(take(leaves, start, stop, sampled), part)
            except Exception as error:
                why = str(error).strip().partition("\n")[0]
                raise PolylaneError(
                    f"one worker fails on microbatch {microbatch}, {stop - start} of the {samples} samples of step "
                    f"{step}'s batch: {type(error).__name__}: {why}"
                ) from error
            if self._graph.mean:
                (result[0] * ((stop - start) / own)).backward()
                total, count = total + result[0].item() * (stop - start), count + (stop - start)
            else:
                result[0].backward()
                total, count = total + result[0].item(), count + result[1].item()
        if not self._graph.mean and count:
            for gradient in self.gradients().values():
                gradient /= count
        return total, count

    def gradients(self) -> dict[str, Tensor]:
        """Of the parameters that are optimized and have one."""
        return {name: p.grad for name, p in self._optimized.items() if p.grad is not None}

    def again(self, batch: Any, step: int, before: Callable[[], None]) -> Callable[[int], dict[str, Tensor]]:
        """How to compute a step's gradients once more, from nudged weights, and leave no trace.

        Args:
            before: brings back all that belongs to the model as it was before the step.
        """

        def nudged(attempt: int) -> dict[str, Tensor]:
            after = snapshot(self.modules, self.loss)
            before()
            nudge(self.modules.parameters(), attempt)
            self.backward(batch, step)
            gradients = self.gradients()
            after()
            return gradients

        return nudged


def _runs(modules: nn.Module, loss: Loss, run: Callable[[], Any]) -> bool:
    """Whether the model itself runs in float64: some of its kernels, unlike a graph's, may not."""
    restore = snapshot(modules, loss)
    try:
        with torch.no_grad():
            run()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    finally:
        restore()
    return True


def run_whole(
    code: Code, tensors: Tensors, leaves: Sequence[Any], part: Part
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Run captured code node by node on the model's own tensors: the loss, and every tensor value by node name."""
    table: dict[str, Any] = {
        "parameter": tensors.parameters(),
        "buffer": tensors.buffers(),
        "constant": code.constants,
        "input": leaves,
        "part": [part],
    }
    values: dict[fx.Node, Any] = {}
    seen: dict[str, Tensor] = {}
    result: tuple[Tensor, ...] = ()
    for node in code.fx.nodes:
        if node.op == "placeholder":
            kind, key = node.meta["role"]
            values[node] = table[kind][key]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor):
                seen[node.meta["name"]] = values[node].detach().clone()  # somebody may write to it
        else:
            result = tuple(fx.map_arg(node.args[0], values.__getitem__))
    return result, seen
