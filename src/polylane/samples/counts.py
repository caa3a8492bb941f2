"""Loss normalization: rewrite means over counts as totals over counts of the whole batch, exact for any split.

A mean over what counts in a batch (tokens that are not ignored, rows that a mask selects, weights) is no mean over
samples, but a total over a count: the total is a sum over samples, and the count, if it depends on the inputs alone,
can be computed for the whole batch before the first pass. A captured graph is rewritten accordingly:

    cross_entropy(x, y)     ->  cross_entropy(x, y, sum) / whole_batch(sum(y != ignored))
    x[mask].mean()          ->  sum(x[mask]) / whole_batch(sum(mask))
    total / mask.sum()      ->  total / whole_batch(mask.sum())

A sum that is added to a mean is multiplied by the ratio of the whole batch's samples to the part's, so that the loss is
a mean over samples whatever its terms. What cannot be rewritten stays as it was captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polylane.graph.capture.capture import capture
from polylane.graph.capture.describe_nodes import describe_node
from polylane.graph.capture.export import Loss
from polylane.graph.graph import Graph
from polylane.graph.nodes.facts import base_name, bind_arguments, op_name, unwrap_settings
from polylane.graph.nodes.names import name_without_number
from polylane.graph.operators.whole_batch_counts import BatchShare, CombineParts, WholeBatchStatistic, WholeSize
from polylane.graph.symbolic_sizes import SymbolicSize, data_dependent_symbols
from polylane.placement.rules.loss import ELEMENTWISE
from polylane.placement.rules.vocabulary import MEAN, NONE, SUM
from polylane.samples.derivation import Derivation, derive_composition
from polylane.samples.interpretation.known_states import NeededStatistic, RescaledOperand, nodes_from_inputs
from polylane.samples.interpretation.ragged import find_masks
from polylane.samples.once_per_batch import find_buffer_users

aten = torch.ops.aten

# Assume that all of the user's own Python treats samples independently: the rewritten graph must not depend on the
# plan.
ALL = ("model",)

_OF_CLASSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")


def capture_with_counts(model: nn.Module, loss: Loss, batch: Any, **options: Any) -> Graph:
    """Capture a graph as :func:`polylane.graph.capture.capture.capture` does, and normalize its loss by whole-batch
    counts.
    """
    return count_whole_batch(capture(model, loss, batch, **options))


def count_whole_batch(graph: Graph) -> Graph:
    """Return an equivalent graph whose loss is a mean over samples, and whose counters count batches, as far as proven.

    Args:
        graph: the captured graph, which is not changed.
    """
    return graph if graph.is_opaque or graph.is_undivided else _settle_buffers(_normalize_loss(graph))


def _settle_buffers(graph: Graph) -> Graph:
    """Return an equivalent graph that moves buffers once per batch where each part would move them, if it is proven.

    What a buffer takes must be the same for all parts; others stay as they are.
    """
    # Of parameters that a forward writes, the optimizer's and others, no copy is made.
    derived, refused = derive_composition(graph, ALL), set(graph.parameters)
    while derived.is_proven and (names := _buffers_moved(derived) - refused):
        draft = _CodeEditor.of(graph)
        ranges = [draft.settle_buffer(name) for name in sorted(names)]
        candidate = draft.build_graph()
        new_ranges = ((candidate.positions[begin], candidate.positions[end]) for begin, end in ranges)
        candidate = replace(candidate, unsplittable_ranges=(*candidate.unsplittable_ranges, *new_ranges))
        proven = derive_composition(candidate, ALL)
        unsettled_names = _buffers_moved(proven) | ({proven.buffer[0]} if proven.buffer else set())
        if proven.is_proven and not unsettled_names & names:
            return candidate
        refused |= unsettled_names & names or names
    return graph


def _buffers_moved(derived: Derivation) -> set[str]:
    """Return the buffers that each part moves further."""
    return {name for name, _ in derived.counters}


def _normalize_loss(graph: Graph) -> Graph:
    """Return an equivalent graph whose loss is a mean over samples; the graph itself if it cannot be rewritten."""
    draft = _CodeEditor.of(graph)
    draft.split_means()
    split = draft.build_graph()
    derived = derive_composition(split, ALL, counting=True)
    if not derived.is_proven:
        # Without a proof the split means gain nothing: keep the graph as captured.
        return graph
    if not derived.statistics and not derived.rescaled_operands:
        return split if len(split.nodes) > len(graph.nodes) else graph
    # The result is only used if it is proven by itself.
    candidate = draft.build_with_statistics(derived)
    proven = derive_composition(candidate, ALL)
    return candidate if proven.is_proven and not proven.statistics and not proven.rescaled_operands else graph


def find_coupling(graph: Graph) -> Derivation:
    """Derive why a batch cannot be divided even with all counts of the whole batch: what these mend is not at fault."""
    draft = _CodeEditor.of(graph)
    draft.split_means()
    return derive_composition(draft.build_graph(), ALL, counting=True)


@dataclass
class _CodeEditor:
    """Editor of a copy of a graph's code, to which operators are added.

    Attributes:
        source: the original graph, which is not changed.
        code: copy of its FX graph, which is edited.
        names: node names that are in use.
    """

    source: Graph
    code: fx.Graph
    names: set[str]

    @classmethod
    def of(cls, graph: Graph) -> _CodeEditor:
        """Copy a graph for editing."""
        code, values = fx.Graph(), dict[fx.Node, fx.Node]()
        code.output(code.graph_copy(graph.code.fx, values))
        for old, new in values.items():
            new.meta = dict(old.meta)
        return cls(graph, code, {node.name for node in graph.nodes})

    @property
    def slice_placeholder(self) -> fx.Node:
        """Placeholder of the sample slice."""
        placeholder: fx.Node = next(node for node in self.code.nodes if node.op == "placeholder")
        return placeholder

    # ---- means as totals over counts ----

    def split_means(self) -> None:
        """Rewrite every mean whose count follows from the inputs as a sum divided by that count."""
        input_nodes, origins = nodes_from_inputs(self.code), find_masks(self.code)
        for node in [n for n in self.code.nodes if base_name(n)]:
            base = base_name(node)
            val = node.meta.get("val")
            if isinstance(val, Tensor) and val.dtype is torch.float16:
                continue  # the sum may overflow float16 where the mean does not
            arguments = bind_arguments(node)[1]
            if base in _OF_CLASSES:
                self._split_class_loss(node, arguments, input_nodes)
            elif base == "mean" or (base in ELEMENTWISE and arguments["reduction"] == MEAN):
                self._split_ragged(node, base, arguments, origins, input_nodes)

    def _split_class_loss(self, node: fx.Node, arguments: dict[str, Any], input_nodes: set[fx.Node]) -> None:
        scores, target, weight = arguments["self"], arguments["target"], arguments["weight"]
        if (
            arguments["reduction"] != MEAN
            or target not in input_nodes
            or (weight is not None and weight not in input_nodes)
        ):
            return
        if target.meta["val"].is_floating_point() or scores.meta["val"].dim() < 2:
            return
        # The count of cross-entropy: targets that are not ignored, or the sum of their class weights.
        counts = self.insert_before(node, aten.ne.Scalar, target, arguments["ignore_index"])
        if weight is not None:
            ignored = self.insert_before(node, aten.logical_not.default, counts)
            classes = self.insert_before(node, aten.masked_fill.Scalar, target, ignored, 0)
            weights = self.insert_before(node, aten.index.Tensor, weight, [classes])
            counts = self.insert_before(node, aten.masked_fill.Scalar, weights, ignored, 0)
        self._divide_by_count(node, self.insert_before(node, aten.sum.default, counts))

    def _split_ragged(
        self,
        node: fx.Node,
        base: str,
        arguments: dict[str, Any],
        origins: dict[Any, fx.Node],
        input_nodes: set[fx.Node],
    ) -> None:
        """Rewrite a mean over rows that a mask selects."""
        symbols = {s for n in node.all_input_nodes for s in data_dependent_symbols(n.meta.get("val"))}
        if len(symbols) != 1 or node.meta["val"].dim():
            return
        mask = origins.get(next(iter(symbols)))
        if mask is None or mask not in input_nodes:
            return
        losses_per_row = self._losses_per_row(node, base, arguments)
        if losses_per_row is None:
            return
        counts = self.insert_before(node, aten.sum.default, mask)
        if losses_per_row > 1:
            counts = self.insert_before(node, aten.mul.Scalar, counts, losses_per_row)
        self._divide_by_count(node, counts)

    def _losses_per_row(self, node: fx.Node, base: str, arguments: dict[str, Any]) -> int | None:
        """Return how many elements of each selected row enter a mean; None if that is not a fixed number."""
        if base == "mean":
            sizes = [*arguments["self"].meta["val"].shape]
        else:
            with node.meta["val"].fake_mode:
                # The shape of the unreduced losses tells; the fake mode computes it without data.
                unreduced_arguments = {**arguments, "reduction": NONE}
                fake_arguments = {
                    k: v.meta["val"] if isinstance(v, fx.Node) else v for k, v in unreduced_arguments.items()
                }
                try:
                    target: Any = unwrap_settings(node.target)
                    sizes = [*target(**fake_arguments).shape]
                except Exception:  # an operator without unreduced losses
                    return None
        ragged = [size for size in sizes if not isinstance(size, int)]
        if len(ragged) != 1:
            return None
        (symbol,) = free_unbacked_symbols(ragged[0].node.expr)
        rows = ragged[0].node.expr / symbol  # one selected row may have become several rows
        fixed = math.prod(size for size in sizes if isinstance(size, int))
        return fixed * int(rows) if rows.is_Integer else None

    def _divide_by_count(self, node: fx.Node, counts: fx.Node) -> None:
        """Turn an operator's mean into a sum and divide that by ``counts``."""
        val = node.meta["val"]
        if base_name(node) == "mean":
            dtype = bind_arguments(node)[1].get("dtype")
            node.target, node.args, node.kwargs = aten.sum.default, (node.args[0],), {"dtype": dtype} if dtype else {}
            node.meta["op"] = op_name(node)
        else:
            _reduce_by_sum(node)
        with self.code.inserting_after(node):
            quotient = self.code.call_function(aten.div.Tensor, (node, counts))
        node.replace_all_uses_with(quotient, delete_user_cb=lambda user: user is not quotient)
        self._label_node(quotient, node, val, open_value(node))

    # ---- statistics and shares ----

    def build_with_statistics(self, derived: Derivation) -> Graph:
        """Add all statistics and rescalings of a derivation, which refers to nodes of :meth:`build_graph`."""
        statistic_nodes: dict[tuple[fx.Node, Any], fx.Node] = {}
        for statistic in derived.statistics:
            key = statistic.value, statistic.combine
            if key not in statistic_nodes:
                statistic_nodes[key] = self._insert_statistic(statistic)
            statistic.user.replace_input_with(statistic.value, statistic_nodes[key])
        for rescale in derived.rescaled_operands:
            self._insert_rescale(rescale)
        return self.build_graph()

    def _insert_statistic(self, statistic: NeededStatistic) -> fx.Node:
        value = statistic.value
        if statistic.combine is None:
            size: Any = value.target
            with self.code.inserting_after(value):
                whole_size = WholeSize(size.function, value.meta["val"], size.nominal)
                new_node = self.code.call_function(whole_size, (self.slice_placeholder,))
            self._label_node(new_node, value, value.meta["val"], open_value(value))
            return new_node
        counted = WholeBatchStatistic(statistic.combine)
        with self.code.inserting_after(value):
            new_node = self.code.call_function(counted, (self.slice_placeholder, value))
        like = statistic.user if value.op == "placeholder" else value
        self._label_node(new_node, like, value.meta["val"], open_value(value))
        counted.key = new_node.meta["name"]
        return new_node

    def _insert_rescale(self, rescale: RescaledOperand) -> None:
        value = rescale.value
        with self.code.inserting_before(rescale.user):
            share = self.code.call_function(BatchShare(rescale.power), (self.slice_placeholder,))
            product = self.code.call_function(aten.mul.Scalar, (value, share))
        self._label_node(share, value, 1.0)
        val = value.meta["val"]
        with val.fake_mode:
            self._label_node(product, value, val * 1.0, open_value(value) * 1.0)
        rescale.user.replace_input_with(value, product)

    # ---- buffers ----

    def settle_buffer(self, name: str) -> tuple[str, str]:
        """Let a forward compute a buffer's new value from the one before the step, and write it last.

        Returns:
            First and last node of what must stay on one stage.
        """
        buffer, touching = find_buffer_users(self.code, name)
        first_user, last_user = touching[0], touching[-1]
        start = WholeBatchStatistic(CombineParts.SAME)
        with self.code.inserting_before(first_user):
            old_value = self.code.call_function(start, (self.slice_placeholder, buffer))
        val, opened = buffer.meta["val"], open_value(buffer)
        self._label_node(old_value, first_user, val, opened)
        start.key = old_value.meta["name"]
        with self.code.inserting_before(first_user):
            working_copy = self.code.call_function(aten.clone.default, (old_value,))
        self._label_node(working_copy, first_user, val, opened)
        buffer.replace_all_uses_with(working_copy, delete_user_cb=lambda user: user is not old_value)
        with self.code.inserting_after(last_user):
            write = self.code.call_function(aten.copy_.default, (buffer, working_copy))
        self._label_node(write, last_user, val, opened)
        return str(old_value.meta["name"]), str(write.meta["name"])

    # ---- bookkeeping ----

    def insert_before(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Insert an operator before a node, attributed to the same source line."""
        with self.code.inserting_before(node):
            new_node = self.code.call_function(target, args)
        mode = node.meta["val"].fake_mode
        with mode:
            val = target(*fx.map_arg(args, lambda n: n.meta["val"]))
            opened = target(*fx.map_arg(args, open_value)) if self.source.code.open is not None else val
        self._label_node(new_node, node, val, opened)
        return new_node

    def _label_node(self, new_node: fx.Node, like: fx.Node, val: Any, opened: Any = None) -> None:
        """Set a new operator's metadata and a unique name, after the module of another operator."""
        new_node.meta = {
            key: like.meta[key] for key in ("stack_trace", "nn_module_stack", "module") if key in like.meta
        }
        new_node.meta |= {"val": val, "op": op_name(new_node)}
        if self.source.code.open is not None and opened is not None:
            new_node.meta["open"] = opened
        base = name_without_number(new_node)
        numbers = (base if n == 1 else f"{base}#{n}" for n in range(1, len(self.names) + 2))
        new_node.meta["name"] = next(name for name in numbers if name not in self.names)
        self.names.add(new_node.meta["name"])

    def build_graph(self) -> Graph:
        """Build a graph from the present state of the code."""
        source, results = self.source, self.code.output_node().args[0]
        flows: dict[str, bool] = {node.name: node.requires_grad for node in source.nodes}
        nodes = []
        for node in self.code.nodes:
            if node.op != "call_function":
                continue
            name = str(node.meta["name"])
            if name not in flows:
                floating = isinstance(val := node.meta["val"], Tensor) and val.is_floating_point()
                flows[name] = floating and any(flows.get(str(n.meta.get("name")), False) for n in node.all_input_nodes)
            at = source.positions.get(name)
            free = isinstance(node.target, SymbolicSize) if at is None else source.nodes[at].recomputable
            nodes.append(describe_node(node, flows[name], free))
        position = {node.name: i for i, node in enumerate(nodes)}
        # Ranges are given by position: they move with the inserted nodes.
        moved = {i: position[node.name] for i, node in enumerate(source.nodes)}
        return replace(
            source,
            nodes=tuple(nodes),
            unsplittable_ranges=tuple((moved[begin], moved[end]) for begin, end in source.unsplittable_ranges),
            code=replace(source.code, fx=self.code),
            outputs=tuple(str(node.meta["name"]) for node in results if node.op == "call_function"),  # type: ignore[union-attr]
        )


def open_value(node: fx.Node) -> Any:
    """Return a node's value with symbols for open sizes, where it has any."""
    return node.meta.get("open", node.meta["val"])


def _reduce_by_sum(node: fx.Node) -> None:
    """Give an operator's argument ``reduction`` the value of "sum"."""
    target: Any = unwrap_settings(node.target)
    position = [argument.name for argument in target._schema.arguments].index("reduction")
    if position < len(node.args):
        node.args = (*node.args[:position], SUM, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, "reduction": SUM}
