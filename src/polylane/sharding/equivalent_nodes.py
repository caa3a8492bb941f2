"""Equivalence classes of nodes: blocks that are repeated in a graph are chosen for once.

Colour refinement (Weisfeiler and Leman, 1968) for a few rounds: after k of them two nodes have the same colour if their
neighbourhoods are equal up to k edges away.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from polylane.placement.operator_view import OperatorView, TensorKey

# Rounds of refinement. Enough to tell the two halves of a block apart; middle blocks of a deep model remain equal.
HOPS = 3


def equivalence_classes(view: OperatorView, labels: Mapping[str, Hashable], hops: int) -> Mapping[str, int]:
    """Return the class of every operator and graph input, by node name.

    Args:
        view: the graph's operators and their edges.
        labels: what must be equal within a class, by node name (the name in a graph input's key).
        hops: number of edges up to which the neighbourhoods must be equal.
    """
    reads: dict[str, tuple[TensorKey, ...]] = {key[0]: () for key in view.sources}
    reads.update({step.name: step.input_keys for step in view.operators})
    users: dict[str, list[tuple[str, int, int]]] = {name: [] for name in reads}
    for step in view.operators:
        for index, (name, output) in enumerate(step.input_keys):
            if name in users:
                users[name].append((step.name, index, output))
    # A node whose value is an output of the graph differs from its equals inside: outputs must be whole.
    results = {name: sorted(i for n, i in view.output_keys if n == name) for name, _ in view.output_keys}
    colours = _number_labels((name, (labels[name], tuple(results.get(name, ())))) for name in reads)
    for _ in range(hops):
        colours = _number_labels(
            # Order matters among inputs (argument positions), not among users, which are sorted.
            (
                name,
                (
                    colours[name],
                    tuple((colours.get(n, -1), i) for n, i in reads[name]),
                    tuple(sorted((colours[n], i, o) for n, i, o in users[name])),
                ),
            )
            for name in reads
        )
    return colours


def _number_labels(labelled: Iterable[tuple[str, Hashable]]) -> dict[str, int]:
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(label, len(numbers)) for name, label in labelled}
