"""Trainings of a loop: what runs its tapes, on the whole models at first, then under the plan.

plain     until what every optimizer trains has been seen in a tape: on whole models, by torch's autograd
planned   from then on: the programs of the plan, on each worker's part
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from polylane.diagnosis.page_layout import Phase
from polylane.errors import CallsDiffer, PolylaneError
from polylane.graph.capture.export import snapshot_model
from polylane.graph.capture.output_request import LossWithOutputs
from polylane.graph.precision import autocast_dtype, autocast_to
from polylane.graph.python_state.random_generators import generator_states, generators_kept, states_equal
from polylane.graph.readings.batch_readings import ask_batches
from polylane.graph.rounding_noise import nudge_values
from polylane.runtime.pipeline.step_outputs import ComputedStep, StepOutputs
from polylane.runtime.stale_weights import allow_own_calls
from polylane.samples.split_dependence import depends_on_split
from polylane.script.loading.input_layout import UNDIVIDED, BatchDim, TapeLayout, count_common, try_layouts
from polylane.script.loading.loaded_batch import LoadedRows, TapeInput, gather_inputs, shape_of
from polylane.script.model_results import ModelCall
from polylane.script.role import ScriptRole, take_tape
from polylane.script.tape import Models, Tape, replay_tape
from polylane.verify.audit.passes_audit import PassesAudit
from polylane.verify.audit.step_replay import list_cast_dtypes
from polylane.verify.keyed_draws import KeyedDraws, list_draws
from polylane.verify.rounding_floor import MeasuredPass

OBJECTIVE = "loss"


@dataclass
class TapeRun:
    """One run of a tape.

    Attributes:
        is_accumulated: whether ``backward()`` has added the gradients.
    """

    is_accumulated: bool = field(default=False, init=False)

    def loss(self, dtype: torch.dtype) -> Tensor:
        """Return the loss."""
        raise NotImplementedError

    def output(self, position: int, metadata: Tensor) -> Tensor:
        """Return a result that was wanted besides, whole on every worker; collective."""
        raise NotImplementedError

    def accumulate(self, keeps: bool) -> None:
        """Add the gradients to those that the parameters have; keep them only for a further ``backward()``."""
        raise NotImplementedError

    def read_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the gradients of parameters by name, whole on every worker, where they have any; collective."""
        raise NotImplementedError

    def list_trained(self) -> Collection[str]:
        """Return the names of the parameters that get a gradient."""
        raise NotImplementedError

    def select(self, position: int) -> TapeRun:
        """Return the same with the memory of one output alone, for whoever asks for that."""
        raise NotImplementedError

    def forget_outputs(self) -> None:
        """Keep the loss and the gradients alone."""
        raise NotImplementedError


def _add_gradients(gradients: Mapping[nn.Parameter, Tensor], keeps: bool) -> None:
    for parameter, gradient in gradients.items():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + gradient
        else:  # what is kept must not be what the script may write into
            parameter.grad = gradient.clone() if keeps else gradient


class Training(Protocol):
    """What runs tapes."""

    def compute(self, tape: Tape, inputs: Sequence[TapeInput]) -> TapeRun:
        """Run forward and backward passes; the gradients wait for :meth:`TapeRun.accumulate`."""

    def evaluate(self, tape: Tape, inputs: Sequence[TapeInput]) -> TapeRun:
        """Run a forward pass without gradients."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer on what this worker holds of the parameters."""


# ---- on whole models -------------------------------------------------------------------------------------------------


