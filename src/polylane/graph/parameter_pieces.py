"""Parameter pieces: which piece of a cut graph has each parameter of the model, one that the graph does not use too."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from polylane.graph.graph import Graph


def find_parameter_pieces(graph: Graph, piece_of: Mapping[str, int]) -> dict[str, int]:
    """Return the piece that has each parameter, by canonical name.

    It is the first piece that uses the parameter. One that no node uses (a head for other batches, a layer that joins
    later) has the piece of the nearest that some node does, all of a module the same: of those that share the longest
    path of modules with it the next in the model's order, and of two the earlier one.

    Args:
        graph: the graph that is cut, whose table has all parameters of the model.
        piece_of: the piece of every node, by the node's name.
    """
    pieces: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.parameters:
            pieces.setdefault(name, piece_of[node.name])
    order = {name: i for i, name in enumerate(dict.fromkeys((*graph.parameters, *pieces)))}
    used = sorted(pieces, key=order.__getitem__)
    if not used:
        return dict.fromkeys(order, 0)
    running = {path for name in used for path in _list_paths(name)}
    ends: dict[str, tuple[int, int]] = {}  # of each outermost module without any use, its first and last parameter
    unused = {name: next((p for p in _list_paths(name) if p not in running), name) for name in order.keys() - pieces}
    for name in sorted(unused, key=order.__getitem__):
        ends[unused[name]] = ends.get(unused[name], (order[name],))[0], order[name]

    def nearness(path: str, name: str) -> tuple[int, int]:
        shared = len({*_list_paths(path + ".")}.intersection(_list_paths(name)))
        start, end = ends[path]
        return -shared, max(start - order[name], order[name] - end)

    nearest = {path: pieces[min(used, key=lambda name: nearness(path, name))] for path in ends}
    return pieces | {name: nearest[path] for name, path in unused.items()}


def _list_paths(name: str) -> list[str]:
    """Return the paths of the modules that a parameter is in, from the outermost to its own."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))
