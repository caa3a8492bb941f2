"""The reference: one worker in a plain loop over a plan's microbatches, without any of the runtime's code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import bounds, cloned, flatten, is_sampled, part_count, sample_count, sampled_leaves, take
from polylane.graph.export import Loss, Whole, snapshot
from polylane.graph.part import Part
from polylane.graph.precision import Promoted
from polylane.graph.rounding import TRIES, nudge
from polylane.proof.record import Reference, Step
from polylane.proof.rounding import TRIES_MORE, Floors, Pass, measure
from polylane.proof.state import State, put, read
from polylane.proof.whole_graph import run_whole, tells_parts_apart, with_counts
from polylane.runtime.lane import Tensors
from polylane.runtime.prepare import Prepared, named_parameters
from polylane.samples.statistics import counts_samples


def reference_run(
    prepared: Prepared, batches: Sequence[Any], *, clip_norm: float | None, seed: int, tolerance: float
) -> Reference:
    """Train the model of a prepared training, in this process. The model itself is trained."""
    one = Trained(prepared, batches[0], clip_norm, seed)
    steps = list[tuple[Step, ...]]()
    before = one.state()
    for number, batch in enumerate(batches):
        (total, count), gradients, floors = one.passes(batch, number, tolerance)
        one.update()
        steps.append((Step(total / count, before, one.state(), gradients, floors),))
        before = steps[-1][0].after
    state = {name: value.detach().clone() for name, value in prepared.model.state_dict().items()}
    losses = [step.loss for (step,) in steps]
    return Reference(losses, steps[0][0].gradients, state, steps, one.loop.eager)


def measured_again(
    prepared: Prepared,
    batches: Sequence[Any],
    reference: Reference,
    where: Collection[tuple[int, int]],
    *,
    clip_norm: float | None,
    seed: int,
    tolerance: float,
) -> dict[tuple[int, int], Floors]:
    """The floors of some steps of some replicas, over more tries; in this process, whose model is changed."""
    found = {}
    for number, replica in where:
        step, apart = reference.at(number, replica), len(reference.steps[number])
        one = Trained(prepared, batches[0], clip_norm, seed, replica if apart > 1 else 0, apart)
        put(step.before, one.tensors(), lambda name, whole: whole)
        found[number, replica] = one.passes(batches[number], number, tolerance, range(TRIES_MORE))[2]
    return found


class Trained:
    """A model and its optimizer on one device.

    Args:
        prepared: whose model is trained, by its first objective.
        example: a batch, for its form.
        clip_norm, seed: as in training.
        replica, replicas: of each microbatch, only the samples of this one of so many.
    """

    def __init__(
        self,
        prepared: Prepared,
        example: Any,
        clip_norm: float | None,
        seed: int,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        objective = next(iter(prepared.objectives.values()))
        named = named_parameters(prepared.model, [objective.loss])
        self.optimizer = objective.optimizer(list(named))
        self.scheduler = objective.scheduler(self.optimizer) if objective.scheduler else None
        taken = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.trained = {name: p for name, p in named if id(p) in taken}
        self.loop = Loop(prepared, example, self.trained, clip_norm, seed, replica, replicas)
        self.whole = Loop(prepared, example, self.trained, clip_norm, seed) if replicas > 1 else self.loop
        self._names = {id(p): name for name, p in named}
        self._model = Tensors(prepared.model, [objective.loss], torch.device("cpu"))

    def tensors(self) -> dict[str, Tensor]:
        """Weights and buffers, by name."""
        return {**self._model.parameters(), **self._model.buffers()}

    def state(self) -> State:
        """A copy of all that the next step begins with."""
        return read(self.tensors(), self.optimizer, self._names)

    def passes(
        self, batch: Any, step: int, tolerance: float, tries: Sequence[int] = range(TRIES), together: bool = False
    ) -> tuple[tuple[float, float], dict[str, Tensor], Floors]:
        """Leave gradients in the parameters; the loss as (total, count), the gradients, and their floors."""
        loop = self.whole if together else self.loop
        restore = snapshot(loop.modules, loop.loss)
        total, count = loop.backward(batch, step)
        once = self._passed(total, count, loop)

        def again(attempt: int, permuted: bool) -> Pass:
            after = snapshot(loop.modules, loop.loss)
            restore()
            nudge(loop.modules.parameters(), attempt)
            try:
                return self._passed(*loop.backward(batch, step, attempt if permuted else None), loop)
            finally:
                after()

        floors = measure(once, again, tolerance, loop.permutes, tries) if count else Floors()
        return (total, count), dict(once.gradients), floors

    def _passed(self, total: float, count: float, loop: Loop) -> Pass:
        gradients = {name: gradient.clone() for name, gradient in loop.gradients().items()}
        buffers = {name: buffer.detach().clone() for name, buffer in self._model.buffers().items()}
        return Pass(total / count if count else 0.0, gradients, buffers)

    def update(self, samples: bool = True) -> None:
        """The optimizer's step, where there were samples, and the scheduler's."""
        if samples:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


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
        permutes: whether samples may change places: no random number is drawn by where they are.
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
        self._tensors = Tensors(prepared.model, [loss], torch.device("cpu"))
        self._run, self.eager = self._loss(prepared.model, loss, example)
        self.permutes = not self._graph.code.random

    def _loss(self, model: nn.Module, loss: Loss, example: Any) -> tuple[Run, bool]:
        """How a loss is computed, and whether that is by the model itself."""
        leaves, rebuild = flatten(example)
        whole = Whole(model, loss, rebuild)

        def by_graph(leaves: Sequence[Any], part: Part) -> tuple[Tensor, ...]:
            return run_whole(self._graph.code, self._tensors, leaves, part)

        def by_model(leaves: Sequence[Any], part: Part) -> tuple[Tensor, ...]:
            with Promoted():
                result: tuple[Tensor, ...] = whole(*leaves)
            return result

        # One device takes the batch as one. Where batch normalization sees a microbatch at a time, or a replica its own
        # samples alone, there are parts: the model itself cannot be told what the whole batch counts, its graph can.
        code = self._graph.code
        if not tells_parts_apart(code) and self._replicas == 1:
            self._microbatches = 1
        if code.random:  # which only the graph draws by key
            return by_graph, False
        if counts_samples(code.fx) and self._microbatches * self._replicas > 1:
            return by_graph, False
        part = Part(sample_count(leaves))
        plain = _runs(self.modules, loss, lambda: by_model(cloned(leaves), part))
        return (by_model, True) if plain else (by_graph, False)

    def backward(self, batch: Any, step: int, permuted: int | None = None) -> tuple[float, float]:
        """Leave the gradients of the mean over a batch in the parameters, clipped; its value, as (total, count).

        Args:
            permuted: seed of the order of the samples within their microbatch; None: as they are.
        """
        self.modules.zero_grad()
        sums = self._accumulate(batch, step, permuted)
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

    def _accumulate(self, batch: Any, step: int, permuted: int | None) -> tuple[float, float]:
        leaves = cloned(flatten(batch)[0])  # a model may write into its batch
        samples, sampled = sample_count(leaves), self._sampled if len(self._sampled) == len(leaves) else None
        shares = self._shares(samples)
        own = sum(stop - start for _, start, stop in shares)
        total, count = 0.0, 0.0
        each = [_shuffled(take(leaves, start, stop, sampled), stop - start, permuted) for _, start, stop in shares]
        parts = [Part(stop - start, start, samples, i, step, self._seed, averaged=own) for i, start, stop in shares]
        parts = with_counts(self._graph.code, self._tensors, parts, each, sampled)
        for (microbatch, start, stop), part, given in zip(shares, parts, each, strict=True):
            try:
                result = self._run(given, part)
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


def _shuffled(leaves: Sequence[Any], samples: int, seed: int | None) -> Sequence[Any]:
    """The samples in another order; leaves of the batch as a whole stay as they are."""
    if seed is None or samples == 1:
        return leaves
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return [leaf[order] if is_sampled(leaf, samples) else leaf for leaf in leaves]


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
