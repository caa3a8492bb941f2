"""Attention cores: the nodes of a graph that compute attention, for selective recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from polylane.graph.graph import Graph, Node, once_per_graph

_WHOLE = "scaled_dot_product_attention"
_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
_SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))
# Operators between the softmax and the two products: elementwise on scores, or changes of layout.
_BETWEEN = frozenset(
    (
        *("mul", "div", "add", "sub", "where", "masked_fill", "dropout", "to", "_to_copy", "type_as", "clone"),
        *("view", "reshape", "expand", "unsqueeze", "squeeze", "contiguous", "transpose", "permute", "unflatten"),
        *("flatten", "movedim", "float", "tril", "maximum", "clamp"),
    )
)


@once_per_graph
def find_attention_cores(graph: Graph) -> tuple[frozenset[str], ...]:
    """Return the nodes of every attention: a fused operator, or all from QK^T through softmax to the product with V.

    Their intermediate values, the scores above all, take much memory and little time to recompute (Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5).
    """
    nodes = {node.name: node for node in graph.nodes}
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    cores = [frozenset((node.name,)) for node in graph.nodes if _base_op(node) == _WHOLE]
    used_names: set[str] = set()
    for node in graph.nodes:
        if _base_op(node) in _SOFTMAX and node.name not in used_names:
            # Both searches must end in a product of two activations: a product with a parameter is a
            # linear layer, and its softmax (a router, a classifier) no attention.
            ancestors = _reachable_nodes(node, lambda n: [nodes[name] for name in n.inputs])
            descendants = _reachable_nodes(node, lambda n: readers.get(n.name, ()))
            if ancestors is not None and descendants is not None:
                core = frozenset((*ancestors, *descendants))
                if not core & used_names:
                    cores.append(core)
                    used_names |= core
    return tuple(cores)


def _base_op(node: Node) -> str:
    return node.op.split(".")[1].rstrip("_") if node.op.startswith("aten.") else node.op


def _reachable_nodes(start: Node, following: Callable[[Node], Iterable[Node]]) -> set[str] | None:
    """Return all nodes from a softmax to products of two activations, inclusive; None if there is no such product."""
    names, stack, product = {start.name}, [start], False
    while stack:
        for node in following(stack.pop()):
            base = _base_op(node)
            if node.name in names or not (base in _BETWEEN or base in _PRODUCTS):
                continue
            names.add(node.name)
            if base in _PRODUCTS and not node.parameters:
                product = True
            elif base in _BETWEEN:
                stack.append(node)
    return names if product else None
