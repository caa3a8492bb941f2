"""Graphs without code, for laws that need only nodes, values and parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from polylane.graph.graph import Code, Graph, Node, TensorInfo
from polylane.profiling.time_operators import nominal_seconds


def graph(
    inputs: Sequence[Sequence[int]],
    parameters: Mapping[str, Sequence[int]] | None = None,
    *,
    free: Collection[int] = (),
    without_gradient: Collection[int] = (),
    frozen: Collection[str] = (),
    buffers: Mapping[str, Sequence[int]] | None = None,
    uncut: Sequence[tuple[int, int]] = (),
    parameter_bytes: int = 64,
) -> Graph:
    """A graph of ``len(inputs)`` nodes.

    Args:
        inputs: for every node the positions of the nodes it reads.
        parameters: name -> the positions of the nodes that use it; a tied weight has several.
        free: nodes that every stage computes anew.
        without_gradient: nodes through which no gradient flows.
        frozen: parameters that are not trained.
        buffers: name -> the positions of the nodes that use it.
        uncut: pairs of nodes that must stay together.
    """
    parameters, buffers = parameters or {}, buffers or {}
    nodes = tuple(
        Node(
            name=f"layer{i}/op",
            id=f"op_{i}",
            op="aten.op.default",
            inputs=tuple(f"layer{j}/op" for j in dict.fromkeys(read)),
            shape=(4, 8),
            batch_dim=0,
            dtype="float32",
            flops=8,
            bytes=128,
            parameters=tuple(name for name, users in parameters.items() if i in users),
            buffers=tuple(name for name, users in buffers.items() if i in users),
            module=f"layer{i}",
            source="",
            requires_grad=i not in without_gradient,
            recomputable=i in free,
            can_cross_stages=True,
            fixed_shape=(-1, 8),
        )
        for i, read in enumerate(inputs)
    )
    return Graph(
        nodes=nodes,
        parameters={name: TensorInfo((4, 4), "float32", parameter_bytes, name not in frozen) for name in parameters},
        tied={},
        buffers={name: TensorInfo((2,), "float32", 8, False) for name in buffers},
        samples=4,
        unsplittable_ranges=tuple(uncut),
        notes=(),
        loss_is_mean=True,
        is_opaque=False,
        code=Code(fx.Graph(), {}, 1, False, False),
    )


def chain(length: int, skips: Sequence[tuple[int, int]] = ()) -> Graph:
    """Nodes in a row, each with a weight of its own ("w3"), and skips from one node to a later one."""
    inputs: list[list[int]] = [[i - 1] if i else [] for i in range(length)]
    for source, target in skips:
        inputs[target].append(source)
    return graph(inputs, {f"w{i}": [i] for i in range(length)})


def node_seconds(graph: Graph) -> tuple[float, ...]:
    """Seconds of every node of a graph, both passes together, by nominal rates: the same in every run."""
    return tuple(map(sum, nominal_seconds(graph)))
