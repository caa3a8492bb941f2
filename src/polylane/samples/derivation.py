"""Additivity over samples, derived: how the parts of a batch make up every value of a captured graph, for all inputs.

Nothing is computed. An operator's placement rule says what each of two ranks computes when the samples are cut between
them. Where that is the very call that a replica makes which has these samples alone, the parts' values make up the
whole's as the rule says: row after row, or in their sum. What no rule proves is not known.

Linear operators keep additive(q); additive(q) times proportional(p) is additive(q - p). Rows become additive where an
operator sums over the samples. Everything else that joins rows, or is not linear, makes an unknown value, unless what
stands in the way depends on the inputs alone: then it can be counted over the whole batch first (a *statistic*, see
:mod:`polylane.samples.counts`), and is alike for all parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from polylane.graph.graph import Graph, Node
from polylane.graph.inplace import writes
from polylane.graph.orders import Order, Seen
from polylane.graph.precision import innermost
from polylane.graph.sizes import grows
from polylane.graph.statistics import batch_norm
from polylane.placement.placement import REPLICATE, Replicate, Shard
from polylane.placement.view import Key, op_of
from polylane.samples.additivity import State, power_of_additive
from polylane.samples.functions import proven_function
from polylane.samples.known_states import Rescale, Statistic
from polylane.samples.statistics import ancestors
from polylane.samples.walk import Walk, walked


@dataclass(frozen=True)
class Derivation:
    """What is proven of a graph.

    Attributes:
        states: of every tensor of which it is known, how the parts make it up.
        orders: the same by node name, as plans ask for it.
        statistics, rescaled: what must be added to the graph for this to hold.
        culprit: the operator at which the loss stops being made up of the parts' losses; None where it never does.
        why: in a few words, what that operator does.
        buffer: a buffer that replicas would disagree on, with the operator that writes it.
        counters: buffers that something else than a batch normalization writes, once for each part.
        unproven: nodes that run the user's own Python on samples, about which only the user knows.
    """

    states: Mapping[Key, State]
    orders: Mapping[str, Order]
    statistics: tuple[Statistic, ...] = ()
    rescaled: tuple[Rescale, ...] = ()
    culprit: Node | None = None
    why: str = ""
    buffer: tuple[str, Node] | None = None
    counters: tuple[tuple[str, Node], ...] = ()
    unproven: tuple[Node, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the loss, and every buffer, is made up of the parts'."""
        return self.culprit is None and self.buffer is None


def known_orders(graph: Graph, per_sample: Collection[str] = ()) -> Seen:
    """How the parts of a batch make up the values of a graph that may cross between stages; see :func:`derive`."""
    return Seen(derive(graph, per_sample).orders)


def derive(
    graph: Graph,
    per_sample: Collection[str] = (),
    *,
    counting: bool = False,
) -> Derivation:
    """How the parts of a batch make up the values of a graph, and its loss.

    Args:
        graph: nothing of it is computed.
        per_sample: module paths of what runs the user's own Python and, as the user says, treats every sample by
            itself; "model" for all of it.
        counting: whether statistics of the whole batch, and shares of it, may be added to the graph: they are told.
    """
    nodes = graph.code.fx.nodes
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder" and n.meta["role"][0] == "input"]
    nothing = Derivation({}, {}, culprit=graph.nodes[-1], why="fixed")
    if not any(isinstance(val, Tensor) and any(map(grows, val.shape)) for val in inputs):
        return nothing
    unseen = next((n for n in nodes if _writes_unseen(n)), None)
    if unseen is not None:
        at_fault = next(node for node in graph.nodes if node.id == unseen.name)
        return Derivation({}, {}, culprit=at_fault, why="writes in place")
    walk = walked(graph, per_sample, counting=counting, functions=proven_function)
    return nothing if walk is None else _conclude(walk)


def _writes_unseen(node: fx.Node) -> bool:
    """Whether an operator writes in place under a setting, or with a key, of its own: whose memory, nobody tells."""
    base = op_of(node).split(".")[1] if node.op == "call_function" and op_of(node).startswith("aten.") else ""
    return base.endswith("_") and not base.endswith("__") and not writes(node)


def _conclude(walk: Walk) -> Derivation:
    """What all this says of the loss."""
    output = walk.graph.code.fx.output_node()
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    wanted = 1 if walk.graph.mean else 0
    culprit: Node | None = None
    for result in results:
        power = power_of_additive(walk.states.get(walk.key(result)))
        if power is None or (power != wanted and not walk.counting):
            culprit = culprit or _first_unknown(walk, result)
        elif power != wanted:
            walk.rescaled[output, result] = Rescale(output, result, wanted - power)
    buffer = next(iter(walk.buffers.items()), None)
    return Derivation(
        states=walk.states,
        orders=_orders(walk),
        statistics=tuple(walk.statistics.values()),
        rescaled=tuple(walk.rescaled.values()),
        culprit=culprit,
        why="" if culprit is None else _why(culprit),
        buffer=None if buffer is None else (buffer[0], walk.described[buffer[1]]),
        counters=tuple(_counters(walk, results)),
        unproven=tuple(walk.unproven),
    )


def _orders(walk: Walk) -> dict[str, Order]:
    orders = {}
    for name in walk.graph.positions:
        key = walk.view.aliases.get(name, (name, 0))
        state = walk.states.get(key)
        if state is None or key in walk.numbers:
            continue
        if isinstance(state, (Shard, Replicate)):
            if state == walk.lies[key]:
                orders[name] = Order.ALIKE if state == REPLICATE else Order.ROWS
        elif power_of_additive(state) in (0, 1):
            orders[name] = Order.MEAN if power_of_additive(state) else Order.SUM
    return orders


def _first_unknown(walk: Walk, result: fx.Node) -> Node:
    """The first operator on the way to a result of whose value nothing is known, though of all that it reads."""
    needed = ancestors([result])
    order = [n for n in walk.graph.code.fx.nodes if n in needed and n.op == "call_function"]
    for node in order:
        if not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
            continue
        if walk.key(node) not in walk.states:
            return walk.described[str(node.meta["name"])]
    return walk.described[str(order[-1].meta["name"])] if order else walk.graph.nodes[-1]


def _why(node: Node) -> str:
    return "own Python" if node.op in ("leaf", "function") else "" if node.shape else "scalar"


def _counters(walk: Walk, results: Sequence[fx.Node]) -> Iterator[tuple[str, Node]]:
    """Buffers that are written once for each part, and by nothing that moves microbatch by microbatch anyhow.

    Where batch statistics move running averages, numbers that count the passes move with them.
    """
    needed = ancestors(results)
    nodes = walk.graph.code.fx.nodes
    normalizing = {str(n.meta["module"]) for n in nodes if innermost(n.target) is batch_norm}
    for node in nodes:
        for written in writes(node) if op_of(node).startswith("aten.") else ():
            memory = walk.memory[written]
            if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                continue
            matters = any(n in needed for n, of in walk.memory.items() if of is memory)
            owner = str(memory.meta["role"][1]).rpartition(".")[0]
            counts_passes = owner in normalizing and not memory.meta["val"].is_floating_point()
            if matters or not counts_passes:
                yield str(memory.meta["role"][1]), walk.described[str(node.meta["name"])]
