"""Parts of a graph that are alike are chosen for once: classes of nodes with the same surroundings.

Colour refinement (Weisfeiler and Leman, 1968), for a few rounds: after k of them two nodes have the same colour if
their surroundings look alike as far as k edges away.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from polylane.placement.operator_view import OperatorView, TensorKey

# How far alike. Enough to tell the two halves of a block apart; blocks in the middle of a deep model remain alike.
HOPS = 3


def equivalence_classes(view: OperatorView, labels: Mapping[str, Hashable], hops: int = HOPS) -> Mapping[str, int]:
    """The class of every step and source by name.

    Args:
        view: the graph.
        labels: of every step (by its name) and source (by its key's name): what must be equal within a class.
        hops: how far the surroundings must be alike.
    """
    reads: dict[str, tuple[TensorKey, ...]] = {key[0]: () for key in view.sources}
    reads.update({step.name: step.input_keys for step in view.operators})
    users: dict[str, list[tuple[str, int, int]]] = {name: [] for name in reads}
    for step in view.operators:
        for index, (name, output) in enumerate(step.input_keys):
            if name in users:
                users[name].append((step.name, index, output))
    results = {name: sorted(i for n, i in view.output_keys if n == name) for name, _ in view.output_keys}
    colours = _number_labels((name, (labels[name], tuple(results.get(name, ())))) for name in reads)
    for _ in range(hops):
        colours = _number_labels(
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
