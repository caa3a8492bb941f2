"""Stage runner: one stage's part of the graph as a compiled function, with its forward and backward pass.

Between the stages autograd does not see the graph: incoming values are leaves, whose gradients are sent back; the
backward pass starts at the outgoing values with the gradients that their consumers returned.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.errors import PolylaneError
from polylane.graph.capture.export import format_line
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.graph import Node
from polylane.graph.partition import Partition
from polylane.graph.precision import unwrap_settings
from polylane.graph.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.sample_slice import SampleSlice
from polylane.placement.overlap import overlap_redistributions
from polylane.placement.rewrite import rewrite
from polylane.runtime.pipeline.generated_code import generate_code
from polylane.runtime.pipeline.recompute import Recomputation
from polylane.runtime.pipeline.sample_witness import WitnessedCall
from polylane.sharding.layout import Layout

OWN_PYTHON = ("leaf", "function")  # operators that run the user's own Python


class PythonCallWatch:
    """Watches the nodes that run the user's own Python: which one is in its backward pass, and what their inputs were.

    Autograd's traceback does not show it: no frame of the stage's code is on the stack in a backward pass.
    """

    def __init__(self) -> None:
        self.current_node: Node | None = None
        self.records: list[WitnessedCall] | None = None  # calls in the forward passes of a step that is checked

    def watch_backward(self, node: Node, result: Any, arguments: Any) -> None:
        """Register hooks by which ``node`` is the current one from the gradient of its result to its arguments'."""

        def begin(_: Any) -> None:
            self.current_node = node

        def end(_: Any) -> None:
            if self.current_node is node:
                self.current_node = None

        _register_prehooks(result, begin)
        _register_prehooks(arguments, end)


def _register_prehooks(values: Any, hook: Callable[[Any], None]) -> None:
    """Have a hook called before the backward pass of each tensor in nested values."""

    def register(value: Any) -> Any:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.grad_fn.register_prehook(hook)
        return value

    fx.node.map_aggregate(values, register)


