"""Recording: the calls that a training loop makes on deferred tensors, with what each returns in shape and dtype.

The metadata of a call's results depends on the function and on the forms of its arguments alone: it is found once, by
running the function on fake tensors, and looked up afterwards.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from polylane.errors import PolylaneError
from polylane.graph.argument_trees import flatten_tree, refuse_changed
from polylane.graph.python_state.forward_hooks import Attribute
from polylane.script.changing_numbers import NumbersBySite, is_number
from polylane.script.deferred import (
    DeferredTensor,
    Recorder,
    Spec,
    find_frame,
    flatten_arguments,
    moves_statistics,
    plain_tensors,
    unflatten_arguments,
)
from polylane.script.loading.loaded_batch import LoadedBatch, LoaderReads
from polylane.script.model_results import VALUES_NEEDED, CallWatch, ModelCall, ModelResults
from polylane.script.model_state.touched_state import NOTHING, TouchedState
from polylane.script.recorded_calls import Modes, RecordedCall, Result, Use, read_flags


class Recording:
    """Records calls, and finds the metadata of their results.

    Args:
        recorder: what deferred tensors ask for their values.
        models: the models of the script, in order.
        is_written: by a line of the script, whether it has written in place into what was an argument there; shared.

    Attributes:
        latest: the call that was recorded last.
    """

    latest: RecordedCall

    def __init__(self, recorder: Recorder, models: Sequence[nn.Module], is_written: dict[str, bool]) -> None:
        self._recorder, self._models, self._is_written = recorder, models, is_written
        # By the script's tensors, the versions of which there are copies, with these.
        self._copies: Any = WeakTensorKeyDictionary()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known = dict[Any, _KnownCall]()
        self._forms = dict[Any, int]()  # numbers of the forms without sizes
        self._number, self._numbers = 0, NumbersBySite()
        self._watch = CallWatch()
        self._model_results = ModelResults(models, self._mode, self._watch)
        self._batches = dict[ArgumentForm, Tensor]()  # metadata of loaders' batches

    def record(
        self,
        func: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: ModelCall | None = None,
        updates: int = 0,
        values: Sequence[Tensor] | None = None,
    ) -> Any:
        """Record a call, and return deferred tensors in place of its results.

        Args:
            func: the function; None for the call of a model.
            args: its arguments by position.
            kwargs: its arguments by name.
            target: what is called of a model.
            updates: number of optimizer steps so far.
            values: values of its deferred arguments, in order, of a function whose results' shapes depend on them.

        Raises:
            NeedsValues: what it returns depends on the numbers, and these are not given.
            PolylaneError: it was called with a tensor that requires a gradient and is no result of a model.
        """
        leaves, spec = flatten_arguments(args, kwargs)
        leaves = [self._recorder.take_argument(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        modes, origin = Modes.current(), _find_line()
        line = "{}:{}".format(*origin)
        if func is not None and any(map(is_number, leaves)):
            of_numbers = func, spec, modes, tuple(type(x) if is_number(x) else without_size(form_of(x)) for x in leaves)

            def find(candidates: Sequence[Any]) -> Sequence[Any]:
                return self._find_results(func, candidates, spec, None)[0]

            leaves = list(self._numbers.as_inputs(func, leaves, spec, of_numbers, line, find))
        uses = [self._describe_argument(leaf, self._is_written.get(line, True)) for leaf in leaves]
        model = None if target is None else self._models[target.model]
        flags, trained = (None, None) if model is None else read_flags(model)
        form = func, target, spec, modes, (flags, trained), tuple(form_of(leaf) for leaf in leaves)
        entry = self._known.get(form)
        if entry is None:
            entry = self._find_call(form, func, leaves, spec, target, values)
        results = entry.results
        call = RecordedCall(
            self._recorder, self._number, func, target, uses, spec, modes, entry.number, results, origin, updates
        )
        call.draws, call.flags, call.trained, call.touched = entry.draws, flags, trained, entry.touched
        call.memory = call.find_memory() if entry.has_views else call.memory
        arguments = list(call.arguments)
        if func is not None and all(argument.call.readers for argument in arguments):
            call.readers = frozenset[LoaderReads]().union(*(argument.call.readers for argument in arguments))
            unknown = (argument.call for argument in arguments if argument.position not in argument.call.values)
            call.batches = frozenset[int]().union(*(argument.batches for argument in unknown))
        call.depth = 1 + max((r.call.depth for r in call.arguments if r.position not in r.call.values), default=0)
        self._number += 1
        tensors, self.latest = _defer_results(call, entry.forms), call
        return tensors[0] if entry.spec.is_leaf() else tree_unflatten(tensors, entry.spec)

    def defer_batch(self, batch: LoadedBatch) -> list[Any]:
        """Return deferred tensors of the shapes of a loader's whole batch."""
        forms = [
            ArgumentForm(tuple(rows.shaped.shape), r.dtype, False, r.device) for rows in batch.rows for r in [rows.rows]
        ]
        for form in forms:
            if form not in self._batches:
                with plain_tensors(), self._mode:
                    self._batches[form] = torch.empty(form.shape, dtype=form.dtype, device=form.device)
        metadata, number = [self._batches[form] for form in forms], self._number
        self._number += 1
        spec, modes = flatten_arguments((), {})[1], Modes.current()
        call = RecordedCall(self._recorder, number, None, None, (), spec, modes, -1, metadata, _find_line())
        call.loaded, call.readers, call.batches = batch, frozenset([batch.reads]), frozenset([number])
        return _defer_results(call, forms)

    def forget_results(self) -> None:
        """Forget what calls return, as the models were cast or moved."""
        self._known.clear()
        self._model_results = ModelResults(self._models, self._mode, self._watch)

    def list_assigned(self, target: ModelCall) -> tuple[Attribute, ...]:
        """Return attributes of modules to which a call is known to assign tensors."""
        return self._model_results.list_assigned(target)

    def try_call(self, target: ModelCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call a model once, for what it does besides computing; its results are not kept, nor what it raises."""
        leaves, spec = flatten_arguments(args, kwargs)
        leaves = [self._recorder.take_argument(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with suppress(Exception):
            self._find_results(None, leaves, spec, target)

    def _describe_argument(self, leaf: Any, copies: bool) -> Any:
        """Return an argument as a call keeps it.

        Args:
            leaf: a flat argument of a call.
            copies: whether a tensor is copied, as the script may write into it before the step is computed: where it
                does, and until a step with this line was computed, when that is not known.
        """
        if isinstance(leaf, DeferredTensor):
            return Result(leaf.call, leaf.position)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.requires_grad:
            raise PolylaneError(
                f"a tensor of shape {tuple(leaf.shape)} that requires a gradient meets what the model returns "
                f"({line_of_script()}), and is none of its results: compute with parameters inside of the model's "
                "forward, or detach the tensor; a gradient by an input is taken on a copy (copy.deepcopy(model))"
            )
        # Tensors of inference mode cannot be written outside of it, and count no versions.
        version = 0 if leaf.is_inference() else leaf._version
        if not copies or leaf.is_inference():
            self._copies.pop(leaf, None)
            return Use(leaf, version)
        if self._copies.get(leaf, (None, None))[0] != version:
            self._copies[leaf] = version, leaf.clone()
        return Use(self._copies[leaf][1], version, leaf)

    def _find_call(
        self,
        form: Any,
        func: Callable[..., Any] | None,
        leaves: Sequence[Any],
        spec: Spec,
        target: ModelCall | None,
        values: Sequence[Tensor] | None,
    ) -> _KnownCall:
        """Return what a call returns, of a form that is not known, or is not all that decides on it."""
        if target is not None:
            self._model_results.follow_requires_grad(target.model)
        failure: Exception | None = None
        try:
            self._watch.has_drawn = False
            with _quiet_fakes():
                results, out_spec = self._find_results(func, leaves, spec, target)
        except NeedsValues:
            results, out_spec = flatten_tree(self._find_by_values(func, leaves, spec, target, values))
            form = *form, tuple(map(form_of, results))
        except PolylaneError:
            raise
        except Exception as error:
            failure = error
        if failure is not None:
            # A mistake in the script, most likely, of which torch says something else of fake tensors than of others.
            self._find_by_values(func, leaves, spec, target, values)
            raise failure
        if form not in self._known:
            forms = list(map(form_of, results))
            sizeless = *form[:5], tuple(map(without_size, form[5])), tuple(map(without_size, forms))
            number = self._forms.setdefault(sizeless, len(self._forms))
            has_views = any(isinstance(result, Tensor) and result._is_view() for result in results)
            touched = NOTHING if target is None else self._model_results.touched
            self._known[form] = _KnownCall(number, results, forms, out_spec, self._watch.has_drawn, has_views, touched)
        return self._known[form]

    def _find_by_values(
        self,
        func: Callable[..., Any] | None,
        leaves: Sequence[Any],
        spec: Spec,
        target: ModelCall | None,
        values: Sequence[Tensor] | None,
    ) -> Any:
        """Return what a call returns, as fake tensors, from a run on tensors with values."""
        with plain_tensors():
            if target is not None:
                return self._model_results.find_by_values(target, leaves, spec)
            return self._find_of_function(func, leaves, spec, values)

    def _find_of_function(
        self, func: Callable[..., Any] | None, leaves: Sequence[Any], spec: Spec, values: Sequence[Tensor] | None
    ) -> Any:
        assert func is not None
        try:
            return self._model_results.find_of_function(func, leaves, spec, values)
        except VALUES_NEEDED as error:
            raise NeedsValues from error

    def _find_results(
        self, func: Callable[..., Any] | None, leaves: Sequence[Any], spec: Spec, target: ModelCall | None
    ) -> tuple[list[Any], TreeSpec]:
        """Run a call on fake tensors; return the metadata of its flat results, and how they are nested."""
        with plain_tensors():
            fakes = [self._fake_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = unflatten_arguments(fakes, spec)
            try:
                if target is not None:
                    result = self._model_results.find(target, args, kwargs)
                    refuse_changed(fakes, (args, kwargs), line_of_script())
                    return flatten_tree(result)
                assert func is not None
                with self._mode, self._watch:
                    versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in fakes]
                    results, out_spec = flatten_tree(func(*args, **kwargs))
                    new_versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in fakes]
                    if versions != new_versions or moves_statistics(func, args, kwargs):
                        raise PolylaneError(
                            f"{line_of_script()}: {func.__name__} writes into a tensor that it is given with what the "
                            "model returns, such as running statistics: make that part of a model that prepare() is "
                            "given, and call the model that prepare() returns"
                        )
                    return [_as_view(result, fakes) for result in results], out_spec
            except VALUES_NEEDED as error:
                raise NeedsValues from error

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeferredTensor):
            return tensor.metadata
        fake: Tensor = self._mode.from_tensor(tensor)
        return fake


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Keep torch from logging what fails on fake tensors: it is tried on others then, or raised."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _defer_results(call: RecordedCall, forms: Sequence[Any]) -> list[Any]:
    """Return deferred tensors in place of a call's flat results; what is no tensor as it is."""
    tensors = list(call.results)
    with plain_tensors():
        for position, metadata in enumerate(call.results):
            if isinstance(metadata, Tensor):
                tensor = tensors[position] = DeferredTensor(metadata, call, position, forms[position])
                call.live.append(weakref.ref(tensor))
            else:
                call.live.append(None)
    return tensors


def _as_view(result: Any, arguments: Sequence[Any]) -> Any:
    """Return a result as a view, if its memory is that of an argument: detach(), or a cast to the type that it has."""
    if not isinstance(result, Tensor) or result._is_view():
        return result
    memory = result.untyped_storage()._cdata
    is_shared = any(isinstance(value, Tensor) and value.untyped_storage()._cdata == memory for value in arguments)
    return result.view_as(result) if is_shared else result


class NeedsValues(Exception):
    """What a function returns depends on the numbers, not on the forms of its arguments alone."""


class ArgumentForm(NamedTuple):
    """What the metadata of a call's results depends on, of a tensor among its arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device


def without_size(form: Any) -> Any:
    """Return the form of an argument without the sizes of a tensor, whose number of dimensions counts."""
    return form._replace(shape=(-1,) * len(form.shape)) if isinstance(form, ArgumentForm) else form


def form_of(leaf: Any) -> Any:
    """Return what the metadata of a call's results depends on, of an argument."""
    if isinstance(leaf, DeferredTensor):
        return leaf.form
    if isinstance(leaf, Tensor):
        return ArgumentForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.device)
    if hasattr(leaf, "tobytes") and hasattr(leaf, "shape"):  # repr() leaves out elements of long arrays
        return type(leaf), str(leaf.dtype), tuple(leaf.shape), leaf.tobytes()
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal


def _find_line() -> tuple[str, int]:
    """Return the file and the line of the user's code that is running."""
    frame = find_frame()
    return frame.f_code.co_filename, frame.f_lineno


def line_of_script() -> str:
    """Return the file and the line of the user's code that is running, as text."""
    return "{}:{}".format(*_find_line())


class _KnownCall(NamedTuple):
    """What a call of a form returns.

    Attributes:
        number: of the form without sizes, ascending.
        results: metadata of the flat results.
        forms: of these, as arguments of later calls.
        spec: how the results are nested.
        draws: whether the call draws random numbers.
        has_views: whether any of the results shares the memory of another tensor.
        touched: what the call of a model reads and writes besides its parameters.
    """

    number: int
    results: list[Any]
    forms: list[Any]
    spec: TreeSpec
    draws: bool
    has_views: bool
    touched: TouchedState
