"""Recorded calls: what a loop has called, with what it was called on, and which results its script still holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.capture.leaves import in_training_modes
from polylane.graph.python_state.forward_hooks import list_modules
from polylane.script.deferred import DeferredTensor, Recorder, Spec, plain_tensors
from polylane.script.loading.loaded_batch import LoadedBatch, LoaderReads
from polylane.script.model_results import ModelCall
from polylane.script.model_state.touched_state import NOTHING, TouchedState


class Result(NamedTuple):
    """A result of a recorded call, as an argument of a later one."""

    call: RecordedCall
    position: int

    @property
    def metadata(self) -> Any:
        """A fake tensor with the result's shape, dtype and device; or the result itself, where it is no tensor."""
        return self.call.results[self.position]

    @property
    def memory(self) -> frozenset[tuple[int, int] | None]:
        """Numbers of the results whose memory it may share, by call and position; None: others' that stay."""
        if self.call.memory and self.metadata._is_view():
            return self.call.memory
        return frozenset([None if self.call.is_parameter else (self.call.number, self.position)])

    @property
    def is_scalar(self) -> bool:
        """Whether it is a floating-point number."""
        metadata = self.metadata
        return isinstance(metadata, Tensor) and metadata.dim() == 0 and metadata.is_floating_point()

    @property
    def is_loss(self) -> bool:
        """Whether ``backward()`` can be called on it."""
        return self.is_scalar and bool(self.metadata.requires_grad)


class Use(NamedTuple):
    """A tensor of the script as an argument, and the version that it had then: how often it was written in place.

    Attributes:
        tensor: the tensor, or a copy of it as it was then.
        version: of the script's tensor.
        original: the script's tensor, if ``tensor`` is a copy; else None.
    """

    tensor: Tensor
    version: int
    original: Tensor | None = None

    @property
    def is_written(self) -> bool:
        """Whether the script has written into its tensor since then."""
        tensor = self.tensor if self.original is None else self.original
        return not tensor.is_inference() and tensor._version != self.version


@cache
def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class Modes(NamedTuple):
    """Settings of torch under which a call was made."""

    grad: bool
    autocast: torch.dtype | None
    autocast_device: str = "cpu"

    @classmethod
    def current(cls) -> Modes:
        """Return the settings as they are now."""
        for device in _autocast_devices():
            if torch.is_autocast_enabled(device):
                return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(device), device)
        return cls(torch.is_grad_enabled(), None)

    def applied(self) -> Any:
        """Return a context manager with these settings."""
        # Gradients of the whole tape are asked for, or none: only a part without any has a setting of its own.
        return nullcontext() if self.grad else torch.no_grad()

    def cast(self) -> Any:
        """Return a context manager with the automatic casts."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast_device, self.autocast)


@contextmanager
def outside_inference() -> Iterator[None]:
    """Context manager: no inference mode, as what is made for an evaluation may train later; gradients as they were."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        yield


