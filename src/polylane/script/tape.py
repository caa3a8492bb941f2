"""Tapes: what a loop has recorded between a batch and a loss, as a function of the batch's tensors.

A tape is a form of one loss: ``replay_tape(models, batch)`` computes it from the model's calls on, so that it is
captured, cut into stages and run like the loss of a recipe. Loops that take turns (a GAN's two losses) have several.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polylane.errors import PolylaneError
from polylane.graph.argument_trees import flatten_tree
from polylane.graph.capture.output_request import LossWithOutputs, stand_in_loss
from polylane.script.deferred import Spec, flatten_arguments, unflatten_arguments
from polylane.script.loading.input_layout import BatchDim, TapeLayout, propose_layouts
from polylane.script.loading.loaded_batch import LoadedRows, TapeInput
from polylane.script.model_results import ModelCall
from polylane.script.recorded_calls import Modes, RecordedCall, Result, Use


class Place(NamedTuple):
    """A result of an earlier step of a tape."""

    step: int
    position: int


class Input(NamedTuple):
    """A tensor that the script gives."""

    position: int


@dataclass(frozen=True)
class TapeStep:
    """One call of a tape.

    Attributes:
        func: the function; None for a model's call.
        target: what is called of a model; None for a function.
        leaves: flat arguments: places, inputs and constants.
        spec: how they are nested.
        modes: settings of torch under which it is made.
        is_repeated: whether the call was run before: it must not move the statistics of batches once more.
        dims: of each result its number of dimensions, None for what is no tensor; empty where they are not known.
        line: file and line of the script.
    """

    func: Callable[..., Any] | None
    target: ModelCall | None
    leaves: tuple[Any, ...]
    spec: Spec
    modes: Modes
    is_repeated: bool
    dims: tuple[int | None, ...] = ()
    line: str = ""

    def run_flat(self, models: Sequence[nn.Module], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Make the call; return its flat results.

        Raises:
            PolylaneError: they are others than when it was recorded.
        """
        results = flatten_tree(self.run(models, args, kwargs))[0]
        if self.dims and self.dims != tuple(map(_count_dims, results)):
            raise PolylaneError(
                f"{self.line}: the model returns something else than when it was called so before, as an attribute of "
                "it has changed: give what decides on it as an argument of the call"
            )
        return results

    def run(self, models: Sequence[nn.Module], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        with self.modes.applied(), self.modes.cast():
            if self.target is None:
                assert self.func is not None
                return self.func(*args, **kwargs)
            if self.is_repeated:
                return _call_without_effects(models[self.target.model], self.target, args, kwargs)
            return self.target.run(models, args, kwargs)


@dataclass(frozen=True)
class Tape:
    """Calls up to a loss, and which of their results are wanted.

    Attributes:
        number: of the tape in its loop.
        steps: the calls, in order.
        roots: the losses, whose sum is the tape's: one, but where tapes were joined; none: the outputs are all.
        outputs: the results that are wanted besides.
        input_count: number of tensors that the script gives.
        trained: models through whose calls the loss's gradient flows.
        line: file and line of the script's last call.
        reads_batches: whether it computes from a loader's batches before a model is called.
        loaded: positions of the inputs that were tensors of loaders' batches.
    """

    number: int
    steps: tuple[TapeStep, ...]
    roots: tuple[Place, ...]
    outputs: tuple[Place, ...]
    input_count: int
    trained: frozenset[int] = frozenset()
    line: str = ""
    reads_batches: bool = False
    loaded: frozenset[int] = frozenset()

    def make_batch(self, layout: TapeLayout, inputs: Sequence[Tensor]) -> Any:
        """Return a batch of the inputs, whose samples are along dimension 0 of what is divided."""
        return self.type_batch(layout, layout.arrange(inputs))

    def type_batch(self, layout: TapeLayout, leaves: Sequence[Tensor]) -> Any:
        """Return the leaves of a batch, arranged by a layout, as one of this tape."""
        if layout not in self._batch_types:
            # A named tuple, whose name makes the batches of this tape and layout a form of their own.
            name = f"Tape{self.number}" + (f"Layout{len(self._batch_types)}" if self._batch_types else "")
            make: Any = namedtuple  # a name that is known here only
            self._batch_types[layout] = make(name, [f"input{i}" for i in range(len(leaves))])
            self._batch_types[layout].tape, self._batch_types[layout].layout = self, layout
        return self._batch_types[layout](*leaves)

    def propose_layouts(self, inputs: Sequence[Tensor], batch_dim: BatchDim | None) -> list[TapeLayout]:
        """Return the layouts that inputs may have, the likeliest first; none for a graph, which is one sample.

        Args:
            inputs: what the script gives to the tape.
            batch_dim: what the script says of where its tensors have the samples; None: nothing.
        """
        is_graph = any(step.func in (make_sparse_coo, make_sparse_csr) for step in self.steps)
        return [] if is_graph and batch_dim is None else propose_layouts(inputs, batch_dim, self.loaded)

    @cached_property
    def _batch_types(self) -> dict[TapeLayout, Any]:
        return {}

    def replay(self, models: Sequence[nn.Module], inputs: Sequence[Tensor]) -> LossWithOutputs:
        """Compute the loss and the outputs."""
        results = list[list[Any]]()
        for step in self.steps:
            leaves = [_take(leaf, results, inputs) for leaf in step.leaves]
            args, kwargs = unflatten_arguments(leaves, step.spec)
            results.append(step.run_flat(models, args, kwargs))
        outputs = [results[output.step][output.position] for output in self.outputs]
        if self.roots:
            losses = [results[root.step][root.position] for root in self.roots]
            return LossWithOutputs(losses[0] if len(losses) == 1 else sum(losses[1:], losses[0]), outputs)
        # Nothing is differentiated; a mean over the samples serves as the loss that a program has.
        return LossWithOutputs(stand_in_loss(outputs), outputs)

    def joined_with(self, tape: Tape, number: int) -> Tape:
        """Return both tapes as one, whose loss is the sum of both, and whose inputs are those of this one first."""
        shift = len(self.steps)

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return Place(leaf.step + shift, leaf.position)
            return Input(leaf.position + self.input_count) if isinstance(leaf, Input) else leaf

        steps = tuple(replace(step, leaves=tuple(move(leaf) for leaf in step.leaves)) for step in tape.steps)
        return replace(
            self,
            number=number,
            steps=(*self.steps, *steps),
            roots=(*self.roots, *(move(root) for root in tape.roots)),
            outputs=(),
            input_count=self.input_count + tape.input_count,
            trained=self.trained | tape.trained,
            reads_batches=self.reads_batches or tape.reads_batches,
            loaded=self.loaded | {i + self.input_count for i in tape.loaded},
        )


def _count_dims(value: Any) -> int | None:
    return value.dim() if isinstance(value, Tensor) else None


def _take(leaf: Any, results: Sequence[Sequence[Any]], inputs: Sequence[Tensor]) -> Any:
    if isinstance(leaf, Place):
        return results[leaf.step][leaf.position]
    return inputs[leaf.position] if isinstance(leaf, Input) else leaf


def _call_without_effects(model: nn.Module, target: ModelCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a model once more, without what its first call has written into its buffers already."""
    copies = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer is not None}
    called = model.get_submodule(target.path)
    prefix = f"{target.path}." if target.path else ""
    copies = {name.removeprefix(prefix): copy for name, copy in copies.items() if name.startswith(prefix)}
    if target.method == "__call__":
        return target.watch(model, lambda: functional_call(called, copies, tuple(args), kwargs))
    return target.run([model] * (target.model + 1), args, kwargs)


class Models(nn.Module):
    """The models of a loop as one; each keeps the mode that the script gives it."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module("model" if len(models) == 1 else f"model{number}", model)

    @property
    def numbers(self) -> dict[str, int]:
        """The models' places in the loop, by the names with which those of their tensors begin."""
        return {name: number for number, (name, _) in enumerate(self.named_children())}

    def child_name(self, number: int) -> str:
        """Return the name of a model."""
        return list(self.numbers)[number]

    def name_weight(self, name: str) -> str:
        """Return the name of a weight in the file of a checkpoint: of a single model its own."""
        return name.removeprefix("model.") if len(self.numbers) == 1 else name

    def forward(self) -> None:
        raise NotImplementedError("the models are called one by one")

    @contextmanager
    def in_forward_mode(self) -> Iterator[None]:
        """Context manager: captures are for evaluation, in which each model keeps its own mode."""
        self.training = False  # this flag alone: train() would change the models'
        try:
            yield
        finally:
            self.training = True


def replay_tape(model: nn.Module, batch: Any) -> LossWithOutputs:
    """Loss of (model, batch) for batches of every tape; ``model`` has the loop's models as children, in order."""
    tape: Tape = type(batch).tape
    layout: TapeLayout = type(batch).layout
    result = tape.replay(list(model.children()), layout.restore(batch)[: tape.input_count])
    return replace(result, is_undivided=True) if layout.inputs is None else result


@dataclass
class TapeBook:
    """The tapes of a loop: each once, with a number, whose inputs follow from the calls.

    Attributes:
        tapes: by what tells tapes apart.
    """

    tapes: dict[Any, Tape] = field(default_factory=dict)

    def find(
        self, calls: Sequence[RecordedCall], root: Result | None, outputs: Sequence[Result]
    ) -> tuple[Tape, list[TapeInput]]:
        """Return the tape of some calls, and what it takes.

        Args:
            calls: all calls that root and outputs depend on and that are to be made, in order.
            root: the loss; None: there is none.
            outputs: further results that are wanted.
        """
        positions = dict[int, int]()
        inputs, input_at, steps, keys = list[TapeInput](), dict[int, Any](), list[TapeStep](), list[Any]()

        def place(leaf: Any) -> Any:
            if isinstance(leaf, Result) and leaf.call.number in positions:
                return Place(positions[leaf.call.number], leaf.position)
            if isinstance(leaf, Result):
                if leaf.call.loaded is not None:
                    return place_tensor(leaf.call.loaded.rows[leaf.position])
                leaf = Use(leaf.call.values[leaf.position], 0)
            return place_tensor(leaf.tensor) if isinstance(leaf, Use) else leaf

        def place_tensor(tensor: TapeInput) -> Any:
            if id(tensor) not in input_at:
                if isinstance(tensor, LoadedRows) or tensor.layout is torch.strided:
                    input_at[id(tensor)] = Input(len(inputs))
                    inputs.append(tensor)
                else:
                    make, parts = take_sparse_apart(tensor)
                    leaves = *map(place_tensor, parts), *tensor.shape
                    spec = flatten_arguments((*parts, *tensor.shape), {})[1]
                    steps.append(TapeStep(make, None, leaves, spec, Modes(True, None), False))
                    keys.append((make, leaves, False))
                    input_at[id(tensor)] = Place(len(steps) - 1, 0)
            return input_at[id(tensor)]

        for call in calls:
            leaves = tuple(place(leaf) for leaf in call.leaves)
            positions[call.number] = len(steps)
            is_repeated = call.target is not None and call.has_run and not call.is_parameter
            dims = () if call.target is None else tuple(map(_count_dims, call.results))
            steps.append(TapeStep(call.func, call.target, leaves, call.spec, call.modes, is_repeated, dims, call.line))
            keys.append((call.form, tuple(x if isinstance(x, Place | Input) else None for x in leaves), is_repeated))
        roots = () if root is None else (place(root),)
        places = tuple(place(output) for output in outputs)
        key = tuple(keys), roots, places
        if key not in self.tapes:
            trained = find_trained(root) if root is not None else ()
            line = calls[-1].line if calls else ""
            loaded = frozenset(i for i, value in enumerate(inputs) if isinstance(value, LoadedRows))
            reads, number, count = any(call.readers for call in calls), len(self.tapes), len(inputs)
            tape = Tape(number, tuple(steps), roots, places, count, frozenset(trained), line, reads, loaded)
            self.tapes[key] = tape
        return self.tapes[key], inputs

    def join(self, tapes: Sequence[Tape]) -> Tape:
        """Return several tapes as one, which is only compiled."""
        key = tuple(tape.number for tape in tapes)
        if key not in self.tapes:
            joined = tapes[0]
            for tape in tapes[1:]:
                joined = joined.joined_with(tape, len(self.tapes))
            self.tapes[key] = joined
        return self.tapes[key]


def make_sparse_coo(indices: Tensor, values: Tensor, *shape: int) -> Tensor:
    """Return a sparse tensor of its indices and values, without duplicates."""
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def make_sparse_csr(row_ends: Tensor, columns: Tensor, values: Tensor, *shape: int) -> Tensor:
    """Return a sparse tensor of compressed rows."""
    return torch.sparse_csr_tensor(row_ends, columns, values, shape, check_invariants=False)


def take_sparse_apart(tensor: Tensor) -> tuple[Callable[..., Tensor], Sequence[Tensor]]:
    """Return what a sparse tensor is made by, and of which tensors: programs take these in its place.

    Raises:
        PolylaneError: it has another layout than COO and CSR.
    """
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.coalesce()
        return make_sparse_coo, (coalesced.indices(), coalesced.values())
    if tensor.layout is torch.sparse_csr:
        return make_sparse_csr, (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    raise PolylaneError(f"a tensor with the layout {tensor.layout} enters a step: give tensor.to_sparse_csr()")


def find_differentiated(root: Result) -> list[RecordedCall]:
    """Return the calls through which the gradient of a result flows."""
    reached, stack = dict[int, RecordedCall](), [root]
    while stack:
        result = stack.pop()
        metadata = result.metadata
        if result.call.number in reached or not (isinstance(metadata, Tensor) and metadata.requires_grad):
            continue
        reached[result.call.number] = result.call
        stack += result.call.arguments
    return list(reached.values())


def release_graph(root: Result) -> None:
    """Note that a result was differentiated: the calls that it depends on cannot be, once more."""
    for call in find_differentiated(root):
        call.is_released = True


def find_trained(root: Result) -> Collection[int]:
    """Return the models through whose calls the gradient of a result flows."""
    return {call.target.model for call in find_differentiated(root) if call.target is not None}
