"""Derivation of batch layouts: prove how the parts of a batch make up every value of a captured graph, for all inputs.

Nothing is computed. An operator's placement rule says what each of two ranks computes if the samples are sharded over
them. Where that equals the call of a replica that has these samples alone, the parts' values make up the whole's as the
rule says: concatenated, or summed. What no rule proves is unknown.

Linear operators preserve additive(q); additive(q) times proportional(p) is additive(q - p) (see
:mod:`polylane.samples.interpretation.additivity`). Rows become additive where an operator sums over the samples. Any
other operator that joins rows, or is not linear, makes an unknown value, unless the operand in question depends on the
inputs alone: then it can be computed over the whole batch first (a *statistic*, see :mod:`polylane.samples.counts`),
and is equal for all parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from polylane.graph.graph import Graph, Node, once_per_graph
from polylane.graph.interpreter import find_ancestors
from polylane.graph.nodes.facts import base_name, unwrap_settings
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.symbolic_sizes import is_dynamic
from polylane.placement.placement import REPLICATE, Replicate, Shard
from polylane.placement.rules.registry import rule_of
from polylane.samples.autograd.autograd_functions import prove_function, trace_joins_samples
from polylane.samples.batch_layout import BatchLayout
from polylane.samples.interpretation.abstract_interpreter import AbstractInterpreter, interpret
from polylane.samples.interpretation.additivity import State, power_of_additive
from polylane.samples.interpretation.known_states import NeededStatistic, RescaledOperand
from polylane.samples.once_per_batch import find_settled_buffers


@dataclass(frozen=True)
class Derivation:
    """Everything that is proven of a graph.

    Attributes:
        batch_layouts: node name -> batch layout, for every value whose composition from parts is proven.
        shards: node name -> how a value is cut at WHOLE samples, for every value of which each part has its samples'
            elements, be they in the order of the samples or not ("view(-1)" of samples in dimension 1).
        statistics, rescaled_operands: additions to the graph on which the proof depends.
        culprit: first operator at which the proof fails for the loss; None if it is proven.
        explanation: keyword for the message: "fixed", "writes in place", "no rule" (nothing is known of the culprit) or
            "".
        written: name of a buffer that the culprit writes; "" where it writes none.
        is_declarable: whether the user's word on the culprit may be asked for: not where its backward pass has hooks,
            or where its trace shows that samples are combined.
        effects: what the culprit does besides computing, if it runs the user's own Python.
        buffer: a buffer that would differ between replicas, with the operator that writes it; or None.
        counters: buffers written once per part by anything but batch normalization, each with the operator.
        unproven: nodes that run the user's own Python on samples, of which nothing can be proven.
    """

    batch_layouts: Mapping[str, BatchLayout]
    statistics: tuple[NeededStatistic, ...] = ()
    rescaled_operands: tuple[RescaledOperand, ...] = ()
    culprit: Node | None = None
    explanation: str = ""
    effects: str = ""
    buffer: tuple[str, Node] | None = None
    counters: tuple[tuple[str, Node], ...] = ()
    unproven: tuple[Node, ...] = ()
    written: str = ""
    is_declarable: bool = True
    shards: Mapping[str, Shard] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        """Whether loss and buffers of the whole batch are proven to follow from those of its parts."""
        return self.culprit is None and self.buffer is None


def derive_composition(graph: Graph, per_sample: Collection[str] = (), *, counting: bool = False) -> Derivation:
    """Derive how the parts of a batch make up the values and the loss of a graph.

    Args:
        graph: the captured graph; none of its operators is run.
        per_sample: paths of modules with the user's own Python that, as the user declares, treat samples independently;
            "model" for all.
        counting: whether the proof may ask for whole-batch statistics and rescalings; they are returned.
    """
    derivations = _known_compositions(graph)
    # What is declared matters only where something is not proven without.
    key = None if (None, counting) in derivations else frozenset(per_sample)
    if (key, counting) not in derivations:
        derivation = _derive_composition(graph, per_sample, counting)
        derivations[frozenset(per_sample) if derivation.unproven else None, counting] = derivation
        return derivation
    return derivations[key, counting]


@once_per_graph
def _known_compositions(graph: Graph) -> dict[tuple[frozenset[str] | None, bool], Derivation]:
    """Return where derivations of a graph are kept, by what is declared (None: whatever it is) and ``counting``."""
    return {}


def _derive_composition(graph: Graph, per_sample: Collection[str], counting: bool) -> Derivation:
    nodes = graph.code.fx.nodes
    if graph.is_undivided:
        return Derivation(dict.fromkeys(graph.positions, BatchLayout.REPLICATED))
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder" and n.meta["role"][0] == "input"]
    nothing = Derivation({}, culprit=graph.nodes[-1], explanation="fixed")
    if not any(isinstance(val, Tensor) and any(map(is_dynamic, val.shape)) for val in inputs):
        return nothing
    unseen = next((n for n in nodes if _writes_unknown_memory(n)), None)
    if unseen is not None:
        at_fault = next(node for node in graph.nodes if node.id == unseen.name)
        return Derivation({}, culprit=at_fault, explanation="writes in place")
    walk = interpret(graph, per_sample, counting=counting, functions=prove_function)
    return nothing if walk is None else _build_derivation(walk)


def _writes_unknown_memory(node: fx.Node) -> bool:
    """Return whether an operator writes in place but its written arguments are unknown (inside a wrapper)."""
    base = base_name(node)
    return base.endswith("_") and not base.endswith("__") and not written_arguments(node)


def _build_derivation(walk: AbstractInterpreter) -> Derivation:
    """Build the derivation from a finished interpretation: is the loss additive with the wanted power?"""
    output = walk.graph.code.fx.output_node()
    results: list[fx.Node] = list(output.args[0])[: walk.graph.loss_parts]  # type: ignore[arg-type]
    # A mean must be additive(1); total and count of polylane.Mean are sums, additive(0).
    expected_power = 1 if walk.graph.loss_is_mean else 0
    culprit: Node | None = None
    for result in results:
        power = power_of_additive(walk.states.get(walk.key_of(result)))
        if power is None or (power != expected_power and not walk.counting):
            culprit = culprit or _find_first_unknown(walk, result)
        elif power != expected_power:
            walk.rescaled[output, result] = RescaledOperand(output, result, expected_power - power)
    culprit = culprit or next(iter(walk.unproven_checks), None)
    buffer = next(iter(walk.buffers.items()), None)
    return Derivation(
        batch_layouts=_batch_layouts(walk),
        shards={name: state for name, state in _known_states(walk) if isinstance(state, Shard)},
        statistics=tuple(walk.statistics.values()),
        rescaled_operands=tuple(walk.rescaled.values()),
        culprit=culprit,
        explanation="no rule" if culprit is not None and _has_no_rule(walk, culprit) else "",
        written="" if culprit is None else _find_written_buffer(walk, culprit),
        is_declarable=culprit is None or _is_declarable(walk, culprit),
        effects="" if culprit is None else _describe_effects(walk.graph, culprit),
        buffer=None if buffer is None else (buffer[0], walk.described[buffer[1]]),
        counters=tuple(_find_counters(walk, results)),
        unproven=tuple(walk.unproven),
    )


def _has_no_rule(walk: AbstractInterpreter, node: Node) -> bool:
    """Return whether no rule says how an operator treats samples."""
    fx_node = next(candidate for candidate in walk.graph.code.fx.nodes if candidate.name == node.id)
    return not node.is_own_python and bool(base_name(fx_node)) and rule_of(str(fx_node.meta["op"])) is None


def _find_written_buffer(walk: AbstractInterpreter, node: Node) -> str:
    """Return the name of a buffer of the model that a node writes; "" if it writes none."""
    fx_node = next(candidate for candidate in walk.graph.code.fx.nodes if candidate.name == node.id)
    roles = [walk.memory[argument].meta.get("role", ("", "")) for argument in written_arguments(fx_node)]
    return next((str(name) for kind, name in roles if kind == "buffer"), "")


def _is_declarable(walk: AbstractInterpreter, node: Node) -> bool:
    """Return whether the user may be asked for a word on a node: nothing is known of its backward pass."""
    fx_node = next(candidate for candidate in walk.graph.code.fx.nodes if candidate.name == node.id)
    call = unwrap_settings(fx_node.target)
    effects = getattr(getattr(call, "own", call), "effects", ())
    return not any(effect.kind == "hook" for effect in effects) and not trace_joins_samples(fx_node)


def _describe_effects(graph: Graph, node: Node) -> str:
    """Return what a node of the user's own Python does besides computing, for messages; "" for nothing."""
    call = unwrap_settings(next(candidate.target for candidate in graph.code.fx.nodes if candidate.name == node.id))
    return "; ".join(effect.describe for effect in getattr(getattr(call, "own", call), "effects", ()))