class WatchedCall:
    """Wraps the callable of a node whose calls and backward pass are watched."""

    __module__ = "polylane"

    def __init__(self, target: Callable[..., Any], node: Node, watch: PythonCallWatch) -> None:
        self.target, self.node, self.watch = target, node, watch
        self.__name__ = str(getattr(target, "__name__", "watched"))
        call = unwrap_settings(target)
        while not isinstance(call, LeafCall) and hasattr(call, "target"):  # wrapped with keys for random numbers
            call = unwrap_settings(call.target)
        own = isinstance(call, LeafCall) and not call.normalizes
        self.buffers = slice(len(call.parameters), len(call.parameters) + len(call.buffers)) if own else slice(0)

    def _refuse_write(self, part: SampleSlice) -> None:
        """Refuse a write to a buffer that one device would make once for the whole batch.

        Raises:
            PolylaneError: the buffer would be written once for each part of the batch, from that part's samples.
        """
        if part.samples < part.count_loss_samples and torch.is_grad_enabled():
            raise PolylaneError(
                f"{self.node.module or 'the model'}{format_line(self.node.source)} writes its buffers in a "
                "part of the batch, "
                "and one device would write them once, for all samples: use microbatches=1, and leave it out of "
                "per_sample"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part, tensors = args
        if self.watch.records is not None:
            self.watch.records.append(WitnessedCall(self.node, part, tuple(t.detach().clone() for t in tensors)))
        # Every in-place write raises a tensor's version counter.
        before = [buffer._version for buffer in tensors[self.buffers]]
        result = self.target(*args, **kwargs)
        if before != [buffer._version for buffer in tensors[self.buffers]]:
            self._refuse_write(part)
        self.watch.watch_backward(self.node, result, (args, kwargs))
        return result


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


class StageHooks:
    """Context managers around a stage's passes, and around the writing of its code; these do nothing, ZeRO's do."""

    def insert_gates(self, graph: fx.Graph) -> AbstractContextManager[None]:
        """Return a context manager in which a graph has further calls (all-gathers of sharded parameters)."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Return the context manager for a forward pass."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return the context manager for a backward pass."""
        return nullcontext()

    def pack_saved(self, tensor: Tensor) -> Any:
        """Return what autograd is to keep in place of a tensor that it saves in a forward pass."""
        return tensor

    def unpack_saved(self, kept: Any) -> Tensor:
        """Return the tensor for which :meth:`pack_saved` returned this."""
        found: Tensor = kept
        return found


def extract_stage(
    partition: Partition,
    stage: int,
    device: torch.device,
    hooks: StageHooks,
    dropped: DroppedTensors = NOTHING_DROPPED,
) -> StageCode:
    """Extract the part of the graph that a stage runs, for ``device``, and compile it with the gates of ``hooks``.

    Args:
        partition, stage: the cuts into stages, and the stage's number.
        device: the device of the worker's tensors.
        hooks: insert their gates into the code.
        dropped: what forward passes drop, to recompute it.
    """
    chosen = {node.name: node for node in partition.nodes(stage)}
    outputs = tuple(c.value for c in partition.crossings if c.producer == stage)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    source = partition.graph.code.fx
    body = [n for n in source.nodes if n.op == "call_function" and n.meta["name"] in chosen]
    inside = set(body)
    loss: list[fx.Node] = []
    if stage == partition.loss_stage:
        loss = list(source.output_node().args[0])  # type: ignore[arg-type]
    # Arguments are what the body reads from outside of it: parameters, inputs, and values of other stages.
    wanted = dict.fromkeys(i for n in body for i in n.all_input_nodes if i not in inside)
    wanted |= dict.fromkeys(n for n in loss if n not in inside)
    roles: list[tuple[str, Any]] = []
    for node in source.nodes:  # in the graph's own order
        if node in wanted:
            role = node.meta["role"] if node.op == "placeholder" else ("value", node.meta["name"])
            values[node] = copied = graph.placeholder(node.name)
            copied.meta = {**node.meta, "role": role}
            roles.append(role)
    # Nodes are copied: the captured graph is shared by all stages.
    by_name, watch = {}, PythonCallWatch()
    for node in body:
        values[node] = copied = graph.node_copy(node, lambda n: values[n])
        copied.args, copied.kwargs = _move_devices(copied.args, device), _move_devices(copied.kwargs, device)
        copied.meta = dict(node.meta)
        described = chosen[node.meta["name"]]
        if described.op in OWN_PYTHON:
            copied.target = WatchedCall(node.target, described, watch)
        by_name[node.meta["name"]] = copied
    graph.output((*[by_name[name] for name in outputs], *[values[n] for n in loss]))
    again = Recomputation(graph, dropped, hooks.pack_saved, hooks.unpack_saved, chosen)
    run, lines, file = _compile_graph(graph, f"stage {stage}", chosen, hooks, again)
    return StageCode(run, tuple(roles), outputs, bool(loss), lines, file, graph, watch, again)


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
        dropped: what forward passes drop, to recompute it.
    """

    whole: StageCode
    partition: Partition
    layout: Layout
    coordinates: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    hooks: StageHooks
    dropped: DroppedTensors = NOTHING_DROPPED

    def rewrite_for(self, samples: int) -> StageCode:
        """Rewrite the code for a part with that number of samples."""
        calls, splits = self.layout.at(samples)
        graph = rewrite(
            self.whole.graph,
            calls,
            splits,
            samples,
            self.coordinates,
            aliases=self.layout.view.aliases,
            leaving=self.whole.outputs,
            dtypes=self.dtypes,
        )
        overlap_redistributions(graph)
        roles = tuple(n.meta["role"] for n in graph.nodes if n.op == "placeholder")
        nodes = {node.name: node for node in self.partition.graph.nodes}
        again = Recomputation(graph, self.dropped, self.hooks.pack_saved, self.hooks.unpack_saved, nodes)
        run, lines, file = _compile_graph(graph, f"{samples} samples of {self.whole.file}", nodes, self.hooks, again)
        return replace(
            self.whole, run=run, roles=roles, nodes_by_line=lines, file=file, graph=graph, recomputation=again
        )


def _move_devices(value: Any, device: torch.device) -> Any:
    """Replace the device that capture saw by the worker's own, in nested arguments."""
    if isinstance(value, torch.device):
        return value if value.type == "meta" else device
    if isinstance(value, (list, tuple)):
        return type(value)(_move_devices(v, device) for v in value)
    if isinstance(value, dict):
        return {key: _move_devices(v, device) for key, v in value.items()}
    return value


def _compile_graph(
    graph: fx.Graph, label: str, chosen: Mapping[str, Node], hooks: StageHooks, again: Recomputation
) -> tuple[Callable[..., Any], dict[int, Node], str]:
    """Compile a graph's Python source under a unique file name, so that an error's line identifies the node."""
    with hooks.insert_gates(graph), again.watching_calls():
        code = generate_code(graph, label)
        # A gate is none of the graph's own nodes.
        lines = {line: chosen[n.meta["name"]] for line, n in code.nodes_by_line.items() if "name" in n.meta}
    return code.run, lines, code.file


def find_failing_node(runner: StageRunner, error: BaseException) -> Node | None:
    """Return the node that was running, forward or backward, when an error was raised; None if none of this stage."""
    lines: dict[str, Mapping[int, Node]] = {}
    for code in (runner.code, *runner.codes.values()):
        lines |= {code.file: code.nodes_by_line, **code.recomputation.nodes_by_line}
    for frame in traceback.extract_tb(error.__traceback__):
        node = lines.get(frame.filename, {}).get(frame.lineno or 0)
        if node is not None:
            return node
    return runner.code.watch.current_node


@dataclass
class LiveMicrobatch:
    """What is kept of a microbatch between its passes: leaves and roots of its autograd graph, parts of the loss."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: tuple[Tensor, ...]


@dataclass
class StageRunner:
    """Runs a stage's code on the tensors that the worker holds.

    Attributes:
        code: code of the stage as one device would run it.
        tensors: parameters, buffers and constants by role.
        differentiable_inputs: names of incoming values whose gradient is sent back.
        device: device of this worker's tensors.
        autocast: dtype of autocast, or None without it.
        local_code: rewrites the code for this rank of a mesh; None where no operator is sharded.
        hooks: context managers around the passes.
        codes: the code as this rank runs it, by number of samples; empty where no operator is sharded.
        live_microbatches: by microbatch between its passes, what its backward pass needs.
    """

    code: StageCode
    tensors: Mapping[tuple[str, Any], Any]
    differentiable_inputs: frozenset[str]
    device: torch.device
    autocast: torch.dtype | None = None
    local_code: LocalStageCode | None = None
    hooks: StageHooks = field(default_factory=StageHooks)
    codes: Mapping[int, StageCode] = field(default_factory=dict)
    live_microbatches: dict[int, LiveMicrobatch] = field(default_factory=dict)

    def code_for(self, samples: int) -> StageCode:
        """Return the code for a part with that number of samples, which :meth:`fit_to_sizes` has made."""
        return self.code if self.local_code is None else self.codes[samples]

    def fit_to_sizes(self, sizes: Collection[int]) -> StageRunner:
        """Return this runner for parts of these sizes: with the code for each size, where it depends on that."""
        if self.local_code is None:
            return self
        return replace(
            self, codes={samples: self.local_code.rewrite_for(samples) for samples in sizes}, live_microbatches={}
        )

    def forward(
        self, microbatch: int, values: Mapping[str, Tensor], leaves: Sequence[Any], part: SampleSlice
    ) -> LiveMicrobatch:
        """Run a forward pass; what its backward pass needs is kept until then, unless gradients are disabled.

        Args:
            microbatch: number of the microbatch, from 0.
            values: incoming values of this microbatch by name.
            leaves: the part's samples, as flat leaves of the batch.
            part: which samples of the batch they are.
        """
        inputs = {
            name: value.requires_grad_() if name in self.differentiable_inputs and torch.is_grad_enabled() else value
            for name, value in values.items()
        }
        again = self.code_for(part.samples).recomputation
        with self.precision_context(), self.hooks.forward(), again.recording(self.precision_context):
            result = self.run_code(inputs, leaves, part)
        count = len(self.code.outputs)
        live = LiveMicrobatch(inputs, dict(zip(self.code.outputs, result[:count], strict=True)), tuple(result[count:]))
        if torch.is_grad_enabled():
            self.live_microbatches[microbatch] = live
        return live

    def precision_context(self) -> AbstractContextManager[Any]:
        """Return the context manager in which the stage's operators run: autocast, or nothing."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def run_code(self, inputs: Mapping[str, Tensor], leaves: Sequence[Any], part: SampleSlice) -> tuple[Any, ...]:
        """Run the stage's code on one microbatch; return the outgoing values, then the parts of the loss."""
        code = self.code_for(part.samples)
        return code.run(*[self.resolve_argument(role, inputs, leaves, part) for role in code.roles])

    def resolve_argument(
        self, role: tuple[str, Any], values: Mapping[str, Tensor], leaves: Sequence[Any], part: SampleSlice
    ) -> Any:
        """Return the argument for a role in one microbatch."""
        kind, key = role
        if kind == "value":
            return values[key]
        if kind == "input":
            return leaves[key]
        return part if kind == "part" else self.tensors[role]

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None) -> dict[str, Tensor]:
        """Run a backward pass: parameters accumulate gradients, those of the incoming values are returned by name.

        Args:
            microbatch: number of the microbatch, from 0.
            gradients: gradients of the outgoing values by name, summed over their consumers.
            seed: gradient of the loss, on the stage that computes it; else None.
        """
        live, self.code.watch.current_node = self.live_microbatches.pop(microbatch), None
        roots = [(live.outputs[name], grad) for name, grad in gradients.items() if live.outputs[name].requires_grad]
        # A Mean's count is not a root: the gradient is taken of its total alone.
        if seed is not None and live.loss[0].requires_grad:
            roots.append((live.loss[0], seed.to(live.loss[0].dtype)))
        with self.hooks.backward():
            if roots:
                torch.autograd.backward([value for value, _ in roots], [grad for _, grad in roots])
        self.code.watch.current_node = None
        inputs = {name: live.inputs[name] for name in self.differentiable_inputs if name in live.inputs}
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}
