"""Training loop: a script's models and optimizers, whose calls are recorded and run under a plan.

    model(x)               recorded
    loss.backward()        the tape up to the loss runs: forward and backward passes under the plan
    loss.item()            the value of that run; before backward(), the run is made now and its gradients wait
    optimizer.step()       the update, on each worker's parameters or shards
    model(x), no_grad()    a forward pass under the plan; the outputs are whole on every worker

The plan's programs are compiled at the first run that shows what every optimizer trains; every further tape is a
further form of batch. Runs before that are made on whole models.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polylane.compile.objectives import needs_closure
from polylane.errors import PolylaneError
from polylane.graph.capture.export import python_kept
from polylane.plan.plan import AnyPlan
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World
from polylane.script.changing_numbers import without_batch_size
from polylane.script.deferred import (
    DeferredTensor,
    is_augmented_assignment,
    is_differentiated,
    list_deferred,
    on_copy,
    plain_tensors,
    writes_in_place,
)
from polylane.script.loading.input_layout import BatchDim
from polylane.script.loading.loaded_batch import BY_PYTHON, BatchSites, LoadedBatch, have_read_whole
from polylane.script.loading.loader_shares import LoaderShares
from polylane.script.model_results import ModelCall
from polylane.script.model_state.asked_gradients import AskedGradients
from polylane.script.model_state.module_weights import ModuleWeights
from polylane.script.model_state.parameters import PreparedParameters
from polylane.script.model_state.updates import ScriptUpdates
from polylane.script.optimizer_calls import take_over
from polylane.script.recorded_calls import Result, outside_inference
from polylane.script.recording import NeedsValues, Recording, line_of_script
from polylane.script.resuming.loader import LoopObserver
from polylane.script.role import ScriptRole
from polylane.script.tape import Models, release_graph
from polylane.script.tape_runner import TapeRunner
from polylane.script.training import TapeRun

LARGE_OUTPUT = 64 << 20  # bytes, of what a model returns without gradients: gathered where the script asks for it


class TrainingLoop:
    """What a prepared script trains; a recorder for its deferred tensors.

    Args:
        world: this worker among all workers.
        models: the models of the script, all that its optimizers train among them.
        optimizers: its optimizers, on parameters of these.
        plan: the plan; a line, or a plan read from a file.
        batch_dim: what the script says of where its tensors have the samples; None: nothing.
        progress: where the script is in its loops; None: nobody asks.

    Attributes:
        runner: runs what is recorded.
        recording: finds what calls return.
        progress: where the script is in its loops, if checkpoints are saved or gone on from.
        weights: the state dicts and gradients of modules.
        by_hand: optimizers that step by themselves, with what stands for each in the plan.
        loader_shares: what workers read of the loaders that are read in parts.
    """

    def __init__(
        self,
        world: World,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        plan: str | AnyPlan,
        batch_dim: BatchDim | None = None,
        progress: LoopObserver | None = None,
    ) -> None:
        self.progress, self._models = progress, list(models)
        self.by_hand = dict[torch.optim.Optimizer, ScriptUpdates]()
        owners = {id(parameter): number for number, model in enumerate(models) for parameter in model.parameters()}
        for optimizer in optimizers:
            if any(id(parameter) not in owners for parameter in _parameters_of(optimizer)):
                raise PolylaneError(
                    f"the {type(optimizer).__name__} has parameters of no model that prepare() was given: give it all "
                    "models that are trained, and put a parameter of the script's own into one (nn.ParameterList([p]))"
                )
            if needs_closure(optimizer):
                self.by_hand[optimizer] = ScriptUpdates(_parameters_of(optimizer), is_for_closure=True)
            take_over(optimizer, self, optimizer in self.by_hand)
        names = {id(parameter): name for name, parameter in Models(models).named_parameters()}
        self._names = {o: [names[id(p)] for p in _parameters_of(o)] for o in optimizers}
        planned = [self.by_hand.get(optimizer, optimizer) for optimizer in optimizers]
        self._trained = {o: frozenset(owners[id(p)] for p in _parameters_of(o)) for o in planned}
        self.loader_shares, self._sites = list[LoaderShares](), BatchSites()
        self.runner = TapeRunner(world, models, self._trained, plan, batch_dim)
        self.recording, self.weights = Recording(self, models, self.runner.written_lines), ModuleWeights(self.runner)
        self._parameters = self.runner.parameters = PreparedParameters(
            self.runner.models,
            optimizers,
            self._defer_parameter,
            self._value_of,
            self.runner.note_write,
            world,
            self.runner.pending,
        )
        self.runner.optimizers.track()

    @property
    def world(self) -> World:
        """This worker among all workers."""
        return self.runner.world

    @property
    def role(self) -> ScriptRole | None:
        """This worker's role in the training under the plan; None before that."""
        return None if self.runner.job is None else self.runner.role

    # ---- recording ---------------------------------------------------------------------------------------------------

    def call_model(self, target: ModelCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a call of a model; without gradients its results are computed now, and small ones gathered."""
        hooks, assigned = self.runner.hooks, self.runner.assigned
        with assigned.taken_off():
            if hooks.has_new(target.model):
                with python_kept(self._models[target.model]), hooks.tried(target.model):
                    self.recording.try_call(target, args, kwargs)
            watched = target._replace(watched=hooks.list_watched(target.model, target.path))
            result: Any = None
            attributes: Sequence[Any] | None = None
            while attributes != self.recording.list_assigned(target):  # once more where a call shows that it assigns
                attributes = self.recording.list_assigned(target)
                watched = watched._replace(assigned=attributes)
                result = self._record(None, args, kwargs, watched)
        if (call := self.recording.latest).live_results():
            self.runner.pending.add(call)
        elif call.touched.is_written:  # a method that leaves its results in buffers
            self.runner.run_on_whole(call, *tree_map_only(Tensor, self._value_of, (tuple(args), dict(kwargs))))
        if not torch.is_grad_enabled():
            self.runner.run_forward([Result(tensor.call, tensor.position) for tensor in list_deferred(result)])
            result = tree_map_only(DeferredTensor, self._value_if_small, result)
        if watched.watched or watched.assigned:
            result, calls, values = result
            assigned.assign(self._models[target.model], watched.assigned, values)
            hooks.call(target.model, calls)
        return result

    def record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a function of deferred tensors; one whose result depends on their numbers is run instead."""
        if (question := AskedGradients.of_call(func, args, kwargs, self._parameters.names)) is not None:
            return self._answer_gradients(question)
        func, args = without_batch_size(func, args, kwargs)
        if kwargs.get("out") is not None or kwargs.get("inplace") or writes_in_place(func.__name__):
            return self._write(func, args, kwargs)
        if self.loader_shares and self._sites.must_compute(func, args, kwargs):
            return self.compute(func, args, kwargs)
        try:
            return self._record(func, args, kwargs)
        except PolylaneError as error:
            if not have_read_whole(args, kwargs, str(error)):
                raise
            return self.compute(func, args, kwargs)
        except NeedsValues:
            if not is_differentiated(args, kwargs):
                return self.compute(func, args, kwargs)
            # Its gradient is part of a loss's: computed now are the numbers that its results' shapes depend on.
            return self._record(func, args, kwargs, values=[*map(self._value_of, list_deferred((args, kwargs)))])

    def _record(
        self,
        func: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: ModelCall | None = None,
        values: Sequence[Tensor] | None = None,
    ) -> Any:
        with outside_inference():
            result = self.recording.record(func, args, kwargs, target, self.runner.updates.count, values)
        call = next((leaf.call for leaf in list_deferred(result)), None)
        if call is not None:
            self.runner.live.add(call)
            self.runner.settle(call)
            if call.draws and func is not None:
                for drawn in call.live_results():  # now, in the order of the script's other random numbers
                    if not drawn.metadata.requires_grad:
                        self.runner.value_of(drawn)
        return result

    def _write(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a write in place as a call that returns what it leaves there; into a real tensor, write the values."""
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, DeferredTensor):
            if not is_differentiated(args, kwargs):
                return self.compute(func, args, kwargs)
            if not is_augmented_assignment():  # ``total += loss`` makes the name that of the sum
                self.refuse(
                    f"{func.__name__} writes what a gradient flows through into a tensor of the script's: use a "
                    "function that returns a new tensor (torch.stack of a list, total = total + loss), or detach it"
                )
            total: Any = self._record(on_copy(func), (target.clone(), *args[1:]), kwargs)
            total.call.replaced = weakref.ref(target)
            return total
        is_shared = "out" in kwargs or func.__name__ in BY_PYTHON or self.runner.live.is_aliased(target)
        is_computed = is_shared or self._sites.must_compute(func, args, kwargs)
        if is_computed and self.runner.release_values(target):
            have_read_whole([target], {}, f"{line_of_script()} writes in place into one, or into a view of one")
            self.compute(func, args, kwargs)
            return target
        if is_shared:
            self.refuse(
                f"{func.__name__} writes into a tensor that the step is still to compute, and that is a view, or of "
                "which there are views: use the function that returns a new tensor"
            )
        result: Any = self._record(on_copy(func), args, kwargs)
        target.call, target.position = result.call, result.position
        target.metadata, target.form = result.metadata, result.form
        result.call.live[result.position] = weakref.ref(target)
        return target

    def defer_batch(self, batch: LoadedBatch) -> list[Tensor]:
        """Return deferred tensors of a loader's batch."""
        with outside_inference():
            tensors = self.recording.defer_batch(batch)
        self.runner.live.add(tensors[0].call)
        return tensors

    def refuse(self, reason: str) -> NoReturn:
        """Refuse what a script does with a deferred tensor, with its line."""
        raise PolylaneError(f"{line_of_script()}: {reason}")

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function on the values of deferred tensors."""
        with plain_tensors():
            values, named_values = tree_map_only(Tensor, self._value_of, (tuple(args), dict(kwargs)))
            result = func(*values, **named_values)
        self.runner.release_shared(args, values, result)
        return result

    def _value_of(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DeferredTensor):
            return cast(Tensor, self._parameters.read_value(tensor))
        loop: TrainingLoop = tensor.call.recorder
        return loop.runner.value_of(Result(tensor.call, tensor.position))

    def _value_if_small(self, tensor: DeferredTensor) -> Tensor:
        return tensor if tensor.metadata.nbytes > LARGE_OUTPUT else self._value_of(tensor)

    def take_argument(self, tensor: Tensor) -> Tensor:
        """Return what is recorded for a tensor among a call's arguments.

        Raises:
            PolylaneError: it is trained by another call of ``prepare()``.
        """
        if not isinstance(tensor, DeferredTensor):
            return cast(Tensor, self._parameters.take_argument(tensor))
        if tensor.call.recorder is self:
            return tensor
        if tensor.requires_grad:
            self.refuse(
                "what models of two calls of prepare() return meets in one loss: give all models that are trained "
                "together to one call of it"
            )
        return self._value_of(tensor)

    def _defer_parameter(self, name: str) -> DeferredTensor:
        """Return a parameter as a deferred tensor, whose gradient is taken with that of the loss it becomes part of."""
        model, *path, key = name.split(".")
        target = ModelCall(self.runner.models.numbers[model], ".".join(path), "__getattr__")
        parameter: DeferredTensor = self._record(None, [key], {}, target)
        return parameter

    # ---- backward and step -------------------------------------------------------------------------------------------

    @collective("loss.backward")
    def backward(
        self,
        root: DeferredTensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Add the gradients of a loss to those of the parameters."""
        if gradient is not None or create_graph or inputs is not None:
            self.refuse(
                "backward(gradient, create_graph, inputs): a prepared script calls backward() of a scalar loss alone: "
                "weigh the losses, and add them up before"
            )
        if not (result := Result(root.call, root.position)).is_loss:
            raise RuntimeError("backward() can be called on a scalar loss that depends on parameters")
        with self.runner.running():  # once, for guards are taken off and put on again
            run = self._run_of(result)
            if run.is_accumulated and result.call.is_released:
                raise RuntimeError(
                    "backward() was called before on this loss: pass retain_graph=True to the first call"
                )
            hooked = self._parameters.list_hooked(run.list_trained())
            self.runner.accumulate(run, keeps=bool(retain_graph))
        if self.progress is not None:
            self.progress.note_backward()
        if not retain_graph:
            release_graph(result)
        self.runner.live.forget_dead()
        for parameter in hooked:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    def _run_of(self, loss: Result) -> TapeRun:
        """Return the run of a loss, which is made now if there is none."""
        run, position = loss.call.runs.get(loss.position, (None, None))
        if run is None or position is not None:
            return self.runner.run_loss(loss)
        self.runner.updates.refuse_stepped(loss, line_of_script())
        return cast(TapeRun, run)

    @collective("torch.autograd.grad")
    def _answer_gradients(self, question: AskedGradients) -> tuple[Tensor | None, ...]:
        """Return gradients of a loss by parameters, which are not added to those that these have."""
        with self.runner.running():
            gradients = self._run_of(question.loss).read_gradients(question.names)
        if not question.keeps_graph:
            release_graph(question.loss)
        return question.answer(gradients)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step an optimizer on what this worker holds of the parameters."""
        loss, optimizers = None, self.runner.optimizers
        optimizers.call_hooks(optimizer, "pre")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runner.step(optimizer)
        optimizers.call_hooks(optimizer, "post")
        if self.progress is not None:
            self.progress.note_step()
        return loss

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped by itself."""
        self.runner.end_step(self.by_hand[optimizer])
        if self.progress is not None:
            self.progress.note_step()

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients of an optimizer's parameters."""
        self.weights.clear_gradients(self._names[optimizer])

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each model is in training mode."""
        return tuple(model.training for model in self._models)

    @collective("the end of the training")
    def release(self) -> None:
        """End the training: models and optimizers are whole on every worker, and nothing is recorded; collective."""
        runner = self.runner
        for shares in self.loader_shares:
            shares.read_whole("")
        for result in runner.live.list_unsettled():
            runner.value_of(result)
        runner.pending.settle_models(range(len(self._models)))
        if runner.job is not None:
            optimizers = [optimizer for optimizer in self._names if optimizer not in self.by_hand]
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = runner.job.state_dict()
            elsewhere = [name for name, _ in runner.models.named_buffers() if runner.role.is_elsewhere(name)]
            with runner.running():
                runner.role.release_model(state | {name: runner.role.read_value(name) for name in elsewhere})
        assert runner.parameters is not None
        runner.parameters.release()
        with runner.running():
            runner.optimizers.release()
        runner.is_running = True  # for good: from now on the calls of models and optimizers are their own
        if runner.job is not None:
            for optimizer, whole_state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(whole_state)

    @collective("the end of the script")
    def close(self) -> None:
        """End the training; collective."""
        if self.progress is not None:
            self.progress.finish()
        if self.runner.job is not None:
            self.runner.job.close()


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
