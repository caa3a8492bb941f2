"""Recipe training: a recipe's model and data with the options of a command line, loaded and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from polylane.commands import user_inputs as inputs
from polylane.commands.learning.batch_follower import check_growth
from polylane.commands.learning.noise_option import check_noise, measure_noise
from polylane.commands.requests import TrainRequest
from polylane.commands.running.recipe_data import limit_batches
from polylane.commands.running.resume import check_same_model, read_saved_plan
from polylane.commands.running.resumed_microbatches import keep_microbatches
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.sample_shares import Batch
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError, format_plural
from polylane.plan.plan import AnyPlan, Plan
from polylane.recipe import Recipe
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.data import loader as data
from polylane.runtime.data.sample_order import count_samples
from polylane.runtime.job import Job
from polylane.runtime.workers.world import World
from polylane.verify.audit.audit_start import AuditStart, start_auditor
from polylane.verify.audit.auditor_process import AuditedTraining
from polylane.verify.audit.device_rounding import DeviceRounding


@dataclass(frozen=True)
class RecipeTraining:
    """A recipe's model and data, and how they are to be trained; made before any worker computes.

    Attributes:
        request: the options of the command line.
        recipe: the user's functions, with the learning rates that the command line asks for.
        problem: the model, its loss and optimizer, and the first batch.
        train: the training data, map-style or iterable.
        test: the test data, map-style or iterable; None where there is nothing to test on.
        keeps_state: whether what is read of the training data depends on what was read before.
    """

    request: TrainRequest
    recipe: Recipe
    problem: TrainingProblem
    train: Any
    test: Any
    keeps_state: bool = False

    @cached_property
    def batch_sizes(self) -> list[int]:
        """The number of samples of each batch of an epoch; empty for an iterable dataset, whose length is not known."""
        if not data.is_mapped(self.train):
            return []
        samples = count_samples(self.train, self.recipe.sampler, self.request.seed)
        return data.batch_sizes(samples, self.request.batch, self.request.drop_last)

    @property
    def order(self) -> dict[str, Any]:
        """In which order the training data are read, as arguments of :func:`.load_batches`."""
        return {"sampler": self.recipe.sampler, "shuffle": self.request.data.overfit_batches is None}

    def open_again(self) -> Any:
        """Return the training data as they were before anything was read of them."""
        return limit_batches(inputs.open_data(self.recipe, "train"), self.request)

    @property
    def population(self) -> int | None:
        """The number of samples, each of which an epoch has once; None for a stream, or a sampler's own order."""
        return len(self.train) if data.is_mapped(self.train) and self.recipe.sampler is None else None

    @property
    def ends_before_last(self) -> bool:
        """Whether the training has fewer steps than the first epoch has batches."""
        steps = self.request.steps
        return steps is not None and steps < len(self.batch_sizes)

    @property
    def epochs(self) -> int | None:
        """The number of times through the data; None where steps are counted instead."""
        return 1 if self.request.epochs is None and self.request.steps is None else self.request.epochs

    def job(self, prepared: CompiledTraining, world: World, same_weights: bool = True) -> Job:
        """Return this worker's part in the training.

        Args:
            prepared: the problem, compiled for a plan.
            world: the process group of all workers.
            same_weights: whether all workers were forked from the process that built the model.
        """
        clip_norm, seed = self.request.clip_norm, self.request.seed
        example = self.problem.example
        job = Job(prepared, world, example=example, clip_norm=clip_norm, seed=seed, same_weights=same_weights)
        measure_noise(self.request.rates.noise_mode, job)
        return job

    def check_rates(self, prepared: CompiledTraining) -> None:
        """Refuse to measure the gradient noise, or to follow it, where the plan or the recipe does not allow it.

        Raises:
            PolylaneError: it is asked for, and not allowed.
        """
        check_noise(self.request.rates.noise_mode, prepared)
        check_growth(self.request.rates, prepared.plan, self.population)

    def batches(self, job: Job, epoch: int, start: Position, size: int) -> Iterator[Batch]:
        """Return an iterator over the batches of an epoch, with this worker's samples.

        Args:
            job: this worker's part in the training.
            epoch: number of the epoch, from 1.
            start: where the training began, or was resumed.
            size: number of samples of a step, over all workers.
        """
        request, dataset = self.request, self.train
        if epoch > 1 and isinstance(dataset, Iterator):  # an iterator is exhausted after the first epoch
            dataset = self.open_again()
        # A short last batch that no step reaches must not be refused.
        drop_last = request.drop_last or self.ends_before_last
        options: dict[str, Any] = {"drop_last": drop_last, "collate": self.recipe.collate, "start": start, **self.order}
        options |= {"workers": request.data.loader_workers, "prefetch": request.data.prefetch}
        return job.batches(dataset, size, first_epoch=epoch - 1, **options)

    def start_auditor(self, prepared: CompiledTraining, world: World) -> AuditStart:
        """Start what makes some steps a second time; every worker calls it, before it makes its job."""
        clip_norm, seed, example = self.request.clip_norm, self.request.seed, self.problem.example
        # Of data that keep state a process that reads some batches alone would get others, and it does not know how
        # large those of a batch that grows are: it gets the workers'.
        read = None if self.keeps_state or self.request.rates.largest_batch is not None else _WholeBatches(self).read
        options: dict[str, Any] = {"clip_norm": clip_norm, "seed": seed, "read_batch": read, "begins_as_built": True}
        rebuild = partial(_load_audited, self.request)
        return start_auditor(self.request.audit, prepared, world, example=example, rebuild=rebuild, **options)


