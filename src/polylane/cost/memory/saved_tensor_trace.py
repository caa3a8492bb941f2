"""Walk: a graph's code gone through with tensors that have no data, each kind of operator tried alone and once."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from polylane.cost.memory.backend_kernels import (
    call_identity,
    hides_saved_tensors,
    make_runnable,
    unwrap_target,
    without_key,
)
from polylane.cost.memory.operator_trial import OperatorTrial, OutputMemory, TensorForm, try_operator
from polylane.cost.memory.saved_tensors import BackendSetting, Key, SavedByOperator, SavedTensors
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.capture.python_operators import FunctionCall
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.sample_slice import SampleSlice
from polylane.graph.symbolic_sizes import ConcreteSizes, SymbolicSize

# What does not show all that it does without data runs on random numbers, unless that takes more bytes than this.
MOST_REAL = 64 << 20

_Way = tuple[AbstractContextManager[Any], Callable[[TensorForm], Tensor]]


class SavedTensorTrace(GraphInterpreter):
    """Goes through the code of a graph once, with the form of every value and none of their data.

    The value of a node is a key of its tensor, a number, or a list of them.

    Args:
        code: the whole graph's, or one rank's.
        setting: decides which memory operators keep.
        placeholder: the form of the tensor that a placeholder stands for; or what it is, where that is no tensor.
        name: of a node, its own.
        position: of a node's operator in the graph.
    """

    def __init__(
        self,
        code: fx.Graph,
        setting: BackendSetting,
        placeholder: Callable[[fx.Node], Any],
        name: Callable[[fx.Node], str],
        position: Callable[[fx.Node], int],
    ) -> None:
        super().__init__(code, self._placeholder)
        self._setting, self._given, self._name, self._position = setting, placeholder, name, position
        self._part = SampleSlice(setting.samples, batch=setting.samples)
        self._number = ConcreteSizes(setting.samples)
        self._saved: dict[str, SavedByOperator] = {}
        self._forms: dict[Key, TensorForm] = {}
        self._places: dict[Key, Key] = {}
        self._bytes: dict[Key, int] = {}
        self._kinds: dict[Any, tuple[OperatorTrial, bool]] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def keeping(self) -> SavedTensors:
        """What every node that is an operator keeps, by the name that ``name`` gives it."""
        results = self.run()
        loss = results[0] if results and _is_key(results[0]) else None
        return SavedTensors(self._setting, self._saved, self._forms, self._places, self._bytes, loss)

    def call_operator(self, node: fx.Node) -> Any:
        """The key of what an operator gives; what it keeps is noted."""
        value, saved = self._visit(node)
        self._saved[self._name(node)] = saved or SavedByOperator(self._position(node), (), ())
        return value

    def _visit(self, node: fx.Node) -> tuple[Any, SavedByOperator | None]:
        taken = _getitem_value(node, self.env)
        if taken is not None:
            return taken, None
        if isinstance(node.target, SymbolicSize):
            return node.target(self._part), None
        if _is_number(node.meta.get("val")):
            val = node.meta["val"]
            return val if isinstance(val, (int, float)) else self._number(val), None
        return self._operator(node)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        given = self._part if kind == "part" else self._given(node)
        if not isinstance(given, TensorForm):
            return given
        key = (f"{kind}:{name}", 0)
        self._record_output(key, OutputMemory(given), ())
        return key

    def _record_output(self, key: Key, given: OutputMemory, reads: Sequence[Key], node: str = "") -> None:
        assert given.form is not None
        self._forms[key] = given.form
        if given.aliased_input is not None:
            self._places[key] = self._places[reads[given.aliased_input]]
        elif given.aliased_output is not None and given.aliased_output != key[1]:
            self._places[key] = self._places[node, given.aliased_output]
        else:
            self._places[key] = key
            self._bytes[key] = given.new_bytes or given.form.bytes

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> tuple[Any, SavedByOperator]:
        reads = list[Key]()

        def numbered(used: fx.Node) -> Any:
            value = self.env[used]
            return _map_keys(value, lambda key: _TensorArgument(_argument_index(reads, key)))

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), numbered)
        forms = [self._forms[key] for key in reads]
        found, known = self._cached_trial(node, _on_cpu(args), _on_cpu(kwargs), forms)
        name = self._name(node)
        for j, given in enumerate(found.outputs):
            if given.form is not None:
                self._record_output((name, j), given, reads, name)
        keys = [(name, j) if given.form is not None else None for j, given in enumerate(found.outputs)]
        return keys if found.returns_list else keys[0], SavedByOperator(
            self._position(node),
            tuple(reads),
            tuple((name, j) for j in range(len(keys))),
            found.saved_inputs,
            found.saved_outputs,
            found.own_tensors,
            found.forward_peak,
            found.gradient_origins,
            found.backward,
            known,
        )

    def _cached_trial(
        self, node: fx.Node, args: Any, kwargs: Any, forms: Sequence[TensorForm]
    ) -> tuple[OperatorTrial, bool]:
        own_python = isinstance(unwrap_target(node.target), (LeafCall, FunctionCall))
        kind = node if own_python else (call_identity(node.target), repr(without_key(args)), repr(kwargs), tuple(forms))
        if kind not in self._kinds:
            self._kinds[kind] = self._run_trial(node, args, kwargs, forms, own_python)
        return self._kinds[kind]

    def _run_trial(
        self, node: fx.Node, args: Any, kwargs: Any, forms: Sequence[TensorForm], own_python: bool
    ) -> tuple[OperatorTrial, bool]:
        setting = self._setting
        target = make_runnable(node.target, setting.device, setting.fused_attention, setting.sync_batch_norm)

        def call(tensors: Sequence[Tensor]) -> Any:
            def of(read: _TensorArgument) -> Tensor:
                return tensors[read.index]

            with nullcontext() if setting.autocast is None else torch.autocast("cpu", dtype=setting.autocast):
                return target(*_is_filled(args, of), **_is_filled(kwargs, of))

        without_data: _Way = (self._mode, _empty)
        with_data: _Way = (_random_state_kept(), _random)
        small = sum(form.bytes for form in forms) <= MOST_REAL
        ways = [with_data, without_data] if hides_saved_tensors(node) and small else [without_data]
        if own_python and small:
            ways.append(with_data)
        for mode, make in ways:
            try:
                with mode, torch.enable_grad():
                    return try_operator(call, forms, make), True
            except Exception:  # it looks at data, or no kernel of it runs without
                continue
        return self._assume_all_saved(node, forms), False

    def _assume_all_saved(self, node: fx.Node, forms: Sequence[TensorForm]) -> OperatorTrial:
        """What cannot be run keeps all that it reads and gives, and its gradients are as large as its inputs."""
        flows = any(form.gradient for form in forms)
        outputs = list[OutputMemory]()
        val = node.meta.get("val")
        for j, each in enumerate(val if isinstance(val, (list, tuple)) else [val]):
            if isinstance(each, Tensor):
                form = form_at(each, self._number, self._setting.dtype)
                form = dataclasses.replace(form, gradient=flows and form.dtype.is_floating_point)
                outputs.append(OutputMemory(form, None, j))
            else:
                outputs.append(OutputMemory(None))
        return OperatorTrial(
            tuple(outputs),
            tuple(range(len(forms))) if flows else (),
            tuple(j for j, given in enumerate(outputs) if given.form is not None) if flows else (),
            gradient_origins=tuple(("new", form.bytes) if form.gradient else None for form in forms),
            backward=sum(form.bytes for form in forms if form.gradient),
            returns_list=isinstance(val, (list, tuple)),
        )


def form_at(val: Tensor, number: Callable[[Any], int], dtype: torch.dtype | None) -> TensorForm:
    """The form of a tensor of a graph.

    Args:
        number: what a size amounts to.
        dtype: of what is of single precision, or None for what it has.
    """
    shape, stride = tuple(number(size) for size in val.shape), tuple(number(step) for step in val.stride())
    return TensorForm(shape, stride, dtype if dtype is not None and val.dtype == torch.float32 else val.dtype)


@dataclass(frozen=True)
class _TensorArgument:
    """The place of a tensor among an operator's arguments."""

    index: int