@dataclass(eq=False)
class RecordedCall:
    """One call of the loop.

    Attributes:
        recorder: the loop, which knows the values.
        number: of the call, ascending.
        func: the function; None for the call of a model.
        target: what is called of a model; None for a function.
        leaves: flat arguments: results, tensors in use, and constants. Empty once nothing is computed from them again.
        spec: how the arguments are nested.
        modes: settings of torch under which it was made.
        form: number of what its results' metadata depends on, but for sizes; part of the key of a tape.
        results: metadata of the flat results; other results than tensors as they are.
        origin: file and line of the script.
        updates: number of optimizer steps before the call, for models.
        live: the deferred tensors of the results, as long as the script holds them.
        runs: by result, the run that has computed it, and its place there.
        values: by result, values that are entry.
        draws: whether it draws random numbers.
        has_run: whether a tape that contains the call was run.
        depth: length of the longest chain of functions, whose values are not known, that leads here from a run.
        replaced: a tensor of the script's, to whose name ``+=`` has bound the result; None for other calls.
        flags: for each module of the model that is called, whether it was training; None for a function.
        trained: for each of its parameters, whether it required a gradient; None for a function.
        touched: what else of the model the call reads and writes.
        is_released: whether ``backward()`` has gone through the call, which cannot be differentiated again.
        is_outdated: whether the script has written what the call reads, so that it cannot be run any more.
        memory: what views among its results share memory with, as of :attr:`Result.memory`; empty where there are none.
        loaded: the batch of a loader that the results are; None for other calls.
        readers: how the loaders are read from whose batches alone it computes; empty for calls of models, and behind.
        batches: numbers of the calls that are these batches, as far as it has no values of what follows from them.
    """

    recorder: Recorder
    number: int
    func: Callable[..., Any] | None
    target: ModelCall | None
    leaves: Sequence[Any]
    spec: Spec
    modes: Modes
    form: int
    results: Sequence[Any]
    origin: tuple[str, int]
    updates: int = 0
    live: list[weakref.ref[DeferredTensor] | None] = field(default_factory=list)
    runs: dict[int, Any] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    has_run: bool = False
    draws: bool = False
    depth: int = 0
    is_released: bool = False
    is_outdated: bool = False
    flags: tuple[bool, ...] | None = None
    trained: tuple[bool, ...] | None = None
    touched: TouchedState = NOTHING
    replaced: weakref.ref[Tensor] | None = None
    memory: frozenset[tuple[int, int] | None] = frozenset()
    loaded: LoadedBatch | None = None
    readers: frozenset[LoaderReads] = frozenset()
    batches: frozenset[int] = frozenset()

    @property
    def is_divided(self) -> bool:
        """Whether it computes from batches of which each worker has read its samples, and may compute on these."""
        return bool(self.readers) and not any(reader.reads_whole for reader in self.readers)

    def find_memory(self) -> frozenset[tuple[int, int] | None]:
        """Return what views among the results share memory with."""
        is_of_others = self.target is not None or any(isinstance(leaf, Use) for leaf in self.leaves)
        shared = frozenset[tuple[int, int] | None]([None] if is_of_others else [])
        return shared.union(*(argument.memory for argument in self.arguments))

    @property
    def line(self) -> str:
        """File and line of the script, as text."""
        return "{}:{}".format(*self.origin)

    @property
    def model(self) -> int:
        """Number of the model that is called."""
        assert self.target is not None
        return self.target.model

    @property
    def is_parameter(self) -> bool:
        """Whether it takes a parameter of a model."""
        return self.target is not None and self.target.is_parameter

    @property
    def arguments(self) -> Iterator[Result]:
        """Results of earlier calls among the arguments."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Result))

    def is_known(self, position: int) -> bool:
        """Return whether a result has a value without a further step."""
        return position in self.values or position in self.runs or is_replayable(self)

    def forget_arguments(self) -> None:
        """Let go of the arguments, where nothing will be computed from them again."""
        is_known = all(result.position in self.values for result in self.live_results())
        is_differentiable = any(isinstance(r, Tensor) and r.requires_grad for r in self.results)
        if is_known and (not is_differentiable or any(result.call.is_released for result in self.arguments)):
            self.leaves = ()

    def live_results(self) -> list[Result]:
        """Return the results that the script still holds."""
        return [Result(self, i) for i, ref in enumerate(self.live) if ref is not None and ref() is not None]


def in_recorded_modes(models: Sequence[nn.Module], calls: Sequence[RecordedCall]) -> Any:
    """Return a context manager: the models are in training mode or not, and frozen, as when the calls were recorded.

    Args:
        models: the models of the script, in order.
        calls: the calls of one step.

    Raises:
        PolylaneError: a model was called in both modes, or a tensor of the script's that a sum took the place of is
            still in use.
    """
    recorded = dict[int, RecordedCall]()
    for call in calls:
        if call.replaced is not None and call.replaced() is not None:
            raise PolylaneError(
                f"{call.line}: a tensor that is written in place is also known by another name, or inside of a "
                "container, which would keep its old value: write total = total + loss"
            )
        if call.target is None:
            continue
        first_call = recorded.setdefault(call.model, call)
        if call.flags != first_call.flags or call.trained != first_call.trained:
            kind = "in other modes of training" if call.flags != first_call.flags else "with other frozen parameters"
            raise PolylaneError(
                f"{call.line}: a model is called {kind} than at {first_call.line}, in one step: call backward(), or "
                "ask for the value, between the changes"
            )
    pairs = (zip(list_modules(models[number]), call.flags or (), strict=False) for number, call in recorded.items())
    stack = ExitStack()
    stack.enter_context(in_training_modes([pair for of_model in pairs for pair in of_model]))
    # What is thawed after the call has no part in its graph; what is frozen after it gets no gradient either.
    for number, call in recorded.items():
        for parameter, was_trained in zip(_list_parameters(models[number]), call.trained or (), strict=False):
            if parameter.requires_grad and not was_trained:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_)
    return stack


def read_flags(model: nn.Module) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return for each module whether it is training, and for each parameter whether it requires gradients."""
    with plain_tensors():  # the script's parameters are guarded, and would answer one by one
        trained = tuple([parameter.requires_grad for parameter in _list_parameters(model)])
    return tuple([module.training for module in list_modules(model)]), trained