def _load_audited(request: TrainRequest, plan: Plan, rounding: DeviceRounding) -> AuditedTraining:
    """Load the training in a new process that replays its steps.

    Its weights may have been drawn on another device: they are not held against those with which step 1 begins.
    """
    training = load_materials(request)
    prepared = compile_training(training.problem, plan)
    read, example = _WholeBatches(training).read, training.problem.example
    return AuditedTraining(prepared, example, request.clip_norm, request.seed, rounding, read)


class _WholeBatches:
    """Whole batches of a training's data, read in one process.

    Args:
        training: whose data they are of.
    """

    def __init__(self, training: RecipeTraining) -> None:
        self._training = training
        self._epoch, self._samples = -1, 0
        self._batches: Iterator[Batch] = iter(())

    def read(self, epoch: int, samples: int) -> Any:
        """Return the batch that begins after some samples of an epoch.

        Raises:
            PolylaneError: there is none there.
        """
        # A stream goes on from the batch that was read last: what is passed over is read all the same.
        if epoch != self._epoch or samples < self._samples or data.is_mapped(self._training.train):
            self._open(epoch, samples)
        for batch in self._batches:
            begin, self._samples = self._samples, self._samples + batch.loaded_samples
            if begin == samples:
                assert batch.form is not None
                return batch.form.rebuild(list(batch.leaves))
        raise PolylaneError(
            f"the data of epoch {epoch + 1} ends before sample {samples} when it is read by one process"
        )

    def _open(self, epoch: int, samples: int) -> None:
        training, request = self._training, self._training.request
        dataset = training.train
        if isinstance(dataset, Iterator) and self._epoch >= 0:  # it was read for another epoch
            dataset = training.open_again()
        skip = samples if data.is_mapped(dataset) else 0
        options: dict[str, Any] = {"drop_last": request.drop_last or training.ends_before_last, "skip": skip}
        self._epoch, self._samples = epoch, skip
        self._batches = data.load_batches(
            dataset,
            request.batch,
            shares=data.share_of_all,
            epoch=epoch,
            seed=request.seed,
            collate=training.recipe.collate,
            whole=True,
            **(options | training.order),
        )


def load_materials(request: TrainRequest) -> RecipeTraining:
    """Load model, data and an example batch.

    Raises:
        PolylaneError: the recipe is wrong, one of its functions raised, or the checkpoint to go on from is of another
            model.
    """
    recipe = request.rates.apply_to(inputs.open_recipe(request))
    problem, dataset, keeps_state = inputs.open_problem(recipe, request)
    test = inputs.open_data(recipe, "test")
    if request.data.overfit_batches is not None and test is not None:
        test = dataset
    dataset, test = (None if split is None else limit_batches(split, request) for split in (dataset, test))
    if request.resume_from is not None:
        check_same_model(request.resume_from, _shapes(problem))
    return RecipeTraining(request, recipe, problem, dataset, test, keeps_state)


def _shapes(problem: TrainingProblem) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter and buffer, by all of its names."""
    model = problem.model
    buffers, parameters = model.named_buffers(remove_duplicate=False), model.named_parameters(remove_duplicate=False)
    return {name: tuple(tensor.shape) for name, tensor in (*problem.parameters, *buffers, *parameters)}


def prepare_once(training: RecipeTraining, plan: AnyPlan) -> CompiledTraining:
    """Compile the training in the parent process, for workers that are forked from it.

    Raises:
        PolylaneError: the plan does not fit the model, or the last batch is too short for it.
    """

    def compile_for(plan: AnyPlan) -> CompiledTraining:
        # The evaluation graph is compiled here as well, once for all workers.
        return compile_training(training.problem, plan, evaluation=training.test is not None)

    prepared = compile_for(plan)
    if training.request.resume_from is not None:
        prepared = keep_microbatches(prepared, plan, read_saved_plan(training.request.resume_from), compile_for)
    check_last_batch(training, prepared)
    training.check_rates(prepared)
    return prepared


def check_last_batch(training: RecipeTraining, prepared: CompiledTraining) -> None:
    """Refuse a batch size with which the last batch of an epoch could not be trained on.

    Raises:
        PolylaneError: the last batch is too short for the model.
    """
    sizes = training.batch_sizes
    if sizes and not training.ends_before_last:
        description = (
            f"the last batch of an epoch ({format_plural(sum(sizes), 'sample')} in batches of {training.request.batch})"
        )
        prepared.min_samples.check(sizes[-1], description, "leave it out with --drop-last, or take another --batch")
