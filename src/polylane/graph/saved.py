"""What autograd keeps of every operator for its backward pass: seen by running each kind of them alone, not guessed.

Operators run on tensors without data (torch's FakeTensorMode), so that neither memory nor the device is needed.
"""

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

from polylane.graph.graph import Graph
from polylane.graph.kernels import hides, identity, runnable, within, without_key
from polylane.graph.leaf import LeafCall
from polylane.graph.opaque import FunctionCall
from polylane.graph.part import Part
from polylane.graph.sizes import size_function
from polylane.graph.trial import Form, Given, Own, Trial, trial

# A tensor of the graph: the name of its node (a placeholder's role, "parameter:fc.weight", or an operator's name) and
# which of the tensors that it gives.
Key = tuple[str, int]

# What does not show all that it does without data runs on random numbers, unless that takes more bytes than this.
MOST_REAL = 64 << 20


@dataclass(frozen=True)
class Setting:
    """What decides which memory operators keep.

    Attributes:
        samples: in hand.
        device: whose kernels: "cpu" or "cuda".
        autocast: the dtype of autocast, or None.
        dtype: of all that is of single precision in the graph (parameters too), or None for what it has.
        fused: whether attention may run as one kernel that does not keep its scores.
        shared: whether batch normalization sums over replicas.
    """

    samples: int
    device: str = "cpu"
    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    fused: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Saved:
    """What one operator keeps, and the memory that it needs meanwhile.

    Attributes:
        reads: the tensors that it reads, in the order of its arguments, each once.
        gives: the tensors that it gives.
        inputs, outputs: numbers of those of them that it keeps.
        own: what it keeps of its own making.
        forward: bytes alive at most while it runs, beyond what it reads, gives and keeps.
        gradients: for every tensor that it reads: None for no gradient; ("output", j) where the gradient lies in the
            memory of the gradient of what it gives as the j-th; ("new", bytes).
        backward: bytes alive at most in its backward pass, beyond the gradients of what it gives and what was kept.
        known: False where it could not be run, so that all it reads and gives is taken to be kept.
    """

    reads: tuple[Key, ...]
    gives: tuple[Key, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    own: tuple[Own, ...] = ()
    forward: int = 0
    gradients: tuple[tuple[str, int] | None, ...] = ()
    backward: int = 0
    known: bool = True

    @property
    def own_bytes(self) -> int:
        """Bytes of what it keeps of its own making."""
        return sum(own.bytes for own in self.own)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The tensors that it reads or gives and keeps."""
        return (*(self.reads[i] for i in self.inputs), *(self.gives[j] for j in self.outputs))


@dataclass(frozen=True)
class Keeping:
    """What all operators of a graph keep, at one number of samples.

    Attributes:
        setting: for which it holds.
        nodes: by name.
        forms: of every tensor.
        places: every tensor -> the tensor in whose memory it lies: itself, where it does not share another one's.
        bytes: of the memory of every tensor that has its own.
        aliases: nodes that only name one of several tensors that an operator gives -> that tensor.
    """

    setting: Setting
    nodes: Mapping[str, Saved]
    forms: Mapping[Key, Form]
    places: Mapping[Key, Key]
    bytes: Mapping[Key, int]
    aliases: Mapping[str, Key]

    def kept(self) -> int:
        """Bytes that a forward pass of the whole graph leaves behind; parameters, buffers and constants do not count.

        The batch does, where an operator keeps it.
        """
        kept = {self.places[key] for node in self.nodes.values() for key in node.keys}
        own = sum(node.own_bytes for node in self.nodes.values())
        return own + sum(self.bytes[key] for key in kept if not key[0].startswith(HELD))


_Way = tuple[AbstractContextManager[Any], Callable[[Form], Tensor]]

# Placeholders that are there anyway, whether an operator keeps them or not.
HELD = ("parameter:", "buffer:", "constant:")


def saved(graph: Graph, setting: Setting) -> Keeping:
    """What every operator of a graph keeps.

    Each kind of operator (the same operator, arguments, and shapes, strides and dtypes of what it reads) runs once. The
    user's own Python runs on a copy of its module.
    """
    return _Walk(graph, setting).run()


class _Walk:
    """Goes through a graph once, with the form of every value and none of their data."""

    def __init__(self, graph: Graph, setting: Setting) -> None:
        self._graph, self._setting = graph, setting
        self._part = Part(setting.samples, batch=setting.samples)
        self._number = _Numbers(setting.samples)
        self._values: dict[fx.Node, Any] = {}  # Key, a number, or a list of them
        self._forms: dict[Key, Form] = {}
        self._places: dict[Key, Key] = {}
        self._bytes: dict[Key, int] = {}
        self._kinds: dict[Any, tuple[Trial, bool]] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self) -> Keeping:
        nodes, aliases = dict[str, Saved](), dict[str, Key]()
        for node in self._graph.code.fx.nodes:
            if node.op == "placeholder":
                self._values[node] = self._placeholder(node)
            elif node.op == "call_function":
                taken = _taken(node, self._values)
                if taken is not None:
                    self._values[node] = aliases[node.meta["name"]] = taken
                    nodes[node.meta["name"]] = Saved((), ())
                elif _tensors_in(node.meta.get("val")):
                    nodes[node.meta["name"]] = self._operator(node)
                else:
                    self._values[node] = self._size(node)
                    nodes[node.meta["name"]] = Saved((), ())
        return Keeping(self._setting, nodes, self._forms, self._places, self._bytes, aliases)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        val = node.meta.get("val")
        if kind == "part":
            return self._part
        if not isinstance(val, Tensor):
            return self._graph.code.constants[name] if kind == "constant" else val
        trains = kind == "parameter" and self._graph.parameters[name].trainable
        key = (f"{kind}:{name}", 0)
        self._enter(key, Given(dataclasses.replace(self._form(val), gradient=trains, leaf=kind == "parameter")), ())
        return key

    def _form(self, val: Tensor) -> Form:
        """The form of a tensor of the graph, at the samples in hand."""
        shape = tuple(self._number(size) for size in val.shape)
        stride = tuple(self._number(step) for step in val.stride())
        dtype = self._setting.dtype
        return Form(shape, stride, dtype if dtype is not None and val.dtype == torch.float32 else val.dtype)

    def _enter(self, key: Key, given: Given, reads: Sequence[Key], node: str = "") -> None:
        assert given.form is not None
        self._forms[key] = given.form
        if given.input is not None:
            self._places[key] = self._places[reads[given.input]]
        elif given.output is not None and given.output != key[1]:
            self._places[key] = self._places[node, given.output]
        else:
            self._places[key] = key
            self._bytes[key] = given.bytes or given.form.bytes

    def _size(self, node: fx.Node) -> Any:
        """What a node that is a number amounts to."""
        target: Any = node.target
        if hasattr(target, "of"):
            return target(self._part)
        val = node.meta.get("val")
        return self._number(val) if isinstance(val, (int, torch.SymInt)) else val

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> Saved:
        reads = list[Key]()

        def numbered(used: fx.Node) -> Any:
            value = self._values[used]
            return _map(value, lambda key: _Read(_index(reads, key)))

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), numbered)
        forms = [self._forms[key] for key in reads]
        found, known = self._tried(node, _on_cpu(args), _on_cpu(kwargs), forms)
        name = str(node.meta["name"])
        for j, given in enumerate(found.outputs):
            if given.form is not None:
                self._enter((name, j), given, reads, name)
        several = isinstance(node.meta["val"], (list, tuple))
        keys = [(name, j) if given.form is not None else None for j, given in enumerate(found.outputs)]
        self._values[node] = keys if several else keys[0]
        return Saved(
            tuple(reads),
            tuple((name, j) for j in range(len(keys))),
            found.inputs_kept,
            found.outputs_kept,
            found.own,
            found.forward,
            found.gradients,
            found.backward,
            known,
        )

    def _tried(self, node: fx.Node, args: Any, kwargs: Any, forms: Sequence[Form]) -> tuple[Trial, bool]:
        own_python = isinstance(within(node.target), (LeafCall, FunctionCall))
        kind = node if own_python else (identity(node.target), repr(without_key(args)), repr(kwargs), tuple(forms))
        if kind not in self._kinds:
            self._kinds[kind] = self._attempt(node, args, kwargs, forms, own_python)
        return self._kinds[kind]

    def _attempt(
        self, node: fx.Node, args: Any, kwargs: Any, forms: Sequence[Form], own_python: bool
    ) -> tuple[Trial, bool]:
        setting = self._setting
        target = runnable(node.target, setting.device, setting.fused, setting.shared)

        def call(tensors: Sequence[Tensor]) -> Any:
            def of(read: _Read) -> Tensor:
                return tensors[read.index]

            with nullcontext() if setting.autocast is None else torch.autocast("cpu", dtype=setting.autocast):
                return target(*_filled(args, of), **_filled(kwargs, of))

        without_data: _Way = (self._mode, _empty)
        with_data: _Way = (_own_numbers(), _random)
        small = sum(form.bytes for form in forms) <= MOST_REAL
        ways = [with_data, without_data] if hides(node) and small else [without_data]
        if own_python and small:
            ways.append(with_data)
        for mode, make in ways:
            try:
                with mode, torch.enable_grad():
                    return trial(call, forms, make), True
            except Exception:  # it looks at data, or no kernel of it runs without
                continue
        return self._assumed(node, forms), False

    def _assumed(self, node: fx.Node, forms: Sequence[Form]) -> Trial:
        """What cannot be run keeps all that it reads and gives, and its gradients are as large as its inputs."""
        flows = any(form.gradient for form in forms)
        outputs = list[Given]()
        val = node.meta["val"]
        for j, each in enumerate(val if isinstance(val, (list, tuple)) else [val]):
            if isinstance(each, Tensor):
                form = self._form(each)
                outputs.append(
                    Given(dataclasses.replace(form, gradient=flows and form.dtype.is_floating_point), None, j)
                )
            else:
                outputs.append(Given(None))
        return Trial(
            tuple(outputs),
            tuple(range(len(forms))) if flows else (),
            tuple(j for j, given in enumerate(outputs) if given.form is not None) if flows else (),
            gradients=tuple(("new", form.bytes) if form.gradient else None for form in forms),
            backward=sum(form.bytes for form in forms if form.gradient),
        )


class _Numbers:
    """Sizes of a graph as numbers, at one number of samples; one that depends on data as in the example."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._known: dict[str, int] = {}

    def __call__(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        text = str(size)
        if text not in self._known:
            try:
                self._known[text] = int(size_function(size)(self._samples))
            except ValueError:
                self._known[text] = int(size.node.hint) if size.node.hint is not None else 1
        return self._known[text]


@dataclass(frozen=True)
class _Read:
    """The place of a tensor among an operator's arguments."""

    index: int


def _index(reads: list[Key], key: Key) -> int:
    if key not in reads:
        reads.append(key)
    return reads.index(key)


def _is_key(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], str)


def _map(value: Any, function: Callable[[Key], Any]) -> Any:
    if _is_key(value):
        return function(value)
    return [_map(v, function) for v in value] if isinstance(value, list) else value


def _filled(value: Any, of: Callable[[_Read], Any]) -> Any:
    """Arguments with tensors in their places."""
    if isinstance(value, _Read):
        return of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(v, of) for v in value)
    if isinstance(value, slice):
        return slice(*(_filled(v, of) for v in (value.start, value.stop, value.step)))
    return {k: _filled(v, of) for k, v in value.items()} if isinstance(value, dict) else value


def _on_cpu(value: Any) -> Any:
    """Plain arguments, with every device the CPU: there the trials are."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list):  # fx has lists and dictionaries of its own
        return [_on_cpu(v) for v in value]
    if type(value) is tuple:
        return tuple(_on_cpu(v) for v in value)
    return {k: _on_cpu(v) for k, v in value.items()} if isinstance(value, dict) else value


def _tensors_in(val: Any) -> bool:
    return isinstance(val, Tensor) or (isinstance(val, (list, tuple)) and any(isinstance(v, Tensor) for v in val))


def _taken(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """One of several tensors that an operator gives, where the node only takes that; else None."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    several, index = values[node.args[0]], node.args[1]
    return several[index] if isinstance(several, list) and isinstance(index, int) else None


def _empty(form: Form) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)


def _random(form: Form) -> Tensor:
    """A tensor with data: small numbers, whole ones all 0, which are indices of anything."""
    tensor = _empty(form)
    return tensor.normal_() if form.dtype.is_floating_point or form.dtype.is_complex else tensor.zero_()


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Whatever is drawn inside leaves torch's own generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
