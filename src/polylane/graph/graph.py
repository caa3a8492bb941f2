"""The captured graph: a model and its loss as one flat, topologically ordered list of operators."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polylane.graph.open_sizes import OpenSizes
    from polylane.graph.python_state.side_effects import SideEffects
    from polylane.graph.readings.batch_readings import Reading


@dataclass(frozen=True)
class Node:
    """One operator of the graph.

    Attributes:
        name: user-facing name, unique in the graph: module path, operator, and a number where that is not enough
            ("layers.3.attn/linear#2").
        id: the node's name in the executable graph.
        op: the operator ("aten.linear.default"), "leaf" or "function" for what runs the user's own Python.
        inputs: names of the nodes whose values the operator reads, in order, each once.
        shape: shape of the value on the example batch, at ``Graph.samples`` samples; () if the value is no tensor.
        batch_dim: index of the dimension of ``shape`` that grows with the samples, or None.
        dtype: dtype of the value, such as "float32"; "" if it is no tensor.
        flops: floating-point operations of the forward pass on the example batch.
        bytes: size of the value on the example batch.
        parameters: canonical names of the parameters that the operator reads.
        buffers: names of the buffers that the operator reads or writes.
        module: the user's module path ("layers.3.attn"; "" is the model itself, "loss" the loss function).
        source: the user's own line ("model.py:31"), or "".
        requires_grad: whether a gradient may flow back through the value.
        recomputable: computed from sizes and constants alone, so that every stage that needs it computes it anew.
        can_cross_stages: whether the value may be sent to another stage: its size does not depend on data, and it is
            not sparse.
        fixed_shape: ``shape`` with -1 for every size that follows the samples or the data.
    """

    name: str
    id: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    batch_dim: int | None
    dtype: str
    flops: int
    bytes: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    module: str
    source: str
    requires_grad: bool
    recomputable: bool
    can_cross_stages: bool
    fixed_shape: tuple[int, ...] = ()

    @property
    def is_own_python(self) -> bool:
        """Whether the node runs the user's own Python on samples: a leaf, or a custom autograd function."""
        return self.op in ("leaf", "function")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a parameter or buffer."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class Graph:
    """A model and its loss, captured.

    Attributes:
        nodes: the operators in topological order; the last ones compute the loss.
        parameters: shapes and dtypes by canonical name, in the model's order; a tied weight appears once.
        tied: other names of tied weights -> canonical name.
        buffers: shapes and dtypes of buffers, by name.
        samples: batch size of the example that gave the shapes.
        unsplittable_ranges: pairs (first, last) of node positions that must stay on one stage (in-place writes, shared
            statistics).
        notes: one sentence for everything that could not be captured, and why.
        loss_is_mean: True when the loss is a scalar mean over the batch, False when it is a ``polylane.Mean``.
        is_opaque: whether the graph is a single leaf, which cannot be divided into stages.
        code: the executable graph and its constants.
        outputs: names of the nodes that give the loss (or its total and count), and further outputs; if empty, the last
            node.
        checkpoints: for each of the user's calls of torch.utils.checkpoint, the names of the nodes inside of it.
        is_undivided: whether a batch is one sample that is never divided, as where a script's samples are not known.
        output_form: what the further outputs are, see :mod:`polylane.graph.capture.output_request`; None: nobody says.
    """

    nodes: tuple[Node, ...]
    parameters: dict[str, TensorInfo]
    tied: dict[str, str]
    buffers: dict[str, TensorInfo]
    samples: int
    unsplittable_ranges: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]
    loss_is_mean: bool
    is_opaque: bool
    code: Code = field(compare=False, repr=False)
    outputs: tuple[str, ...] = ()
    checkpoints: tuple[frozenset[str], ...] = ()
    is_undivided: bool = False
    output_form: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what a plan is made for: operators, edges and parameter shapes, not values nor the batch size."""
        digest = hashlib.sha256()
        for node in self.nodes:
            digest.update(repr((node.name, node.op, node.inputs, node.fixed_shape, node.parameters)).encode())
        digest.update(repr([(name, info.shape) for name, info in self.parameters.items()]).encode())
        return digest.hexdigest()[:16]

    @property
    def loss_parts(self) -> int:
        """Number of the code's results that are the loss: the mean, or total and count; further ones are outputs."""
        return 1 if self.loss_is_mean else 2

    @cached_property
    def positions(self) -> dict[str, int]:
        """Position of every node, by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def parameter_order(self) -> dict[str, int]:
        """Number of every parameter in the model's order, by canonical name."""
        return {name: number for number, name in enumerate(self.parameters)}


@dataclass(frozen=True)
class Code:
    """The executable side of a graph.

    ``fx`` is flat ATen; each placeholder's ``meta["role"]`` is one of ("parameter", name), ("buffer", name),
    ("constant", name), ("input", leaf index), ("part", 0). Each other node's ``meta["name"]`` is the name of its
    :class:`Node`, and ``meta["val"]`` a tensor without data of its dtype and shape (in symbols of the samples).
    """

    fx: torch.fx.Graph
    constants: dict[str, Tensor]
    leaf_count: int
    random: bool
    has_batch_statistics: bool
    effects: SideEffects | None = None  # what the dry run did besides computing, and what it read
    open: OpenSizes | None = None  # the sizes beside the samples' number that it leaves open; None: it leaves none
    open_symbols: tuple[Any, ...] = ()  # their symbols in ``meta["open"]``, see open_sizes.py
    readings: tuple[Reading, ...] = ()  # questions to a batch, with the answers for which the code holds
    carried: frozenset[int] = frozenset()  # leaves that are no tensors and whose values the loss does not read

    @property
    def nominal_sizes(self) -> tuple[int, ...]:
        """The open sizes at which ``meta["val"]`` shows the code."""
        return () if self.open is None else self.open.nominal


_Fact = TypeVar("_Fact")


def once_per_graph(find: Callable[[Graph], _Fact]) -> Callable[[Graph], _Fact]:
    """Have a function find what follows from a graph once: the same result is returned for the same graph again.

    Args:
        find: returns what follows from a captured graph alone, and what nobody changes.
    """

    @wraps(find)
    def find_once(graph: Graph) -> _Fact:
        facts = graph.__dict__.setdefault("_facts", {})
        if find not in facts:
            facts[find] = find(graph)
        fact: _Fact = facts[find]
        return fact

    return find_once
