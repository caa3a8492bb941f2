"""Stage code: one stage's part of the graph as a compiled function, with the watch over the user's own Python in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.graph import Node
from polylane.graph.operators.device_arguments import replace_devices
from polylane.graph.partition import Partition
from polylane.placement.overlap import overlap_redistributions
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.sized_calls import write_sizes
from polylane.placement.strategy import OperatorCall
from polylane.runtime.compiled_regions import with_compiled_regions
from polylane.runtime.pipeline.defer_weights import defer_weight_gradients
from polylane.runtime.pipeline.generated_code import generate_code
from polylane.runtime.pipeline.recompute import Recomputation
from polylane.runtime.stage_hooks import PythonCallWatch, StageHooks, WatchedCall
from polylane.sharding.layout import Layout


@dataclass(frozen=True)
class StageCode:
    """The executable part of one stage.

    Attributes:
        run: the function from arguments by role to (outgoing values ..., parts of the loss ...).
        roles: role of each argument as in :class:`polylane.graph.graph.Code`, or ("value", name) for incoming values.
        outputs: names of the values that leave, in the order of the result.
        has_loss: whether the loss follows the outgoing values.
        nodes_by_line: line of the generated source -> node, for errors.
        file: file name under which the source is compiled.
        graph: the code as an fx graph, for interpreting it node by node.
        watch: watch over the calls of the user's own Python.
        weight_groups: what :func:`.weight_gradients.defer_weight_gradients` returned; empty where backward passes are
            not split, or have nothing to compute later.
        recomputation: drops tensors in a forward pass, and makes them again in the backward pass.
    """

    run: Callable[..., tuple[Any, ...]]
    roles: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]
    has_loss: bool
    nodes_by_line: dict[int, Node]
    file: str
    graph: fx.Graph
    watch: PythonCallWatch
    recomputation: Recomputation
    weight_groups: tuple[int, ...] = ()


def extract_stage(
    partition: Partition,
    stage: int,
    device: torch.device,
    hooks: StageHooks,
    splits_backward: bool = False,
    dropped: DroppedTensors = NOTHING_DROPPED,
    compiles: bool = False,
    is_rewritten: bool = False,
) -> StageCode:
    """Extract the part of the graph that a stage runs, and compile it.

    Args:
        partition: the captured graph and its cuts into stages.
        stage: the stage, from 0.
        device: the device that the stage computes on.
        hooks: insert their gates into the code.
        splits_backward: whether the schedule has backward passes in two halves.
        dropped: what forward passes drop, to recompute it.
        compiles: whether its operators are compiled by inductor.
        is_rewritten: whether it is rewritten for sharded operators before it runs, see :class:`LocalStageCode`: what
            runs is compiled then, defers gradients and reads cast weights.
    """
    chosen = {node.name: node for node in partition.nodes(stage)}
    outputs = tuple(c.value for c in partition.crossings if c.producer == stage)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    source = partition.graph.code.fx
    body = [n for n in source.nodes if n.op == "call_function" and n.meta["name"] in chosen]
    members = set(body)
    loss: list[fx.Node] = []
    if stage == partition.loss_stage:
        loss = list(source.output_node().args[0])  # type: ignore[arg-type]
    # Arguments are what the body reads from outside of it: parameters, inputs, and values of other stages.
    arguments = dict.fromkeys(i for n in body for i in n.all_input_nodes if i not in members)
    arguments |= dict.fromkeys(n for n in loss if n not in members)
    for node in source.nodes:  # in the graph's own order
        if node in arguments:
            role = node.meta["role"] if node.op == "placeholder" else ("value", node.meta["name"])
            values[node] = copied = graph.placeholder(node.name)
            copied.meta = {**node.meta, "role": role}
    # Nodes are copied: the captured graph is shared by all stages.
    by_name, watch = {}, PythonCallWatch()
    for node in body:
        values[node] = copied = graph.node_copy(node, lambda n: values[n])
        copied.args, copied.kwargs = replace_devices(copied.args, device), replace_devices(copied.kwargs, device)
        copied.meta = dict(node.meta)
        described = chosen[node.meta["name"]]
        if described.is_own_python:
            copied.target = WatchedCall(node.target, described, watch)
        by_name[node.meta["name"]] = copied
    graph.output((*[by_name[name] for name in outputs], *[values[n] for n in loss]))
    groups = _defer_weights(graph, partition) if splits_backward and not is_rewritten else ()
    if not is_rewritten:
        hooks.cast_weights(graph)
    recomputation = Recomputation(graph, dropped, hooks.pack_saved, hooks.unpack_saved, chosen)
    run, lines, file = _compile_graph(
        graph, f"stage {stage}", chosen, hooks, recomputation, device if compiles and not is_rewritten else None
    )
    return StageCode(run, _roles(graph), outputs, bool(loss), lines, file, graph, watch, recomputation, groups)


def _roles(graph: fx.Graph) -> tuple[tuple[str, Any], ...]:
    return tuple(n.meta["role"] for n in graph.nodes if n.op == "placeholder")


def _defer_weights(graph: fx.Graph, partition: Partition) -> tuple[int, ...]:
    """Rewrite a stage's code for backward passes in two halves."""
    parameters = partition.graph.parameters
    return defer_weight_gradients(graph, lambda name: parameters[name].trainable)


