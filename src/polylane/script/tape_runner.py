"""Tape runner: gives the values of what a loop has recorded, by running the tapes that they need.

a loss                 the tape up to it: forward and backward passes, whose gradients wait for ``backward()``
before backward()      the youngest loss that depends on the value, if the script has one
without a loss         a forward pass
after a run            a result of the run, or computed from its results
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.argument_trees import flatten_tree
from polylane.graph.python_state.forward_hooks import AssignedTensors, ForwardHooks
from polylane.graph.python_state.random_generators import generators_kept
from polylane.plan.plan import AnyPlan
from polylane.runtime.checkpoint.gathered_optimizer import ParameterOrder
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.stale_weights import allow_own_calls
from polylane.runtime.step_result import StepResult
from polylane.runtime.workers.world import World
from polylane.script.deferred import DeferredTensor, plain_tensors, unflatten_arguments
from polylane.script.loading.batch_writes import release_values, share_memory
from polylane.script.loading.input_layout import BatchDim
from polylane.script.loading.loaded_batch import NotDivided, TapeInput, gather_inputs, read_whole
from polylane.script.model_state.optimizers import PreparedOptimizers
from polylane.script.model_state.parameters import PreparedParameters
from polylane.script.model_state.pending_calls import PendingCalls
from polylane.script.model_state.updates import ScriptUpdates, StepRecorder, Updates
from polylane.script.needed_calls import collect_calls, find_model_results
from polylane.script.recorded_calls import (
    LiveCalls,
    RecordedCall,
    Result,
    Use,
    in_recorded_modes,
    is_replayable,
    outside_inference,
)
from polylane.script.resuming.saved_script import SavedScript, restore_whole
from polylane.script.role import ScriptJob, ScriptRole
from polylane.script.start import start_script
from polylane.script.tape import Models, Tape, TapeBook
from polylane.script.training import (
    OBJECTIVE,
    PlainTraining,
    PlannedRun,
    PlannedTraining,
    TapeRun,
    Training,
)
from polylane.script.whole_metrics import keep_metrics_whole
from polylane.verify.audit import AuditMode
from polylane.verify.audit.passes_audit import PassesAudit

MOST_DEFERRED = 50  # functions in a chain, such as a running sum of losses, before their values are asked for
MOST_BATCHES = 3  # of loaders that a result follows from, such as a running mean, before its value is asked for


class TapeRunner:
    """Runs the tapes of a loop: on whole models at first, then under the plan.

    Args:
        world: this worker among all workers.
        models: the models of the script, in the order of its loop.
        optimizers: the optimizers of the script, by the models whose parameters they have.
        plan: the plan; a line, or a plan read from a file.
        batch_dim: what the script says of where its tensors have the samples; None: nothing.

    Attributes:
        audit: compares some steps with those of one device; None before the training under the plan.
        audit_mode: whether some steps are computed a second time, and what follows from a difference.
        noise_mode: whether the gradient noise is measured: "on" in every step, "auto" in some where the plan allows it.
        models: the models as one.
        hooks: the forward hooks of the models.
        assigned: what forwards have assigned to attributes of modules.
        live: the calls of which the script holds results.
        pending: the calls of models that were not run.
        tapes: what was run so far, each form once.
        written_lines: by a line of the script, whether it writes in place into what was an argument there.
        optimizers: the optimizers' hooks, and their states as the script sees them.
        job: the training under the plan; None before that.
        is_running: whether calls of the models are not recorded: for polylane's own, and for good once released.
        updates: the steps and writes of weights so far.
        recorder: records the steps under the plan; None: nobody does.
        steps: number of steps of the optimizer that has stepped most often, those before a resumed run among them.
    """

    def __init__(
        self,
        world: World,
        models: Sequence[nn.Module],
        optimizers: Mapping[torch.optim.Optimizer, frozenset[int]],
        plan: str | AnyPlan,
        batch_dim: BatchDim | None = None,
    ) -> None:
        self.audit: PassesAudit | None = None
        self.audit_mode: AuditMode = "auto"
        self.noise_mode = "off"
        self.world, self._optimizers, self._plan, self._batch_dim = world, optimizers, plan, batch_dim
        self.hooks, self.assigned = ForwardHooks(models), AssignedTensors()
        self.models, self.live, self.tapes = Models(models), LiveCalls(), TapeBook()
        self.pending = PendingCalls(self.live, self.run_loss, self.run_forward)
        self.written_lines = dict[str, bool]()
        self._plain = PlainTraining(models)
        self._training: Training = self._plain
        self.parameters: PreparedParameters | None = None  # set by the loop, which records what is read of them
        self.job: ScriptJob | None = None
        self.recorder: StepRecorder | None = None
        self._results = list[StepResult]()  # of the backward passes since the last step
        self._resumed: SavedScript | None = None  # restored before the plan's programs were compiled
        self.steps, self._counts = 0, dict.fromkeys(optimizers, 0)
        self.optimizers = PreparedOptimizers(
            [optimizer for optimizer in optimizers if not isinstance(optimizer, ScriptUpdates)], self
        )
        self.is_running, self.updates = False, Updates(self.models.numbers)

    # ---- values ------------------------------------------------------------------------------------------------------

    @property
    def role(self) -> ScriptRole:
        """This worker's role in the training under the plan, which must have begun."""
        assert self.job is not None
        role = self.job.worker
        assert isinstance(role, ScriptRole)
        return role

    def value_of(self, result: Result) -> Tensor:
        """Return the value of a result, whole on every worker; runs what is needed for it."""
        call, index = result
        if call.loaded is not None:
            return call.loaded.rows[index].whole
        if index not in call.values:
            if index not in call.runs and not is_replayable(call):
                self._run_for(result)
            call.values[index] = self._read(result) if index in call.runs else self._replay(call)[index]
        return call.values[index]

    @collective("output.item")
    def _gather(self, run: TapeRun, position: int, metadata: Tensor) -> Tensor:
        return run.output(position, metadata)

    def _read(self, result: Result) -> Tensor:
        """Return a value that a run has computed; collective, but for the loss of a run."""
        run, position = result.call.runs[result.position]
        if position is None:
            with outside_inference():
                loss: Tensor = run.loss(result.metadata.dtype)
            return loss
        with self.running():
            value: Tensor = self._gather(run, position, result.metadata)
        return value

    def _replay(self, call: RecordedCall) -> list[Any]:
        """Compute a function's results from the values of its arguments."""
        if call.is_parameter:
            return [self.read_parameter(call)]
        leaves = [self.value_of(leaf) if isinstance(leaf, Result) else leaf for leaf in call.leaves]
        args, kwargs = unflatten_arguments([x.tensor if isinstance(x, Use) else x for x in leaves], call.spec)
        assert call.func is not None
        if call.func is torch.autograd.grad:
            raise PolylaneError(
                f"{call.line}: the value of a gradient is asked for that is part of no loss: take it of a loss, by "
                "parameters (torch.autograd.grad(loss, parameters)), or of a copy (copy.deepcopy(model))"
            )
        with torch.no_grad(), plain_tensors(), call.modes.cast():
            return flatten_tree(call.func(*args, **kwargs))[0]

    def settle(self, call: RecordedCall) -> None:
        """Compute a call's values now if it ends a long chain, or one through many batches, of what needs no run."""
        if (call.depth <= MOST_DEFERRED and len(call.batches) <= MOST_BATCHES) or not is_replayable(call):
            return
        for result in call.live_results():
            self.value_of(result)
        call.forget_arguments()
        if call.depth > MOST_DEFERRED:
            read_whole(call.readers, f"{call.line} computes much from them before a model is called")
        call.depth, call.batches = 0, frozenset()

    def release_values(self, tensor: Any) -> bool:
        """Compute what was recorded of a loader's batch that the script may now write into; say whether that is all."""
        return isinstance(tensor, DeferredTensor) and release_values(tensor, self.live.list_results(), self.value_of)

    def release_shared(self, args: Sequence[Any], values: Sequence[Any], result: Any) -> None:
        """Release the values of a function's first argument into which the script can write by its result, unseen."""
        if args and isinstance(args[0], DeferredTensor) and args[0].call.readers and share_memory(values[0], result):
            self.release_values(args[0])

    def read_parameter(self, call: RecordedCall) -> Tensor:
        """Return the value of a parameter that a call takes, whole; collective where workers hold parts."""
        assert self.parameters is not None
        self.updates.refuse_late([call])
        with self.running():
            return self.parameters.value_of(self.name_parameter(call)).clone()

    def name_parameter(self, call: RecordedCall) -> str:
        """Return the name of a parameter that a call takes, among those of all models."""
        assert call.target is not None
        path = (self.models.child_name(call.target.model), call.target.path, str(call.leaves[0]))
        return ".".join(filter(None, path))

    def _run_for(self, result: Result) -> None:
        """Run a tape that computes a value: that of a loss of the script's which depends on it, if there is one."""
        if result.is_loss:
            self.run_loss(result)
            return
        if (loss := self.live.find_loss(result.call)) is not None:
            self.run_loss(loss)
        if result.position not in result.call.runs and not is_replayable(result.call):
            # All else follows from what the models return, which is put together row by row.
            self.run_forward(find_model_results(result))

    # ---- runs --------------------------------------------------------------------------------------------------------

    @collective("loss.item")
    def run_loss(self, root: Result) -> TapeRun:
        """Run the forward and backward passes of a loss; the gradients wait for ``backward()``."""
        calls = collect_calls([root], self.value_of, self.written_lines)
        if self.pending.run_earlier(calls):
            calls = collect_calls([root], self.value_of, self.written_lines)
        self.updates.refuse_late(calls)
        outputs = self.live.choose_outputs(calls, root)
        tape, inputs = self.tapes.find(calls, root, outputs)
        try:
            with self.running(), in_recorded_modes(list(self.models.children()), calls):
                training = self._training_for(tape, inputs)
                if training is self._plain and self._resumed is not None and any(call.draws for call in calls):
                    raise PolylaneError(
                        f"{tape.line}: a resumed script cannot draw the random numbers (a dropout) that its unbroken "
                        "run had, in a step before all its optimizers have stepped: begin it anew, or leave the "
                        "dropout out"
                    )
                run = training.compute(tape, inputs)
        except NotDivided as error:
            read_whole({reader for call in calls for reader in call.readers}, error.reason)
            return self.run_loss(root)
        root.call.runs[root.position] = run, None
        self._record_run(run, calls, outputs)
        return run

    @collective("model")
    def run_forward(self, results: Sequence[Result]) -> None:
        """Run a tape without a backward pass."""
        calls = collect_calls(results, self.value_of, self.written_lines, is_forward=True)
        if self.pending.run_earlier(calls):
            calls = collect_calls(results, self.value_of, self.written_lines, is_forward=True)
        outputs = list(dict.fromkeys(results))
        if not any(result.metadata.is_floating_point() for result in outputs):
            # What serves as the loss of the program.
            of_models = (Result(c, i) for c in calls if c.target is not None for i in range(len(c.results)))
            outputs += [r for r in of_models if isinstance(r.metadata, Tensor) and r.metadata.is_floating_point()]
        self.updates.refuse_late(calls)
        tape, inputs = self.tapes.find(calls, None, outputs)
        try:
            with self.running(), in_recorded_modes(list(self.models.children()), calls):
                run = self._training.evaluate(tape, inputs)
        except NotDivided as error:
            read_whole({reader for call in calls for reader in call.readers}, error.reason)
            self.run_forward(results)
        else:
            self._record_run(run, calls, outputs)

    @collective("model")
    def run_on_whole(self, call: RecordedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make a call that returns nothing on every worker, on whole models; what it writes is kept."""
        self.pending.settle_models([call.model])
        with self.running(), nullcontext(self.models) if self.job is None else self.role.gathered_model() as models:
            assert call.target is not None
            call.target.run(list(models.children()), args, kwargs)

    def _record_run(self, run: TapeRun, calls: Sequence[RecordedCall], outputs: Sequence[Result]) -> None:
        # Each result has the memory of its own: a list of losses must not keep all else that their steps computed.
        for position, result in enumerate(outputs):
            result.call.runs[result.position] = run.select(position), position
        run.forget_outputs()
        keep_metrics_whole()  # imported since the last run, it may be
        for call in calls:
            call.has_run = True
            self.written_lines.setdefault(call.line, False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: calls of the models are polylane's own."""
        if self.is_running:
            yield
            return
        self.is_running = True
        try:
            # Torch's functions are handed over, wherever the script asks: torch.export has proxies for sizes.
            with (
                torch._C._EnableTorchFunction(),
                outside_inference(),
                allow_own_calls(),
                self.hooks.taken_off(),
                self.assigned.taken_off(),
            ):
                yield
        finally:
            self.is_running = False

    def _training_for(self, tape: Tape, inputs: Sequence[TapeInput]) -> Training:
        """Return what runs a loss's tape; the plan's programs are compiled once all that is trained was seen."""
        if self.job is None:
            untrained = [optimizer for optimizer, models in self._optimizers.items() if not models <= tape.trained]
            trained = tape.trained.union(*(example.trained for example, _ in self._plain.examples.values()))
            if all(
                self._optimizers[o] <= trained if isinstance(o, ScriptUpdates) else id(o) in self._plain.stepped
                for o in untrained
            ):
                self._start(tape, inputs)
        return self._training

    def _start(self, tape: Tape, inputs: Sequence[TapeInput]) -> None:
        """Compile the plan's programs, and give each worker its part of what whole models have had so far."""
        parameters = dict(self.models.named_parameters())
        parameter_names = {id(parameter): name for name, parameter in parameters.items()}
        orders = {optimizer: ParameterOrder.of(optimizer, parameter_names) for optimizer in self._optimizers}
        trained = frozenset[int]().union(*self._optimizers.values())
        tapes, examples = self._plain.choose_examples(tape, gather_inputs(inputs), trained)
        joined = self.tapes.join(tapes)
        gradients = {n: p.grad for n, p in self.models.named_parameters() if p.grad is not None}
        self.models.zero_grad()
        # Of losses and optimizers that take turns no prediction is that of a step.
        recorder = self.recorder if len(tapes) == len(orders) == 1 else None
        options: Any = (self._batch_dim, self.audit_mode, None if recorder is None else recorder.predict)
        try:
            with generators_kept():
                self.job, layout, self.audit = start_script(
                    self.world, self.models, list(orders), joined, examples, self._plan, *options
                )
        except NotDivided:  # another tape is tried
            for name, parameter in self.models.named_parameters():
                parameter.grad = gradients.get(name)
            raise
        role = self.role
        role.telemetry.noise.set_mode(self.noise_mode)
        if self._resumed is not None:
            role.continue_whole(self._resumed.plain)
        role.take_gradients(gradients, OBJECTIVE)
        assert self.parameters is not None
        self.parameters.attach(role)
        self.optimizers.attach(self.job, orders, parameters)
        layouts = {joined.number: [layout]}
        self._training = PlannedTraining(role, self.models.in_forward_mode, self._batch_dim, layouts, self.audit)
        self._plain.examples.clear()
        if self.recorder is not None:
            self.recorder.begin(self.job, self.steps)

    def accumulate(self, run: TapeRun, keeps: bool) -> None:
        """Add the gradients of a run to those of the parameters; keep them only for a further ``backward()``."""
        run.accumulate(keeps)
        run.is_accumulated = True
        if isinstance(run, PlannedRun) and run.computed is not None:
            self._results.append(run.computed.result)

    # ---- optimizers --------------------------------------------------------------------------------------------------

    def resume(self, saved: SavedScript) -> None:
        """Make the state of models and optimizers that of a checkpoint; collective."""
        self._counts = dict.fromkeys(self._optimizers, int(saved.script["steps"]))
        self.steps = int(saved.script["steps"])
        with self.running():
            if self.job is None:
                restore_whole(self.models, list(self._optimizers), saved)
                self._resumed = saved
            else:
                self.job.load_checkpoint(saved.folder)

    @collective("optimizer.step")
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer on what this worker holds of the parameters."""
        for result in self.live.list_unsettled():
            self.value_of(result)
        self.pending.settle_models(self._optimizers[optimizer])
        with self.running():
            self._training.step(optimizer)
        self.updates.record_step(self._optimizers[optimizer])
        self.end_step(optimizer)
        self.live.forget_dead()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer, or of one that writes the weights itself, by what stands for it in the plan."""
        if self.recorder is not None and self._results:
            self.recorder.add_step(self._results, optimizer)
        self._results = []
        self._counts[optimizer] += 1
        self.steps = max(self._counts.values())

    def note_write(self, name: str) -> None:
        """Note that the script has written a parameter, which ends the step of a loop that has no optimizer."""
        self.updates.record_write(name)
        updates = [o for o in self._optimizers if isinstance(o, ScriptUpdates) and not o.is_for_closure]
        if self._results and updates:
            self.end_step(updates[0])