def _argument_index(reads: list[Key], key: Key) -> int:
    if key not in reads:
        reads.append(key)
    return reads.index(key)


def _is_key(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], str)


def _map_keys(value: Any, function: Callable[[Key], Any]) -> Any:
    if _is_key(value):
        return function(value)
    return [_map_keys(v, function) for v in value] if isinstance(value, list) else value


def _is_filled(value: Any, of: Callable[[_TensorArgument], Any]) -> Any:
    """Arguments with tensors in their places."""
    if isinstance(value, _TensorArgument):
        return of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_is_filled(v, of) for v in value)
    if isinstance(value, slice):
        return slice(*(_is_filled(v, of) for v in (value.start, value.stop, value.step)))
    return {k: _is_filled(v, of) for k, v in value.items()} if isinstance(value, dict) else value


def _on_cpu(value: Any) -> Any:
    """Plain arguments, with every device the CPU: there the trials are."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list):  # fx has lists and dictionaries of its own
        return [_on_cpu(v) for v in value]
    if type(value) is tuple:
        return tuple(_on_cpu(v) for v in value)
    return {k: _on_cpu(v) for k, v in value.items()} if isinstance(value, dict) else value


def _is_number(val: Any) -> bool:
    return isinstance(val, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _getitem_value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """One of several tensors that an operator gives, where the node only takes that; else None."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    several, index = values[node.args[0]], node.args[1]
    return several[index] if isinstance(several, list) and isinstance(index, int) else None


def _empty(form: TensorForm) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)


def _random(form: TensorForm) -> Tensor:
    """A tensor with data: small numbers, whole ones all 0, which are indices of anything."""
    tensor = _empty(form)
    return tensor.normal_() if form.dtype.is_floating_point or form.dtype.is_complex else tensor.zero_()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside leaves torch's own generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
