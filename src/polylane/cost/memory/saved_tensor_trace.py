"""Saved-tensor trace: interpret a graph's code without data, running each kind of operator once in a trial."""

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
from torch.fx.node import map_aggregate

from polylane.cost.memory import backend_kernels as kernels
from polylane.cost.memory.operator_trial import GradientOrigin, OperatorTrial, OutputMemory, TensorForm, try_operator
from polylane.cost.memory.saved_tensors import BackendSetting, Key, SavedByOperator, SavedTensors
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.capture.repeatable import repeatable_nodes
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.symbolic_sizes import ConcreteSizes, SymbolicSize

# Operators that fake tensors do not fully show run on random data, if their inputs have at most this many bytes.
MOST_REAL = 64 << 20

# Trials of torch's own operators, by all that they depend on: those of one trace serve all later ones of the process.
_shared_trials: dict[Any, OperatorTrial] = {}
_MOST_SHARED = 1 << 14  # beyond it none is added: a process that plans many models must not grow forever

_Way = tuple[AbstractContextManager[Any], Callable[[TensorForm], Tensor]]


class SavedTensorTrace(GraphInterpreter):
    """Interprets the code of a graph on the forms of its values.

    The value of a node is the key of its tensor, a number, or a list of these.

    Args:
        code: code of the unsharded graph, or of one rank.
        setting: device, dtypes and kernels that decide what operators save.
        placeholder: node -> form of a placeholder's tensor; or its value, if that is no tensor.
        name: node -> name under which its saved tensors are recorded.
        position: node -> position of its operator in the unsharded graph.
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
        # Tensor -> first tensor with the same storage; storages -> bytes; kind of call -> its trial.
        self._places: dict[Key, Key] = {}
        self._bytes: dict[Key, int] = {}
        self._kinds: dict[Any, OperatorTrial] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._circumstances = (dataclasses.replace(setting, samples=0), *_torch_flags())

    def keeping(self) -> SavedTensors:
        """Run the trace and return what every operator saves."""
        results = self.run()
        loss = results[0] if results and _is_key(results[0]) else None
        able = repeatable_nodes(self.graph, self._setting.sync_batch_norm)
        repeatable_names = frozenset(self._name(node) for node in able)
        return SavedTensors(self._saved, self._forms, self._places, self._bytes, loss, repeatable_names)

    def call_operator(self, node: fx.Node) -> Any:

        value, saved = self._visit(node)
        self._saved[self._name(node)] = saved or SavedByOperator(self._position(node), (), (), OperatorTrial(()))
        return value

    def _visit(self, node: fx.Node) -> tuple[Any, SavedByOperator | None]:
        # Not tried: items of a multi-output operator, sizes, and numbers, which have no memory.
        item = _getitem_value(node, self.env)
        if item is not None:
            return item, None
        if isinstance(node.target, SymbolicSize):
            return node.target.at(self._setting.samples, node.target.nominal), None
        val = node.meta.get("val")
        if isinstance(val, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return val if isinstance(val, (int, float)) else self._number(val), None
        return self._operator(node)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        value = self._part if kind == "part" else self._given(node)
        if not isinstance(value, TensorForm):
            return value
        key = (f"{kind}:{name}", 0)
        # What is gathered cast has a gradient in its own dtype.
        item = node.meta["val"].dtype.itemsize if self._setting.gathers_cast else value.dtype.itemsize
        self._record_output(key, OutputMemory(value, new_bytes=value.bytes // value.dtype.itemsize * item), ())
        return key

    def _record_output(self, key: Key, output: OutputMemory, reads: Sequence[Key], node: str = "") -> None:
        assert output.form is not None
        self._forms[key] = output.form
        if output.aliased_input is not None:
            self._places[key] = self._places[reads[output.aliased_input]]
        elif output.aliased_output is not None and output.aliased_output != key[1]:
            self._places[key] = self._places[node, output.aliased_output]
        else:
            self._places[key] = key
            self._bytes[key] = output.new_bytes or output.form.bytes

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> tuple[Any, SavedByOperator]:
        indices = dict[Key, int]()

        # Arguments with tensors replaced by their index: equal arguments then mean an equal call, whatever
        # the node names.
        def numbered(used: fx.Node) -> Any:
            value = self.env[used]
            return _map_keys(value, lambda key: _TensorArgument(indices.setdefault(key, len(indices))))

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), numbered)
        reads = tuple(indices)
        forms = [self._forms[key] for key in reads]
        trial = self._cached_trial(node, map_aggregate(args, _on_cpu), map_aggregate(kwargs, _on_cpu), forms)
        name = self._name(node)
        for j, output in enumerate(trial.outputs):
            if output.form is not None:
                self._record_output((name, j), output, reads, name)
        keys = [(name, j) if output.form is not None else None for j, output in enumerate(trial.outputs)]
        saved = SavedByOperator(self._position(node), reads, tuple((name, j) for j in range(len(keys))), trial)
        return keys if trial.returns_list else keys[0], saved

    def _cached_trial(self, node: fx.Node, args: Any, kwargs: Any, forms: Sequence[TensorForm]) -> OperatorTrial:
        own_python = isinstance(kernels.unwrap_target(node.target), (LeafCall, FunctionCall))
        kind = (
            node
            if own_python
            else (kernels.call_identity(node.target), repr(kernels.without_key(args)), repr(kwargs), tuple(forms))
        )
        if kind not in self._kinds:
            shared = (kind, self._circumstances) if _is_torchs(node.target) else None
            trial = _shared_trials.get(shared) or self._run_trial(node, args, kwargs, forms, own_python)
            if shared is not None and trial.is_known and len(_shared_trials) < _MOST_SHARED:
                _shared_trials[shared] = trial
            self._kinds[kind] = trial
        return self._kinds[kind]

    def _run_trial(
        self, node: fx.Node, args: Any, kwargs: Any, forms: Sequence[TensorForm], own_python: bool
    ) -> OperatorTrial:
        setting = self._setting
        target = kernels.make_runnable(node.target, setting.device, setting.fused_attention, setting.sync_batch_norm)

        def call(tensors: Sequence[Tensor]) -> Any:
            def filled(value: Any) -> Any:
                return tensors[value.index] if isinstance(value, _TensorArgument) else value

            with nullcontext() if setting.autocast is None else torch.autocast("cpu", dtype=setting.autocast):
                return target(*map_aggregate(args, filled), **map_aggregate(kwargs, filled))

        without_data: _Way = (self._mode, _empty)
        with_data: _Way = (_random_state_kept(), _random)
        # Fake tensors first, unless the operator's kernel is known to hide saved memory. The user's own
        # Python may look at values: data is the fallback.
        small = sum(form.bytes for form in forms) <= MOST_REAL
        attempts = [with_data, without_data] if kernels.hides_saved_tensors(node) and small else [without_data]
        if own_python and small:
            attempts.append(with_data)
        for mode, make in attempts:
            try:
                with mode, torch.enable_grad():
                    return try_operator(call, forms, make)
            except Exception:  # it looks at data, or no kernel of it runs without
                continue
        return self._assume_all_saved(node, forms)

    def _assume_all_saved(self, node: fx.Node, forms: Sequence[TensorForm]) -> OperatorTrial:
        """Return the result for an operator that cannot be run: all inputs and outputs saved, full-size gradients."""
        flows = any(form.gradient for form in forms)
        outputs = list[OutputMemory]()
        val = node.meta.get("val")
        for j, value in enumerate(val if isinstance(val, (list, tuple)) else [val]):
            if isinstance(value, Tensor):
                form = form_at(value, self._number, self._setting.dtype)
                form = dataclasses.replace(form, gradient=flows and form.dtype.is_floating_point)
                outputs.append(OutputMemory(form, None, j))
            else:
                outputs.append(OutputMemory(None))
        return OperatorTrial(
            tuple(outputs),
            tuple(range(len(forms))) if flows else (),
            tuple(j for j, output in enumerate(outputs) if output.form is not None) if flows else (),
            gradient_origins=tuple(GradientOrigin(None, form.bytes) if form.gradient else None for form in forms),
            backward=sum(form.bytes for form in forms if form.gradient),
            returns_list=isinstance(val, (list, tuple)),
            is_known=False,
        )


def form_at(val: Tensor, number: Callable[[Any], int], dtype: torch.dtype | None) -> TensorForm:
    """Return the form of a tensor of a graph.

    Args:
        val: tensor of the graph's metadata, with symbolic sizes.
        number: size or stride -> integer at the number of samples.
        dtype: replaces float32, or None to keep the tensor's own dtype.
    """
    shape, stride = tuple(number(size) for size in val.shape), tuple(number(step) for step in val.stride())
    return TensorForm(shape, stride, dtype if dtype is not None and val.dtype == torch.float32 else val.dtype)


@dataclass(frozen=True)
class _TensorArgument:
    """Stands for a tensor among an operator's arguments."""

    index: int


def _is_torchs(target: Any) -> bool:
    """Return whether a target is an operator of torch itself, which does the same in every graph."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def _torch_flags() -> tuple[Any, ...]:
    """Return torch's settings that decide which kernels run, and in which dtype."""
    attention = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
    )


def _is_key(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], str)


def _map_keys(value: Any, function: Callable[[Key], Any]) -> Any:
    if _is_key(value):
        return function(value)
    return [_map_keys(v, function) for v in value] if isinstance(value, list) else value


def _on_cpu(value: Any) -> Any:
    """Return an argument as it is, but the CPU, where trials run, for every device."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _getitem_value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the item of a multi-output operator that a getitem node takes; None for other nodes."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    several, index = values[node.args[0]], node.args[1]
    return several[index] if isinstance(several, list) and isinstance(index, int) else None


def _empty(form: TensorForm) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)


def _random(form: TensorForm) -> Tensor:
    """Return a tensor with data: normal floats; integers are 0, a valid index into anything."""
    tensor = _empty(form)
    return tensor.normal_() if form.dtype.is_floating_point or form.dtype.is_complex else tensor.zero_()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Context manager: draw from a fixed seed and restore torch's generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