class _SizedCode(NamedTuple):
    """Code that is written with formulas of the open sizes.

    Attributes:
        admits: tells of a number of samples and open sizes whether the code is that of this rank.
        code: the compiled code, which computes its numbers from the sample slice.
    """

    admits: Callable[[Sequence[int]], bool]
    code: StageCode


_SIZED_KEPT = 8  # pieces of code for other ranges of open sizes that are kept for one number of samples


@dataclass(frozen=True)
class LocalStageCode:
    """A stage's code with sharded operators, as one rank of the mesh runs it: rewritten for a number of samples.

    Attributes:
        whole: the stage's code with operators that are not split.
        partition: the captured graph and its cuts into stages.
        layout: the strategies chosen for the operators of the stage.
        coordinates: this rank's index along each axis of the mesh.
        dtypes: results of operators whose dtype autocast changes, by name.
        hooks: insert their gates into the code.
        splits_backward: whether the schedule has backward passes in two halves.
        dropped: what forward passes drop, to recompute it.
        compiled_for: device for which its operators are compiled by inductor; None: they are not.
    """

    whole: StageCode
    partition: Partition
    layout: Layout
    coordinates: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    hooks: StageHooks
    splits_backward: bool = False
    dropped: DroppedTensors = NOTHING_DROPPED
    compiled_for: torch.device | None = None
    _written: dict[int, list[_SizedCode]] = field(default_factory=dict)

    def rewrite_for(self, samples: int, open_sizes: tuple[int, ...]) -> StageCode:
        """Rewrite the code for a part with that number of samples, of a batch with these open sizes.

        Code that was written with formulas of the open sizes serves all of them for which these hold.
        """
        formula = self.layout.formula(samples, open_sizes)
        if formula is None:
            return self._compile(self._rewrite(*self.layout.at(samples, open_sizes), samples, open_sizes))
        sized_codes = self._written.setdefault(samples, [])
        for sized_code in sized_codes:
            if sized_code.admits((samples, *open_sizes)):
                return sized_code.code
        traced = formula.trace_at((samples, *open_sizes))
        graph = self._rewrite(traced.calls, traced.splits, samples, traced.trace.sizes[1:])
        traced.trace.close()
        write_sizes(graph)
        sized_codes.insert(0, _SizedCode(traced.trace.compile_guards(), self._compile(graph)))
        del sized_codes[_SIZED_KEPT:]
        return sized_codes[0].code

    def _rewrite(
        self,
        calls: Mapping[str, OperatorCall],
        splits: Mapping[str, AxisSplit],
        samples: int,
        open_sizes: tuple[Any, ...],
    ) -> fx.Graph:
        graph = rewrite(
            self.whole.graph,
            calls,
            splits,
            samples,
            self.coordinates,
            aliases=self.layout.view.aliases,
            leaving=self.whole.outputs,
            dtypes=self.dtypes,
            open_sizes=open_sizes,
        )
        overlap_redistributions(graph)
        return graph

    def _compile(self, graph: fx.Graph) -> StageCode:
        groups = _defer_weights(graph, self.partition) if self.splits_backward else ()
        self.hooks.cast_weights(graph)
        nodes = {node.name: node for node in self.partition.graph.nodes}
        recomputation = Recomputation(graph, self.dropped, self.hooks.pack_saved, self.hooks.unpack_saved, nodes)
        label = f"a rank's part of {self.whole.file}"
        run, lines, file = _compile_graph(graph, label, nodes, self.hooks, recomputation, self.compiled_for)
        return replace(
            self.whole,
            run=run,
            roles=_roles(graph),
            nodes_by_line=lines,
            file=file,
            graph=graph,
            recomputation=recomputation,
            weight_groups=groups,
        )


def _compile_graph(
    graph: fx.Graph,
    label: str,
    chosen: Mapping[str, Node],
    hooks: StageHooks,
    recomputation: Recomputation,
    compiled_for: torch.device | None = None,
) -> tuple[Callable[..., Any], dict[int, Node], str]:
    """Compile a graph's Python source under a unique file name, so that an error's line identifies the node.

    With ``compiled_for`` runs of torch operators are compiled by inductor for that device, and called as one.
    """
    with hooks.insert_gates(graph), recomputation.watching_calls():
        code = generate_code(graph if compiled_for is None else with_compiled_regions(graph, compiled_for), label)
        # A gate, or a size, is none of the graph's own nodes.
        lines = {line: chosen[n.meta["name"]] for line, n in code.nodes_by_line.items() if n.meta.get("name") in chosen}
    return code.run, lines, code.file
