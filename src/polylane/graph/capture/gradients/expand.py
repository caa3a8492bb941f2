"""Expansion of gradient calls: reverse-mode differentiation of the captured graph by the graph's own operators.

From the outputs of a call back to its inputs, each operator on the way adds its vector-Jacobian product, in the order
in which autograd's engine computes them. What results is differentiated by ordinary autograd in the outer backward
pass, split by the rules of its operators, and cut into stages like everything else.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.capture.gradients.calls import GradientCall, passes_gradient
from polylane.graph.capture.gradients.noise import separate_noise
from polylane.graph.capture.gradients.products import NORMS, JacobianProduct, NoProduct, insert_product
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.nodes.names import source_of
from polylane.graph.nodes.user_lines import NotCaptured

TAKES_GRADIENTS = "it takes gradients inside itself (torch.autograd.grad)"


def expand_gradients(graph: fx.Graph, constants: dict[str, Tensor], memory_groups: Sequence[Sequence[fx.Node]]) -> bool:
    """Replace calls of torch.autograd.grad by operators; return whether there was any.

    Args:
        graph: captured code, changed in place; what it writes in place is in one of the ``memory_groups``.
        constants: tensors that the code closes over, by placeholder name; those of the products are added.
        memory_groups: groups of nodes that share memory which is written.

    Raises:
        NotCaptured: an operator on the way has no vector-Jacobian product that a graph could hold.
    """
    written = {node for group in memory_groups for node in group}
    calls = [(node, call) for node in graph.nodes if (call := GradientCall.of(node)) is not None]
    for node, _ in calls:  # in order: a later call may differentiate what an earlier one has become
        call = GradientCall.of(node)
        assert call is not None
        _Expansion(graph, constants, node, call, written).expand()
    return bool(calls)


class _Expansion:
    """Reverse-mode differentiation of the part of a graph between the inputs and the outputs of one call."""

    def __init__(
        self, graph: fx.Graph, constants: dict[str, Tensor], node: fx.Node, call: GradientCall, written: set[fx.Node]
    ) -> None:
        self.graph, self.constants, self.node, self.call, self.written = graph, constants, node, call, written
        # Gradients that have arrived, by node and index of its output (0 for a single one), not added up yet.
        self.arrived: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)

    def expand(self) -> None:
        while separate_noise(self.graph, self.constants, self._nodes_between()):
            pass  # attention's dropout comes out when it is written out
        between = self._nodes_between()
        for output, cotangent in zip(self.call.outputs, self.call.cotangents, strict=True):
            if cotangent is not None:
                self.arrived[output, 0].append(cotangent)
        for node in reversed(between):
            self._pass_back(node, set(between))
        self._replace_results([self._gradient_of(input_node) for input_node in self.call.inputs])

    def _nodes_between(self) -> list[fx.Node]:
        """Return the nodes through which the outputs depend on the inputs, both included, in the graph's order."""
        inputs, reached = set(self.call.inputs), set[fx.Node]()
        earlier_nodes: list[fx.Node] = []
        for node in self.graph.nodes:
            if node is self.node:
                break
            earlier_nodes.append(node)
            if node in inputs or (passes_gradient(node) and any(n in reached for n in node.all_input_nodes)):
                reached.add(node)
        needed = set(self.call.outputs)
        for node in reversed(earlier_nodes):
            if node in needed and node in reached:
                needed.update(node.all_input_nodes)
        return [node for node in earlier_nodes if node in needed and node in reached]

    def _pass_back(self, node: fx.Node, between: set[fx.Node]) -> None:
        """Pass the gradients that have arrived at a node on to its arguments."""
        arguments = [argument for argument in node.all_input_nodes if argument in between]
        if not arguments or node.op != "call_function":
            return
        if node.target is operator.getitem:
            of: Any = node.args
            self.arrived[of[0], of[1]] += self.arrived[node, 0]
            return
        val = node.meta["val"]
        cotangents = [self._added_up(node, i) for i in range(len(val) if isinstance(val, (list, tuple)) else 1)]
        if all(cotangent is None for cotangent in cotangents):
            return
        product = JacobianProduct(node, cotangents, arguments, self.call.differentiable)
        try:
            self._refuse_own_python(node)
            gradients = insert_product(self.graph, self.constants, product, self.node)
        except NoProduct as error:
            raise self._not_captured(node, str(error)) from error
        for argument, gradient in zip(arguments, gradients, strict=True):
            if gradient is not None:
                self.arrived[argument, 0].append(gradient)

    def _refuse_own_python(self, node: fx.Node) -> None:
        if not isinstance(node.target, (torch._ops.OpOverload, FunctionCall)):
            raise NoProduct("runs your own Python")
        if str(node.target) not in NORMS and (node in self.written or written_arguments(node)):
            raise NoProduct("writes in place what others read")

    def _not_captured(self, node: fx.Node, why: str) -> NotCaptured:
        line = source_of(node)
        name = getattr(node.target, "__name__", str(node.target)).removeprefix("aten.").partition(".")[0]
        return NotCaptured("", line, f"{TAKES_GRADIENTS}, and an operator on their way, {name}, {why}")

    def _added_up(self, node: fx.Node, index: int = 0) -> fx.Node | None:
        """Return the sum of the gradients that have arrived at an output of a node; None if there are none."""
        parts = self.arrived.get((node, index))
        if not parts:
            return None
        with self.graph.inserting_before(self.node):
            while len(parts) > 1:
                added = self.graph.call_function(torch.ops.aten.add.Tensor, (parts[0], parts[1]))
                added.meta = {**parts[1].meta}
                parts[:2] = [added]
        return parts[0]

    def _gradient_of(self, node: fx.Node) -> fx.Node:
        """Return the whole gradient to an input; zeros where the outputs do not depend on it."""
        gradient = self._added_up(node)
        with self.graph.inserting_before(self.node):
            if gradient is None:
                zeros = self.graph.call_function(torch.ops.aten.zeros_like.default, (node,))
                zeros.meta = {**self.node.meta, "val": node.meta["val"]}
                return zeros
            if self.call.differentiable:
                return gradient
            detached = self.graph.call_function(torch.ops.aten.detach.default, (gradient,))
            detached.meta = dict(gradient.meta)
            return detached

    def _replace_results(self, gradients: Sequence[fx.Node]) -> None:
        for user in list(self.node.users):
            index: Any = user.args[1]
            user.replace_all_uses_with(gradients[index])
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)