def _list_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model, those that are tied as often as they are there."""
    tables = [module._parameters.values() for module in list_modules(model)]
    return [parameter for table in tables for parameter in table if parameter is not None]


MOST_CALLS = 20  # beside those that the script holds results of, which keep batches of data


class LiveCalls:
    """The calls of a loop whose results the script holds, youngest last."""

    def __init__(self) -> None:
        self._calls = list[RecordedCall]()
        self._most = MOST_CALLS  # in the list before the dead ones among them are forgotten

    def add(self, call: RecordedCall) -> None:
        """Add the youngest call."""
        self._calls.append(call)
        if len(self._calls) > self._most:  # an evaluation, which has no backward()
            self.forget_dead()
            self._most = 2 * len(self._calls) + MOST_CALLS

    def forget_dead(self) -> None:
        """Forget calls of which the script holds nothing, and what released calls were computed from."""
        self._calls = [call for call in self._calls if call.live_results()]
        for call in self._calls:
            if call.is_released and all(result.position in call.runs for result in call.live_results()):
                call.leaves = ()

    def is_aliased(self, target: DeferredTensor) -> bool:
        """Return whether a tensor is a view of another that the script may hold, or another a view of it."""
        source = Result(target.call, target.position)
        memory = source.memory
        results = (result for call in self._calls for result in call.live_results() if result != source)
        return None in memory or any(memory & result.memory for result in results)

    def list_results(self) -> list[Result]:
        """Return the results that the script holds."""
        return [result for call in self._calls for result in call.live_results()]

    def find_loss(self, call: RecordedCall) -> Result | None:
        """Return the youngest loss that depends on a call, or that it depends on, and was not computed; or None."""
        results = (result for user in reversed(self._calls) if not user.runs for result in user.live_results())
        losses = [result for result in results if result.is_loss]
        users = (loss for loss in losses if _depends_on(loss.call, call))
        return next(users, next((loss for loss in losses if _depends_on(call, loss.call)), None))

    def is_needed(self, call: RecordedCall) -> bool:
        """Return whether the script holds results of a call, or what follows from these."""
        return any(_depends_on(user, call) for user in self._calls if user.live_results())

    def list_unsettled(self) -> list[Result]:
        """Return results of models and parameters that were not computed: a step would change their values."""
        return [r for call in self._calls for r in call.live_results() if _is_unsettled(r)]

    def choose_outputs(self, calls: Sequence[RecordedCall], root: Result | None) -> list[Result]:
        """Return what is kept of a run: what the script holds, and what this follows from.

        Args:
            calls: the calls that are run.
            root: the loss, which is kept anyway.
        """
        outputs, reached = dict[tuple[int, int], Result](), set[int]()
        numbers = {call.number for call in calls}
        for call in self._calls:
            stack = call.live_results()
            while stack:
                result = stack.pop()
                is_model, number = result.call.target is not None, result.call.number
                if result.call.is_parameter or result.call.readers:  # which can be computed again at any time
                    continue
                if result == root:  # known by the run, without what it follows from
                    continue
                if number in numbers:
                    if is_model or result.is_scalar or result.call is call:
                        outputs[number, result.position] = result
                    if is_model:
                        continue
                if number not in reached:
                    reached.add(number)
                    stack += result.call.arguments
        return [outputs[key] for key in sorted(outputs)]


def _is_unsettled(result: Result) -> bool:
    """Return whether a result follows from a parameter, or from a model's call, that has no value yet."""
    stack, numbers = [result], set[tuple[int, int]]()
    while stack:
        call, position = stack.pop()
        if position in call.runs or position in call.values or (call.number, position) in numbers:
            continue
        if call.target is not None and (call.is_parameter or not call.has_run):
            return True
        numbers.add((call.number, position))
        stack += call.arguments
    return False


def _depends_on(call: RecordedCall, ancestor: RecordedCall) -> bool:
    stack = [call]
    while stack:
        current = stack.pop()
        if current is ancestor:
            return True
        stack += [result.call for result in current.arguments if result.call.number >= ancestor.number]
    return False


def is_replayable(call: RecordedCall) -> bool:
    """Return whether the values of a call's results follow from values that are known, or were computed."""
    if call.target is not None or (call.is_released and not call.leaves):
        return call.is_parameter
    return all(
        leaf.position in leaf.call.values or leaf.position in leaf.call.runs or is_replayable(leaf.call)
        for leaf in call.arguments
    )
