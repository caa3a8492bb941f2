"""Split dependence: what a model computes of each microbatch as a whole, so that other microbatches give other numbers.

Whatever else a loss computes adds up over the parts of a batch, or is refused (:mod:`.batch_division`). Two kinds of
operators are let through all the same: batch normalization in training, which takes the statistics of a microbatch, as
in GPipe (section 2.3), and random numbers that do not go by the samples' places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from polylane.errors import format_plural
from polylane.graph.capture.assign_keys import KeyedInPlace, draws_by_sample, is_drawn_by_slice
from polylane.graph.graph import Code, Graph
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.operators.sync_batch_norm import batch_norm

NAMED = 2  # modules that a sentence names
_KEYED_FUNCTIONS = frozenset(KEYED.values())


def depends_on_split(code: Code) -> bool:
    """Return whether a model computes something else on a batch in parts: statistics or random numbers of each part."""
    return code.has_batch_statistics or (code.random and not draws_by_sample(code.fx))


def describe_split_dependence(graphs: Collection[Graph]) -> str:
    """Describe what depends on microbatches, as nouns, by the paths of the modules; empty where nothing does."""
    clauses = []
    dependent = [graph for graph in graphs if depends_on_split(graph.code)]
    for kind, subject in ((_normalizes, "the statistics"), (is_drawn_by_slice, "the random numbers")):
        if places := _name_modules(dependent, kind):
            clauses.append(f"{subject} of a microbatch in {places}")
    return " and ".join(clauses)


def note_draws(graph: Graph) -> str:
    """Return a sentence where a model draws random numbers: no plan draws them as torch does; empty where none are."""
    places = _name_modules([graph], _draws) if graph.code.random else ""
    return places and (
        f"the random numbers of {places} are drawn by step and sample: every plan draws the same, and without a plan "
        "torch draws others"
    )


def note_microbatches(graphs: Collection[Graph], microbatches: int, samples: int) -> str:
    """Return a sentence where the numbers are not those of whole batches, for the microbatches; empty where they are.

    Args:
        graphs: captured graphs of all objectives.
        microbatches: microbatches of a step.
        samples: samples of a step, over all workers.
    """
    clause = describe_split_dependence(graphs) if microbatches > 1 else ""
    size = format_plural(-(-samples // microbatches), "sample")
    return clause and (
        f"microbatches={microbatches}, of {size} each: the numbers depend on {clause}; they are those of one worker "
        "that takes the same microbatches, and microbatches=1 has those of whole batches"
    )


def _name_modules(graphs: Collection[Graph], kind: Callable[[fx.Node], bool]) -> str:
    """Return the paths of the first modules with operators of a kind, and how many more there are."""
    modules: dict[str, None] = {}
    for graph in graphs:
        nodes = [node for node in graph.code.fx.nodes if node.op == "call_function" and kind(node)]
        places = [graph.positions.get(str(node.meta["name"])) for node in nodes]
        modules |= dict.fromkeys(graph.nodes[at].module or "the loss" for at in places if at is not None)
    remaining = len(modules) - NAMED
    return ", ".join([*modules][:NAMED]) + (f" and {remaining} more" if remaining > 0 else "")


def _normalizes(node: fx.Node) -> bool:
    target = unwrap_settings(node.target)
    return target is batch_norm or bool(getattr(getattr(target, "own", None), "normalizes", False))


def _draws(node: fx.Node) -> bool:
    target = unwrap_settings(node.target)
    target = target.function if isinstance(target, KeyedInPlace) else target
    return target in _KEYED_FUNCTIONS or is_drawn_by_slice(node)