def _known_states(walk: AbstractInterpreter) -> Iterator[tuple[str, State]]:
    """Yield the state of every node's value that parts make up by their values alone, not by numbers of rows."""
    for name in walk.graph.positions:
        key = walk.view.aliases.get(name, (name, 0))
        state = walk.states.get(key)
        if state is not None and key not in walk.size_cuts:
            yield name, state


def _batch_layouts(walk: AbstractInterpreter) -> dict[str, BatchLayout]:
    orders = {}
    for name, state in _known_states(walk):
        if isinstance(state, (Shard, Replicate)):
            if state == walk.placements[walk.view.aliases.get(name, (name, 0))]:
                orders[name] = BatchLayout.REPLICATED if state == REPLICATE else BatchLayout.SHARDED_BY_SAMPLE
        elif power_of_additive(state) in (0, 1):
            orders[name] = BatchLayout.MEAN if power_of_additive(state) else BatchLayout.SUM
    return orders


def _find_first_unknown(walk: AbstractInterpreter, result: fx.Node) -> Node:
    """Return the first operator on the way to a result whose value has no proven state."""
    needed = find_ancestors([result])
    order = [n for n in walk.graph.code.fx.nodes if n in needed and n.op == "call_function"]
    for node in order:
        if not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
            continue
        if walk.key_of(node) not in walk.states:
            return walk.described[str(node.meta["name"])]
    return walk.described[str(order[-1].meta["name"])] if order else walk.graph.nodes[-1]


def _find_counters(walk: AbstractInterpreter, results: Sequence[fx.Node]) -> Iterator[tuple[str, Node]]:
    """Yield buffers that are written once for each part, unlike on one device.

    Exempt are the pass counters of batch normalizations, whose running averages move per microbatch anyhow. And each
    part may write the same value, see :mod:`polylane.samples.once_per_batch`.
    """
    needed = find_ancestors(results)
    nodes = walk.graph.code.fx.nodes
    settled = find_settled_buffers(walk.graph.code.fx, walk.memory)
    normalizing = {str(n.meta["module"]) for n in nodes if unwrap_settings(n.target) is batch_norm}
    for node in nodes:
        for written in written_arguments(node) if base_name(node) else ():
            memory = walk.memory[written]
            if memory.op != "placeholder" or memory.meta["role"][0] not in ("buffer", "parameter"):
                continue
            if memory in settled:
                continue
            matters = any(n in needed for n, of in walk.memory.items() if of is memory)
            owner = str(memory.meta["role"][1]).rpartition(".")[0]
            counts_passes = owner in normalizing and not memory.meta["val"].is_floating_point()
            if matters or not counts_passes:
                yield str(memory.meta["role"][1]), walk.described[str(node.meta["name"])]