@dataclass
class PlainRun(TapeRun):
    """A run on whole models.

    Attributes:
        value: the loss, a scalar tensor.
        outputs: the results besides the loss, by position.
        gradients: by parameter; empty where nothing was differentiated.
        names: names of the parameters among those of all models.
    """

    value: Tensor
    outputs: dict[int, Tensor]
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)

    @classmethod
    def of_replay(cls, result: LossWithOutputs) -> PlainRun:
        """Return the run of a tape's replay, without its graph of gradients."""
        return cls(result.loss.detach(), {i: output.detach() for i, output in enumerate(result.outputs)})

    def select(self, position: int) -> TapeRun:
        return PlainRun(self.value, {position: self.outputs[position]})

    def forget_outputs(self) -> None:
        self.outputs = {}

    def loss(self, dtype: torch.dtype) -> Tensor:
        return self.value

    def output(self, position: int, metadata: Tensor) -> Tensor:
        return self.outputs[position]

    def read_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {self.names[p]: gradient for p, gradient in self.gradients.items() if self.names[p] in names}

    def list_trained(self) -> Collection[str]:
        return [self.names[parameter] for parameter in self.gradients]

    def accumulate(self, keeps: bool) -> None:
        _add_gradients(self.gradients, keeps)
        self.gradients = self.gradients if keeps else {}


@dataclass
class PlainTraining:
    """Runs tapes on whole models, by torch's own autograd.

    Attributes:
        models: the models of the loop, in order.
        examples: inputs of the tapes that were run, by number of the tape: what the plan's programs are compiled for.
        stepped: ids of the optimizers that have stepped.
        loss_scale: factor of the loss whose gradients the passes compute.
    """

    models: Sequence[nn.Module]
    examples: dict[int, tuple[Tape, Sequence[Tensor]]] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    loss_scale: float = 1.0

    def compute(self, tape: Tape, inputs: Sequence[TapeInput]) -> PlainRun:
        inputs = gather_inputs(inputs)
        self.examples[tape.number] = tape, inputs
        parameters = [p for model in self.models for p in model.parameters() if p.requires_grad]
        with torch.enable_grad():
            result = tape.replay(self.models, inputs)
            gradients = torch.autograd.grad(result.loss * self.loss_scale, parameters, allow_unused=True)
        run = PlainRun.of_replay(result)
        run.gradients = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        run.names = {parameter: name for name, parameter in Models(self.models).named_parameters()}
        return run

    def choose_examples(
        self, tape: Tape, inputs: Sequence[Tensor], trained: Collection[int]
    ) -> tuple[list[Tape], list[Tensor]]:
        """Return tapes through which the gradients of all models flow that are trained, and the inputs of all.

        Args:
            tape: the first of them.
            inputs: what the script gives to it.
            trained: the models that are trained.
        """
        tapes, examples, missing = [tape], list(inputs), set(trained) - tape.trained
        for earlier_tape, earlier_inputs in reversed(self.examples.values()):
            if missing & earlier_tape.trained:
                tapes.append(earlier_tape)
                examples += earlier_inputs
                missing -= earlier_tape.trained
        return tapes, examples

    def evaluate(self, tape: Tape, inputs: Sequence[TapeInput]) -> TapeRun:
        with torch.no_grad():
            return PlainRun.of_replay(tape.replay(self.models, gather_inputs(inputs)))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped.add(id(optimizer))
        optimizer.step()


# ---- under the plan --------------------------------------------------------------------------------------------------


@dataclass
class PlannedRun(TapeRun):
    """A run under the plan.

    Attributes:
        role: this worker's role in the training.
        outputs: the results besides the loss.
        computed: the loss and the gradients; None where nothing was differentiated.
    """

    role: ScriptRole
    outputs: StepOutputs
    computed: ComputedStep | None = None

    def select(self, position: int) -> TapeRun:
        return PlannedRun(self.role, self.outputs.select(position))

    def forget_outputs(self) -> None:
        self.outputs = self.outputs.select(None)

    def loss(self, dtype: torch.dtype) -> Tensor:
        assert self.computed is not None
        return torch.tensor(self.computed.result.loss, dtype=dtype, device=self.outputs.device)

    def output(self, position: int, metadata: Tensor) -> Tensor:
        return self.outputs.gather(position, metadata.shape, metadata.dtype)

    def read_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self.role.read_gradients(cast(ComputedStep, self.computed), names, OBJECTIVE)

    def list_trained(self) -> Collection[str]:
        return () if self.computed is None else self.computed.trained_names

    def accumulate(self, keeps: bool) -> None:
        assert self.computed is not None
        with allow_own_calls():
            _add_gradients(self.computed.gradients, keeps)
        self.role.record_gradients(self.computed.trained_names)
        self.computed = self.computed if keeps else replace(self.computed, gradients={})


