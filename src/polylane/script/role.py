"""Role of a worker in a prepared script: a step's passes and its update are calls of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.compile.sample_shares import Batch, BatchForm
from polylane.diagnosis.page_layout import Phase
from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, sample_count, sampled_leaves
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.partition import Partition
from polylane.graph.readings.asked_draws import StepDraws
from polylane.runtime.checkpoint.gathered_optimizer import ParameterOrder, gather_state
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.job import Job
from polylane.runtime.pipeline.step_outputs import ComputedStep, StepOutputs
from polylane.runtime.program_binder import BoundProgram
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.stale_weights import allow_own_calls
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.model_state import optimized_parts
from polylane.runtime.state.optimizer_state import OptimizedPart
from polylane.runtime.state.python_state import restore_python_state
from polylane.runtime.step_result import StepState
from polylane.runtime.sync.objective_update import restore_scales
from polylane.runtime.training_role import TrainingRole
from polylane.samples.leaf_effects import effects_by_module
from polylane.samples.split_dependence import note_draws
from polylane.script.loading.batch_rows import BatchRows


class ScriptRole(TrainingRole):
    """One worker's part in the training of a prepared script."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows = BatchRows(self.shares, self.world, self._transport, self._prepared)
        self._with_gradient = set[str]()  # canonical names of the parameters that have one, on any worker
        self._stale_weights.let_script_read()
        self._hooks.leaves_accumulated = True  # to the loop, where backward() is called
        self._binder.keeps_state = True  # in an evaluation, as where a script calls its model
        self._has_noted_draws = False
        self.describe_script: Callable[[], dict[str, Any]] | None = None

    @allow_own_calls()
    def compile_form(self, batch: Any, name: str, training: bool) -> BoundProgram:
        """Return the programs of a form of batch, compiled before a step of it; collective.

        Raises:
            PolylaneError: the plan cannot run this form.
        """
        local_batch = take_tape(batch).to_device(self._cache.sampled, self.world.device)
        with (
            torch.set_grad_enabled(training),
            self.world.progress.during(Phase.TRAINING),
            self._hooks.taken_off(),
        ):
            return self._cache.compiled_for(name, local_batch, training, draws=StepDraws(self._seed, self._step))

    def sample_slice(self, samples: int) -> SampleSlice:
        """Return a whole batch of the next step as one part, with the numbers that its random numbers depend on."""
        return SampleSlice(samples, batch=samples, step=self._step, seed=self._seed)

    def loss_scale(self, name: str) -> float:
        """Return the factor of the loss in the next passes of an objective; waits for the device."""
        scale = self._updates[name].loss_scale
        return 1.0 if scale is None else scale.scale.item()

    def local_gradients(self, computed: ComputedStep, name: str) -> dict[str, Tensor]:
        """Return what a step has computed of the gradients of this worker's parameters, by name.

        Args:
            computed: the step that was computed.
            name: name of the objective.
        """
        parameters = self._updates[name].local_parameters.items()
        return {n: computed.gradients[p] for n, p in parameters if p in computed.gradients}

    @torch.enable_grad()
    @allow_own_calls()
    def compute(self, batch: Any, name: str) -> ComputedStep:
        """Run the forward and backward passes of a step, and leave the update to :meth:`update_weights`; collective.

        Gradients that parameters have already are left in them: what this step adds is in the result.
        """
        update = self._updates[name]
        old_gradients = {parameter: parameter.grad for parameter in update.parameters}
        result, state, bound = self._run_step(take_tape(batch), name, None, self._complete_gradients)
        if not self._has_noted_draws and (note := note_draws(bound.partition.graph)):
            warnings.warn(note, stacklevel=1)  # the caller is a decorator of the standard library
            self._has_noted_draws = True
        gradients = {parameter: parameter.grad for parameter in update.parameters}
        for parameter, gradient in old_gradients.items():
            parameter.grad = gradient
        names = frozenset(n for n, info in bound.partition.graph.parameters.items() if info.trainable)
        return ComputedStep(
            result, self._outputs_of(bound, state), {p: g for p, g in gradients.items() if g is not None}, names
        )

    @allow_own_calls()
    def compute_outputs(self, batch: Any, name: str) -> StepOutputs:
        """Run a forward pass without gradients, and return what it returns besides the loss; collective."""
        state, bound, _ = self._evaluator.compute(take_tape(batch), name)
        if bound.buffers:
            self._local_model.buffers.mark_updated(bound.buffers)
        return self._outputs_of(bound, state)

    @contextmanager
    def gathered_model(self) -> Iterator[nn.Module]:
        """Context manager: the models are whole on every worker; what all write alike is kept; collective."""
        with allow_own_calls():
            state = self._full_tensors.state_dict(losses=True)
        with self.whole_model(state) as models:
            yield models

    def _outputs_of(self, bound: BoundProgram, state: StepState) -> StepOutputs:
        partition = bound.partition
        if id(partition) not in self.partitions:
            self._refuse_kept_state(partition.graph)
        self.partitions[id(partition)] = partition
        return self._evaluator.outputs_of(bound, state)

    def _refuse_kept_state(self, graph: Graph) -> None:
        """Refuse Python of the user's that keeps what the script may read, and runs on one stage's workers alone.

        Raises:
            PolylaneError: a module writes an attribute or a global, or has a hook on its backward pass.
        """
        effects = effects_by_module(graph) if self.plan.pipeline > 1 else ()
        for module, effect in effects:
            if effect.kind in ("state", "hook"):
                raise PolylaneError(
                    f"pipeline={self.plan.pipeline}: {module} {effect.describe}, and runs on the workers of its stage "
                    "alone, while the script may read that on all of them: return it from the forward, or let a "
                    "forward hook look at what the module returns, or take a plan without pipeline"
                )

    @cached_property
    def partitions(self) -> dict[int, Partition]:
        """What has run so far, of every form of tape: by its id."""
        return {}

    @allow_own_calls()
    def take_gradients(self, gradients: Mapping[str, Tensor], name: str) -> None:
        """Give this worker's parameters their parts of whole gradients, by name."""
        for parameter_name, parameter in self._updates[name].local_parameters.items():
            gradient = gradients.get(parameter_name)
            if gradient is not None and (part := self._local_model.local_part(parameter_name, gradient)) is not None:
                parameter.grad = part.reshape(parameter.shape).clone()
        self._with_gradient.update(gradients)

    def update_weights(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Make the update for the gradients that parameters have, after :meth:`compute`; collective.

        Args:
            name: name of the objective.
            optimizer: the one of the objective's optimizers that steps.
        """
        update = self._updates[name]
        with allow_own_calls(), self._hooks.taken_off():
            update.step_key = self._seed, self._step
            update.update_weights(optimizer=optimizer)
            self._required_gradients.follow_update()
            self._stale_weights.record_step(self._sync.weights_differ)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def collect_state(self) -> WorkerState:
        state = super().collect_state()
        if self.describe_script is not None and self.world.rank == 0:
            state.plain["script"] = {**self.describe_script(), "draws": self._step}
        return state

    def restore_state(self, step: int, reader: CheckpointReader, plain: Mapping[str, Any]) -> None:
        super().restore_state(_draws_of(plain, step), reader, plain)

    def continue_whole(self, plain: Mapping[str, Any]) -> None:
        """Go on from a checkpoint whose weights and optimizers' states whole models had before the training began."""
        self._step = _draws_of(plain, self._step)
        self._required_gradients.restore(plain.get("requires_grad", {}))
        restore_scales(self._updates, plain)
        replica = self.plan.stage_and_replica(self.world.rank)[1]
        restore_python_state(self._prepared, self._local_model.tensors.model, replica, plain)

    def parts_of(self, order: ParameterOrder) -> dict[str, OptimizedPart]:
        """Return what an optimizer steps on here, by name."""
        names = {name for group in order.names for name in group}
        steps_on = {n: p for update in self._updates.values() for n, p in update.local_parameters.items() if n in names}
        return optimized_parts(self._local_model, steps_on)

    # ---- what the script asks of parameters --------------------------------------------------------------------------

    @cached_property
    def has_whole_gradients(self) -> bool:
        """Whether all workers have all parameters and gradients whole."""
        plan = self.plan
        return plan.workers == 1 or (plan.pipeline == 1 and not plan.axes and plan.sync.shard == "none")

    def _first_name(self, name: str) -> str:
        return self._first_names.get(name, name)

    @cached_property
    def _first_names(self) -> dict[str, str]:
        partitions = self._prepared.partitions.values()
        return {name: first_name for partition in partitions for name, first_name in partition.graph.tied.items()}

    def is_part(self, name: str) -> bool:
        """Return whether workers hold parts of a parameter or buffer."""
        return self._local_model.is_part(self._first_name(name))

    def is_elsewhere(self, name: str) -> bool:
        """Return whether some worker does not keep a parameter or buffer up to date."""
        return self.plan.pipeline > 1 and self._first_name(name) in self._shared_names

    @cached_property
    def _shared_names(self) -> set[str]:
        return {*self._local_model.owning_stages, *self._local_model.stages_of_buffers()}

    def local_tensor(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this worker holds of a parameter."""
        return self._local_model.shards.local_tensor(self._first_name(name), tensor)

    def local_part(self, name: str, full_tensor: Tensor) -> Tensor | None:
        """Return this worker's part of a whole parameter."""
        return self._local_model.local_part(self._first_name(name), full_tensor)

    @collective("parameter")
    @allow_own_calls()
    def read_value(self, name: str) -> Tensor:
        """Return a parameter or buffer, whole on every worker's CPU; collective."""
        first_name = self._first_name(name)
        return self._full_tensors.values([first_name])[first_name]

    def has_gradient(self, name: str) -> bool:
        """Return whether a parameter has a gradient, on any worker."""
        return self._first_name(name) in self._with_gradient

    @collective("parameter.grad")
    @allow_own_calls()
    def read_gradient(self, name: str) -> Tensor:
        """Return a parameter's gradient, whole on every worker's CPU; collective."""
        first_name = self._first_name(name)
        gradient = self._full_tensors.gradients([first_name], present=True)[first_name]
        assert gradient is not None
        return gradient

    @collective("torch.autograd.grad")
    @allow_own_calls()
    def read_gradients(self, computed: ComputedStep, names: Sequence[str], objective: str) -> dict[str, Tensor]:
        """Return the gradients of a step that was computed, whole on every worker's device, by name; collective.

        Args:
            computed: the step, whose gradients parameters do not have yet.
            names: of the parameters that are asked for; those that the step does not train are left out.
            objective: name of the objective.
        """
        parameters = self._updates[objective].parameters
        old_gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = computed.gradients.get(parameter)
        try:
            trained_names = [
                self._first_name(name) for name in names if self._first_name(name) in computed.trained_names
            ]
            gradients = self._full_tensors.gradients(list(dict.fromkeys(trained_names)))
        finally:
            for parameter, gradient in old_gradients.items():
                parameter.grad = gradient
        by_name = {name: gradients.get(self._first_name(name)) for name in names}
        return {name: gradient.to(self.world.device) for name, gradient in by_name.items() if gradient is not None}

    def _holder(self, name: str) -> nn.Parameter | None:
        """Return what has this worker's part of a parameter's gradient."""
        first_name = self._first_name(name)
        holders = (update.local_parameters.get(first_name) for update in self._updates.values())
        return next((holder for holder in holders if holder is not None), None)

    def local_gradient(self, name: str) -> Tensor | None:
        """Return what this worker has of a parameter's gradient."""
        holder = self._holder(name)
        return None if holder is None else holder.grad

    def gradient_part(self, name: str, gradient: Tensor) -> Tensor | None:
        """Return this worker's part of a whole gradient."""
        first_name, holder = self._first_name(name), self._holder(name)
        if holder is None:
            return None
        part = self._local_model.shard_spec.local_shard(first_name, gradient)
        return self._local_model.shards.local_part(first_name, part)

    def set_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Give a parameter its part of a whole gradient, or take it away."""
        first_name, holder = self._first_name(name), self._holder(name)
        (self._with_gradient.discard if gradient is None else self._with_gradient.add)(first_name)
        if holder is not None:
            part = None if gradient is None else self.gradient_part(name, gradient)
            holder.grad = None if part is None else part.reshape(holder.shape).clone()

    @collective("clip_grad_norm_")
    @allow_own_calls()
    def measure_gradients(self, names: Sequence[str], order: float) -> list[Tensor]:
        """Return the norms of gradients, 0-dim tensors, from sums over the parts that workers have; collective."""
        local_model, shards = self._local_model, self._local_model.shards
        replica = self.plan.stage_and_replica(self.world.rank)[1]
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.world.device)
        for position, name in enumerate(map(self._first_name, names)):
            is_counted = shards.is_counted if name in shards.buffer_of else replica == 0
            is_owner = local_model.stage == min(local_model.owning_stages[name])
            gradient = self.local_gradient(name)
            if gradient is not None and is_counted and is_owner and local_model.shard_spec.speaks_for(name):
                sums[position] = torch.linalg.vector_norm(gradient.double(), order).pow(order)
        return list(self.sum_over_workers(sums).pow(1 / order))

    @collective("scaler.unscale_")
    def sum_over_workers(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all workers; collective."""
        return self._transport.all_reduce(values, range(self._transport.size)).wait()

    def release_model(self, state: Mapping[str, Tensor]) -> None:
        """Give the model whole values and gradients for good, and let the script call it; collective.

        Args:
            state: values of its parameters and buffers, by name.
        """
        names = sorted(self._with_gradient)
        gradients = self._full_tensors.gradients(names, present=True)
        self._with_gradient.clear()
        self._full_tensors.put_whole(state, gradients)
        self._stale_weights.release()

    def record_gradients(self, names: Iterable[str]) -> None:
        """Record which parameters a backward pass has given gradients."""
        self._with_gradient.update(names)

    def clear_gradients(self, names: Iterable[str]) -> None:
        """Take the gradients of parameters away."""
        cleared_names = self._with_gradient.intersection(map(self._first_name, names))
        self._with_gradient -= cleared_names
        for update in self._updates.values() if cleared_names else ():
            for name, parameter in update.local_parameters.items():
                if name in cleared_names:
                    parameter.grad = None


def take_tape(batch: Any) -> Batch:
    """Return a tape's batch, of which its own lengths say what is divided, whatever the first tape's was."""
    if isinstance(batch, Batch):
        return batch
    leaves, _ = flatten(batch)
    return Batch(sample_count(leaves), leaves, split=sampled_leaves(leaves), form=BatchForm.of_batch(batch))


def _draws_of(plain: Mapping[str, Any], step: int) -> int:
    """Return the number of passes that a script had made, on which random numbers depend."""
    script = plain.get("script")
    return int(script["draws"]) if isinstance(script, dict) else step


class ScriptJob(Job):
    """The training of a prepared script."""

    training_role = ScriptRole

    def record_position(self, position: Position) -> None:
        """Record where the script is, for checkpoints."""
        self._position = position

    @collective("optimizer.state_dict")
    def optimizer_state(self, optimizer: torch.optim.Optimizer, order: ParameterOrder) -> dict[str, Any]:
        """Return what an optimizer keeps for each parameter, whole and by name, on every worker; collective."""
        role = self.role
        return gather_state("loss", optimizer, role.parts_of(order), order, self._rank, role.exchange)

    @property
    def role(self) -> ScriptRole:
        """The role of this worker: prepared scripts have no dedicated servers."""
        assert isinstance(self._role, ScriptRole)
        return self._role
