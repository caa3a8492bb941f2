"""The reference: one process trains in a plain loop over microbatches, without any of the runtime's code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_scheduler, named_parameters, needs_metric
from polylane.errors import PolylaneError, format_plural
from polylane.graph.batch import (
    clone_leaves,
    count_parts,
    flatten,
    is_sampled,
    sample_count,
    sampled_leaves,
    split_bounds,
    take_samples,
)
from polylane.graph.capture.export import Loss, ModelWithLoss, snapshot_model
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.precision import Promoted, autocast_dtype, autocast_to
from polylane.graph.python_state.gradient_hooks import GradientHooks
from polylane.graph.rounding_noise import TRIES, nudge_values
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.parameters.optimizer import set_optimizer_mode, step_optimizer, step_scheduler
from polylane.samples.batch_statistics import needs_batch_counts
from polylane.samples.split_dependence import depends_on_split
from polylane.verify.keyed_draws import DrawsDiffer, KeyedDraws, list_draws
from polylane.verify.record import ComparedTraining, ReferenceRun, ReferenceStep
from polylane.verify.rounding_floor import TRIES_MORE, MeasuredPass, RoundingFloors, measure_floors
from polylane.verify.training_state import TrainingState, read_state, write_tensors
from polylane.verify.whole_graph import add_batch_counts, run_graph


def train_reference(training: ComparedTraining) -> ReferenceRun:
    """Train the model of a compiled training in this process; the model itself is changed."""
    model = ReferenceModel(training)
    steps, whole_loss = list[tuple[ReferenceStep, ...]](), model.loop.compute_whole_loss()
    old_state = model.copy_state()
    for number in range(len(training.batches)):
        (total, count), gradients, floors = model.run_passes(number)
        model.update_weights(loss=total / count)
        steps.append((ReferenceStep(total / count, old_state, model.copy_state(), gradients, floors),))
        old_state = steps[-1][0].after
    set_optimizer_mode(model.optimizer, False)
    state = {name: value.detach().clone() for name, value in training.prepared.model.state_dict().items()}
    losses = [step.loss for (step,) in steps]
    return ReferenceRun(losses, steps[0][0].gradients, state, steps, model.loop.is_eager, whole_loss=whole_loss)


def remeasure_floors(
    training: ComparedTraining,
    reference: ReferenceRun,
    steps: Collection[tuple[int, int]],
    tries: int = TRIES_MORE,
    rounding: AbstractContextManager[object] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[tuple[int, int], RoundingFloors]:
    """Return the floors of some steps of some replicas over more tries; the model of this process is changed.

    Args:
        training: the training that is compared.
        reference: the run whose steps are repeated, each from its own state.
        steps: (step, replica) of each step that is repeated.
        tries: number of perturbed passes of each.
        rounding: is entered for each of these; it changes how operators round, and may be entered again.
        dtype: the type whose units weights are moved by; None: their own.
    """
    floors = {}
    for number, replica in steps:
        step, replicas = reference.step_of(number, replica), len(reference.steps[number])
        model = ReferenceModel(training, replica if replicas > 1 else 0, replicas)
        write_tensors(step.before.tensors, model.named_tensors(), lambda name, tensor: tensor)
        floors[number, replica] = model.run_passes(number, range(tries), rounding=rounding, dtype=dtype)[2]
    return floors


class ReferenceModel:
    """A model and its optimizer on one device.

    Args:
        training: the training, whose model is trained by its first objective.
        replica: number of the replica whose samples of each microbatch are trained on.
        replicas: number of replicas that share the samples of each microbatch.

    Attributes:
        names: names of all parameters, by id.
    """

    def __init__(self, training: ComparedTraining, replica: int = 0, replicas: int = 1) -> None:
        self._training, objective = training, next(iter(training.prepared.objectives.values()))
        self.step_key: tuple[int, ...] = (training.seed, 0)  # what random numbers depend on that the optimizer draws
        named = named_parameters(training.prepared.model, [objective.loss])
        self.optimizer = objective.optimizer(list(named))
        set_optimizer_mode(self.optimizer, True)
        self.scheduler = build_scheduler(objective.scheduler, self.optimizer)
        # The user's optimizer may leave parameters out, which are then neither clipped nor compared.
        optimized_ids = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.trained_parameters = {name: p for name, p in named if id(p) in optimized_ids}
        self.loop = ReferenceLoop(training, self.trained_parameters, replica, replicas)
        # In the warm-up steps of local SGD replicas still share gradients: these steps take whole batches.
        self.whole_loop = ReferenceLoop(training, self.trained_parameters) if replicas > 1 else self.loop
        self.names, self._required = {id(p): n for n, p in named}, {n: p.requires_grad for n, p in named}

    def follow(self, training: ComparedTraining) -> None:
        """Go on with other batches of the same training, each of which may have a form of its own."""
        self._training = self.loop.training = self.whole_loop.training = training

    def require_gradients(self, turned: Mapping[str, bool]) -> None:
        """Freeze and unfreeze parameters.

        Args:
            turned: by name, whether a parameter requires a gradient; others do as they did at the start.
        """
        for name, parameter in self.loop.tensors.parameters().items():
            parameter.requires_grad_(turned.get(name, self._required[name]))

    def named_tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers by name, not copied."""
        return {**self.loop.tensors.parameters(), **self.loop.tensors.buffers()}

    def copy_state(self) -> TrainingState:
        """Return a copy of the state with which the next step begins."""
        return read_state(self.named_tensors(), self.optimizer, self.names)

    def run_passes(
        self,
        step: int,
        tries: Sequence[int] = range(TRIES),
        together: bool = False,
        rounding: AbstractContextManager[object] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[tuple[float, float], dict[str, Tensor], RoundingFloors]:
        """Run the passes of a step and measure their rounding floors; the gradients stay in the parameters.

        Args:
            step: number of the step, for its batch and its random numbers.
            tries: numbers of the perturbed passes, which seed them.
            together: take the whole batch, and not one replica's samples.
            rounding: is entered for each perturbed pass.
            dtype: the type whose units weights are moved by; None: their own.

        Returns:
            The loss as (total, count), the gradients by parameter, and the floors.
        """
        loop = self.whole_loop if together else self.loop
        self.step_key = self._training.seed, self._training.first_step + step
        restore = snapshot_model(loop.modules, loop.loss)
        total, count = loop.backward(step)
        once = self._build_pass(total, count, loop)

        def again(attempt: int, permuted: bool) -> MeasuredPass | None:
            # A perturbed pass starts where the step did; afterwards the model is again as the true pass left it.
            reset = snapshot_model(loop.modules, loop.loss)
            restore()
            nudge_values(loop.modules.parameters(), attempt, dtype)
            try:
                with rounding or nullcontext():
                    return self._build_pass(*loop.backward(step, attempt if permuted else None), loop)
            except PolylaneError:
                if not permuted:
                    raise
                return None  # the order of the samples means something: the nodes of a graph, where a text begins
            finally:
                reset()

        tolerance = self._training.tolerance
        floors = measure_floors(once, again, tolerance, loop.can_permute, tries) if count else RoundingFloors()
        return (total, count), dict(once.gradients), floors

    def _build_pass(self, total: float, count: float, loop: ReferenceLoop) -> MeasuredPass:
        gradients = {name: gradient.clone() for name, gradient in loop.named_gradients().items()}
        buffers = {name: buffer.detach().clone() for name, buffer in self.loop.tensors.buffers().items()}
        return MeasuredPass(total / count if count else 0.0, gradients, buffers)

    def update_weights(self, samples: bool = True, loss: float | None = None) -> None:
        """Step the optimizer, where there were samples, and the scheduler, with the loss if it needs one."""
        if samples:
            step_optimizer(self.optimizer, self.step_key)
        step_scheduler(self.scheduler, loss if needs_metric(self.scheduler) else None)


Run = Callable[[Sequence[Any], SampleSlice], tuple[Tensor, ...]]


class ReferenceLoop:
    """Forward and backward passes of one process over whole batches, or over one replica's samples, by microbatches.

    Args:
        training: the training, of which the model, the first objective's loss and the microbatches are used.
        optimized: the parameters that the optimizer updates, by name.
        replica: number of the replica whose samples of each microbatch are used.
        replicas: number of replicas that share the samples of each microbatch; gradients are of this one's mean.

    Attributes:
        training: the training, whose batches are computed on.
        modules: the model and a loss module: all that a step may change.
        loss: the user's loss function or module.
        tensors: weights and buffers of both, by name.
        is_eager: whether the model itself is run, and not its captured graph.
        can_permute: whether samples may be permuted: no random number depends on a sample's place.
    """

    def __init__(
        self, training: ComparedTraining, optimized: Mapping[str, nn.Parameter], replica: int = 0, replicas: int = 1
    ) -> None:
        self.training, self._replica, self._replicas = training, replica, replicas
        prepared, example = training.prepared, training.batches[0]
        self._graph, self._microbatches = prepared.main_partition.graph, prepared.plan.microbatches
        self._running = self._graph  # that of the form of the batch that is computed on
        self._min_samples = prepared.min_samples.samples
        self._optimized = optimized
        self._sampled = sampled_leaves(flatten(example)[0])
        self.loss = loss = next(iter(prepared.objectives.values())).given_loss
        self.modules = nn.ModuleList([prepared.model, *([loss] if isinstance(loss, nn.Module) else [])])
        self.tensors = ModelTensors(prepared.model, [loss], torch.device("cpu"))
        self._compute_loss, self.is_eager = self._choose_loss(prepared.model, loss, example)
        self.can_permute = not self._graph.code.random

    def _choose_loss(self, model: nn.Module, loss: Loss, example: Any) -> tuple[Run, bool]:
        """Return the function that computes the loss, and whether that runs the model itself."""
        leaves, rebuild = flatten(example)
        self._whole = model_with_loss = ModelWithLoss(model, loss, rebuild)
        promotes = self.training.prepared.in_float64

        def by_graph(leaves: Sequence[Any], part: SampleSlice) -> tuple[Tensor, ...]:
            with nullcontext() if promotes else self._autocast():
                return run_graph(self._running.code, self.tensors, leaves, part)

        def by_model(leaves: Sequence[Any], part: SampleSlice) -> tuple[Tensor, ...]:
            with Promoted() if promotes else self._autocast():
                result: tuple[Tensor, ...] = model_with_loss(*leaves)
            return result

        # One device takes the batch whole, unless BatchNorm or random numbers see microbatches, or replicas train on
        # their own samples. Then a mean over counts needs the counts of the whole batch: only the graph can be given
        # them, the model itself cannot.
        code = self._graph.code
        if not depends_on_split(code) and self._replicas == 1:
            self._microbatches = 1
        # The model itself is given the graph's random numbers, where it draws them in the graph's order.
        self._draws = list_draws(code) if code.random else []
        if self._draws is None:
            return by_graph, False
        # So can only the graph be given the whole batch's answers to what the loss asks.
        if (needs_batch_counts(code.fx) or code.readings) and self._microbatches * self._replicas > 1:
            return by_graph, False
        part = SampleSlice(sample_count(leaves), batch=sample_count(leaves))
        if self._draws and not self._draws_alike(lambda: by_model(clone_leaves(leaves), part), part):
            return by_graph, False
        plain = not promotes or _runs_in_float64(self.modules, loss, lambda: by_model(clone_leaves(leaves), part))
        return (by_model, True) if plain else (by_graph, False)

    def _draws_alike(self, run: Callable[[], tuple[Tensor, ...]], part: SampleSlice) -> bool:
        """Return whether the model draws, forward and backward, what its graph does."""
        restore = snapshot_model(self.modules, self.loss)
        try:
            with GradientHooks(self._optimized).taken_off(), self._drawing(part):
                run()[0].backward()
        # Its kernels may lack float64, or its Python refuse this batch: then the graph computes the reference.
        except (DrawsDiffer, RuntimeError, NotImplementedError, TypeError):
            return False
        finally:
            restore()
        return True

    @contextmanager
    def _drawing(self, part: SampleSlice) -> Iterator[None]:
        """Context manager around a pass of the model itself, which draws the plan's random numbers inside."""
        if not self._draws:
            yield
            return
        with KeyedDraws(self._draws, part) as draws:
            yield
        draws.check_all_drawn()

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager of the plan's precision; in float64 there is none."""
        return autocast_to(autocast_dtype(self.training.prepared.plan.precision), "cpu")

    def backward(self, step: int, permuted: int | None = None) -> tuple[float, float]:
        """Leave the clipped gradients of the mean over a batch in the parameters; return the loss as (total, count).

        Args:
            step: number of the step, for its batch and its random numbers.
            permuted: seed of a permutation of the samples within their microbatch; None: as they are.
        """
        self.modules.zero_grad()
        hooks = GradientHooks(self._optimized)
        with hooks.taken_off():
            sums = self._accumulate_gradients(step, permuted)
            hooks.run(self._optimized, self.training.seed, self.training.first_step + step)
        if self.training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._optimized.values()), self.training.clip_norm)
        return sums

    def compute_whole_loss(self) -> float | None:
        """Return the loss of the first batch as a whole, where microbatches decide what is computed; else None."""
        if self._microbatches == 1 or not depends_on_split(self._graph.code):
            return None
        restore, microbatches = snapshot_model(self.modules, self.loss), self._microbatches
        self._microbatches = 1
        try:
            total, count = self._accumulate_gradients(0, None)
        finally:
            self._microbatches = microbatches
            self.modules.zero_grad()
            restore()
        return total / count if count else None

    def count_samples(self, step: int) -> int:
        """Return how many samples of a step's batch this replica trains on."""
        leaves, _ = flatten(self.training.batches[step])
        return sum(stop - start for _, start, stop in self._local_ranges(sample_count(leaves)))

    def _local_ranges(self, samples: int) -> list[tuple[int, int, int]]:
        """Return (microbatch, first, end) of this replica's samples, for every microbatch in which it has any."""
        shares = []
        for microbatch, (begin, end) in enumerate(
            split_bounds(samples, count_parts(samples, self._microbatches, self._min_samples))
        ):
            start, stop = split_bounds(end - begin, self._replicas)[self._replica]
            shares.append((microbatch, begin + start, begin + stop))
        return [share for share in shares if share[1] < share[2]]

    def _accumulate_gradients(self, step: int, permuted: int | None) -> tuple[float, float]:
        leaves, rebuild = flatten(self.training.batches[step])
        leaves, self._whole.rebuild = clone_leaves(leaves), rebuild  # a model may write into its batch
        number = self.training.first_step + step
        samples, sampled = sample_count(leaves), self._sampled if len(self._sampled) == len(leaves) else None
        shares = self._local_ranges(samples)
        loss_samples = sum(stop - start for _, start, stop in shares)
        total, count = 0.0, 0.0
        inputs = [
            _shuffle_samples(take_samples(leaves, start, stop, sampled), stop - start, permuted)
            for _, start, stop in shares
        ]
        parts = [
            SampleSlice(stop - start, start, samples, i, number, self.training.seed, loss_samples=loss_samples)
            for i, start, stop in shares
        ]
        if not self.is_eager:
            self._running = self.training.compiled_for(step).main_partition.graph
        parts = add_batch_counts(self._running.code, self.tensors, parts, inputs, sampled)
        for (microbatch, start, stop), part, part_inputs in zip(shares, parts, inputs, strict=True):
            drawing = self._drawing(part) if self.is_eager else nullcontext()
            with drawing:
                try:
                    result = self._compute_loss(part_inputs, part)
                except DrawsDiffer:  # says by itself which draw it is
                    raise
                except Exception as error:
                    why = str(error).strip().partition("\n")[0]
                    raise PolylaneError(
                        f"one worker fails on microbatch {microbatch}, {stop - start} of "
                        f"{format_plural(samples, 'sample')} of step {number}'s batch: {type(error).__name__}: {why}"
                    ) from error
                # A mean is weighted by its part of the samples now. The totals of polylane.Mean are summed as they are,
                # and divided by the total count after the last microbatch.
                weight = (stop - start) / loss_samples if self._graph.loss_is_mean else 1.0
                result[0].backward(torch.full_like(result[0], weight * self.training.loss_scale))
            if self._graph.loss_is_mean:
                total, count = total + result[0].item() * (stop - start), count + (stop - start)
            else:
                total, count = total + result[0].item(), count + result[1].item()
        divisor = self.training.loss_scale * (1.0 if self._graph.loss_is_mean or not count else count)
        for gradient in self.named_gradients().values() if divisor != 1 else ():
            gradient /= divisor
        return total, count

    def named_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the optimized parameters that have one."""
        return {name: p.grad for name, p in self._optimized.items() if p.grad is not None}


def _shuffle_samples(leaves: Sequence[Any], samples: int, seed: int | None) -> Sequence[Any]:
    """Return a microbatch with its samples permuted; leaves that have no row for each sample stay as they are."""
    if seed is None or samples == 1:
        return leaves
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    return [leaf[order] if is_sampled(leaf, samples) else leaf for leaf in leaves]


def _runs_in_float64(modules: nn.Module, loss: Loss, run: Callable[[], Any]) -> bool:
    """Return whether the model itself runs in float64: some of its kernels, unlike those of its graph, may not."""
    restore = snapshot_model(modules, loss)
    try:
        with torch.no_grad():
            run()
    except (RuntimeError, NotImplementedError, TypeError):  # as torch's kernels refuse a dtype
        return False
    finally:
        restore()
    return True