@dataclass
class PlannedTraining:
    """Runs tapes under a plan.

    Attributes:
        role: this worker's role in the training.
        forward_mode: returns a context manager in which the models' own modes count in a forward pass.
        batch_dim: what the script says of where its tensors have the samples; None: nothing.
        layouts: by number of a tape, where its inputs have the samples, for sizes that were met so far.
        audit: compares some steps with the tape's replay on whole weights.
        refused: layouts that were not proven, by number of a tape.
        uncut: what is called of models in tapes that the plan cannot evaluate, with the reason.
        asking: numbers of tapes whose way depends on the values of whole batches.
    """

    role: ScriptRole
    forward_mode: Callable[[], AbstractContextManager[None]]
    batch_dim: BatchDim | None
    layouts: dict[int, list[TapeLayout]]
    audit: PassesAudit
    refused: dict[int, set[TapeLayout]] = field(default_factory=dict)
    uncut: dict[tuple[ModelCall, ...], PolylaneError] = field(default_factory=dict)
    asking: set[int] = field(default_factory=set)

    def compute(self, tape: Tape, inputs: Sequence[TapeInput]) -> TapeRun:
        batch = self._make_batch(tape, inputs, True)
        computed = self._compute_audited(tape, gather_inputs(inputs), batch) if self.audit.is_due() else None
        computed = computed or self.role.compute(batch, OBJECTIVE)
        return PlannedRun(self.role, computed.outputs, replace(computed, outputs=computed.outputs.select(None)))

    def _compute_audited(self, tape: Tape, inputs: Sequence[Tensor], batch: Any) -> ComputedStep | None:
        """Run the passes of a step, and compare them with the tape's replay; None where that cannot be replayed."""
        role, bound = self.role, self.role.compile_form(batch, OBJECTIVE, True)
        code = bound.partition.graph.code
        draws = list_draws(code) if code.random else []
        if draws is None or (bound.passes > 1 and depends_on_split(code)):
            self.audit.note = "its random numbers, or statistics, are those of the plan's parts of a batch"
            return None
        part = role.sample_slice(take_tape(batch).samples)
        cast_to, scale = autocast_dtype(role.plan.precision), role.loss_scale(OBJECTIVE)
        casts = autocast_to(cast_to, role.world.device.type)
        cast_dtypes = list_cast_dtypes(bound.partition.graph) | ({cast_to} if cast_to else set())
        dtype = max(cast_dtypes, key=lambda cast_dtype: torch.finfo(cast_dtype).eps, default=None)

        def replay(attempt: int | None) -> MeasuredPass:
            with generators_kept(), role.gathered_model() as models:
                restore = snapshot_model(models, replay_tape)
                try:
                    if attempt is not None:
                        nudge_values(models.parameters(), attempt, dtype)
                    with KeyedDraws(draws, part) if draws else nullcontext(), casts:
                        run = PlainTraining(list(models.children()), loss_scale=scale).compute(tape, inputs)
                    names = {parameter: name for name, parameter in models.named_parameters()}
                    return MeasuredPass(float(run.value), {names[p]: g / scale for p, g in run.gradients.items()}, {})
                finally:
                    restore()

        with role.world.progress.during(Phase.AUDITING):
            measured = self.audit.replay(replay)
        if measured is None:
            return None
        computed = role.compute(batch, OBJECTIVE)
        with role.world.progress.during(Phase.AUDITING):
            gradients = role.local_gradients(computed, OBJECTIVE)
            self.audit.compare(measured, computed.result.loss, gradients, role.gradient_part, replay, dtype)
        return computed

    def evaluate(self, tape: Tape, inputs: Sequence[TapeInput]) -> TapeRun:
        called = tuple(step.target for step in tape.steps if step.target is not None)
        with torch.no_grad(), self.forward_mode():
            if called in self.uncut:
                return self._evaluate_whole(tape, inputs, self.uncut[called])
            try:
                batch = self._make_batch(tape, inputs, False)
                return PlannedRun(self.role, self.role.compute_outputs(batch, OBJECTIVE))
            except CallsDiffer:
                raise
            except PolylaneError as error:
                if self.role.world.size == 1:
                    raise
                self.uncut[called] = error
                run = self._evaluate_whole(tape, inputs, error)
                warnings.warn(
                    f"every worker computes all of {tape.line}, on whole weights, for the plan does not divide it: "
                    f"{error}",
                    stacklevel=2,
                )
                return run

    def _evaluate_whole(self, tape: Tape, inputs: Sequence[TapeInput], error: PolylaneError) -> TapeRun:
        """Run a forward pass on every worker, of whole models; collective.

        Args:
            tape: what the plan cannot evaluate.
            inputs: what the script gives to it.
            error: why, which is raised where it draws random numbers: those of one worker are others.
        """
        whole_inputs = gather_inputs(inputs)
        with generators_kept(), self.role.gathered_model() as models:
            old_states = generator_states()
            run = PlainRun.of_replay(tape.replay(list(models.children()), whole_inputs))
            if not states_equal(old_states, generator_states()):
                raise error
        return run

    def _make_batch(self, tape: Tape, inputs: Sequence[TapeInput], training: bool) -> Any:
        """Return the batch of a tape: the samples that this worker has read, or all; may be collective."""
        layouts, shapes = self.layouts.setdefault(tape.number, []), shape_of(inputs)
        layout = next((layout for layout in layouts if layout.fits(shapes)), None)
        if layout is None:
            layout = self._find_layout(tape, gather_inputs(inputs), training)
        rows = [value for value in inputs if isinstance(value, LoadedRows) and not value.batch.is_whole]
        if not rows:
            return tape.make_batch(layout, gather_inputs(inputs))
        positions = self.role.rows.find_positions(rows[0].batch.samples)
        if positions is not None and tape.number not in self.asking:
            leaves, split = layout.arrange_rows(inputs, positions)
            if leaves:
                return self.role.rows.take(tape.type_batch(layout, leaves), split, [value.batch for value in rows])
        for value in rows:
            value.batch.reads.read_whole(f"{tape.line} needs all samples of a batch on every worker")
        return tape.make_batch(layout, gather_inputs(inputs))

    def _find_layout(self, tape: Tape, inputs: Sequence[Tensor], training: bool) -> TapeLayout:
        """Return the first layout for which the tape can be compiled; collective."""

        def compile_layout(layout: TapeLayout) -> None:
            bound = self.role.compile_form(tape.make_batch(layout, inputs), OBJECTIVE, training)
            if ask_batches(bound.partition.graph.code.readings):
                self.asking.add(tape.number)

        plan, refused = self.role.plan, self.refused.setdefault(tape.number, set())
        proposed = [layout for layout in tape.propose_layouts(inputs, self.batch_dim) if layout not in refused]
        proposed.sort(key=self._count_alike, reverse=True)
        if not proposed and UNDIVIDED in self.layouts[tape.number]:
            return UNDIVIDED
        layouts = proposed if tape.reads_batches else [*proposed, UNDIVIDED]
        attempts = [(layout, partial(compile_layout, layout)) for layout in layouts]
        has_samples = any(tensor.dim() and len(tensor) > 1 for tensor in inputs)
        divides = has_samples and max(plan.data, plan.microbatches) > 1
        layout, _ = try_layouts(attempts, divides, tape.line, tape.reads_batches)
        refused.update(proposed if layout == UNDIVIDED else proposed[: proposed.index(layout)])
        self.layouts[tape.number].append(layout)
        return layout

    def _count_alike(self, layout: TapeLayout) -> int:
        """Return how many of the first inputs are laid out as in a tape before, or in this one at other sizes."""
        earlier_layouts = [earlier for layouts in self.layouts.values() for earlier in layouts]
        return max((count_common(layout.inputs or (), earlier.inputs or ()) for earlier in earlier_layouts), default=0)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.role.update_weights(OBJECTIVE, optimizer)
