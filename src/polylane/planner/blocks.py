"""Parts of a graph that are alike are chosen for once: classes of nodes with the same surroundings.

Colour refinement (Weisfeiler and Leman, 1968), for a few rounds: after k of them two nodes have the same colour if
their surroundings look alike as far as k edges away.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from polylane.placement.view import Key, View

# How far alike. Enough to tell the two halves of a block apart; blocks in the middle of a deep model remain alike.
HOPS = 3


def classes(view: View, labels: Mapping[str, Hashable], hops: int = HOPS) -> Mapping[str, int]:
    """The class of every step and source by name.

    Args:
        view: the graph.
        labels: of every step (by its name) and source (by its key's name): what must be equal within a class.
        hops: how far the surroundings must be alike.
    """
    reads: dict[str, tuple[Key, ...]] = {key[0]: () for key in view.sources}
    reads.update({step.name: step.reads for step in view.steps})
    users: dict[str, list[tuple[str, int, int]]] = {name: [] for name in reads}
    for step in view.steps:
        for index, (name, output) in enumerate(step.reads):
            if name in users:
                users[name].append((step.name, index, output))
    results = {name: sorted(i for n, i in view.results if n == name) for name, _ in view.results}
    colours = _numbered((name, (labels[name], tuple(results.get(name, ())))) for name in reads)
    for _ in range(hops):
        colours = _numbered(
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


def _numbered(labelled: Iterable[tuple[str, Hashable]]) -> dict[str, int]:
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(label, len(numbers)) for name, label in labelled}
