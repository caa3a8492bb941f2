"""Anomaly detection: finds the operator at which a value stopped being finite, before the weights are updated.

Every forward pass is checked at the outputs of its stage: a loss that is not finite, or a NaN in a value that is sent
on. Then that pass alone is run again, operator by operator. Infinities inside a stage that masks make on purpose are no
fault: they do not reach its outputs as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.graph import Node
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.program.program import Program
from polylane.runtime.pipeline.stage_runner import LiveMicrobatch, StageRunner
from polylane.runtime.plain_data.serialization import serializable
from polylane.runtime.stage_hooks import StageHooks

FaultPosition = tuple[int, int, int]  # step from 0, microbatch, stage: compares in the order in which faults occur


@serializable
@dataclass(frozen=True)
class NonFiniteValue:
    """Where a value first was not finite, as one worker found it.

    Attributes:
        position: step, microbatch and stage of the fault.
        description: the first operator, parameter or input that was not finite, in the user's terms.
    """

    position: FaultPosition
    description: str


class AnomalyDetector:
    """Checks a worker's forward passes until it has found a fault.

    Attributes:
        fault: the first fault, or None as long as there is none.
    """

    def __init__(self) -> None:
        self.fault: NonFiniteValue | None = None

    def check_forward(
        self,
        runner: StageRunner,
        program: Program,
        values: Mapping[str, Tensor],
        leaves: Sequence[Any],
        part: SampleSlice,
        live: LiveMicrobatch,
    ) -> None:
        """Check a forward pass in training, right after it.

        Args:
            runner: runner that has run the pass.
            program: this worker's program, for its stage and the captured graph.
            values, leaves, part: inputs of the pass, see
                :meth:`polylane.runtime.pipeline.stage_runner.StageRunner.forward`.
            live: outputs and loss of the pass.
        """
        if self.fault is not None or runner.device.type != "cpu":  # on a GPU every check would synchronize the device
            return
        if not (
            any(_has_nan(value) for value in live.outputs.values())
            or any(_has_non_finite(value) for value in live.loss[:1])
        ):
            return
        # A second pass is possible only where it needs no collective: the other workers do not take part in it.
        graph = program.partition.graph
        alone = runner.local_code is None and type(runner.hooks) is StageHooks
        if not alone or (part.sum_replicas is not None and graph.code.has_batch_statistics):
            text = "the operator is not looked for where workers share one (split operators, batch statistics, shards)"
        else:
            text = _describe_first_fault(runner, {node.name: node for node in graph.nodes}, values, leaves, part)
        self.fault = NonFiniteValue(
            (part.step, part.microbatch, program.stage), f"{text}, in microbatch {part.microbatch}"
        )


def earliest_fault(faults: Sequence[NonFiniteValue | None]) -> NonFiniteValue | None:
    """Return the earliest fault of all workers, or None."""
    return min((fault for fault in faults if fault is not None), key=lambda fault: fault.position, default=None)


def _has_nan(value: Any) -> bool:
    """Return whether a value holds a NaN; a finite sum, one pass over memory, shows nearly always that it does not."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    tensor = value.detach()
    return not bool(torch.isfinite(tensor.sum())) and bool(torch.isnan(tensor).any())


def _has_non_finite(value: Any) -> bool:
    return isinstance(value, Tensor) and not bool(torch.isfinite(value.detach()).all())


def _describe_first_fault(
    runner: StageRunner,
    nodes: Mapping[str, Node],
    values: Mapping[str, Tensor],
    leaves: Sequence[Any],
    part: SampleSlice,
) -> str:
    """Run the pass again, and describe the first value that is not finite."""
    code = runner.code_for(part.samples)
    role_of = dict(zip((n for n in code.graph.nodes if n.op == "placeholder"), code.roles, strict=True))
    interpreter = GraphInterpreter(
        code.graph, lambda node: runner.resolve_argument(role_of[node], values, leaves, part), keep_values=True
    )
    context = torch.autocast(runner.device.type, dtype=runner.autocast, enabled=runner.autocast is not None)
    with torch.no_grad(), context:
        interpreter.run()
    results, output = interpreter.env, code.graph.output_node()
    # A parameter that is not finite explains all that follows, and names the step to blame.
    for node, (kind, name) in role_of.items():
        if kind == "parameter" and _has_non_finite(results[node]):
            return (
                f"the parameter {name} is not finite: the update of step {part.step} made it so"
                if part.step
                else (f"the parameter {name} is not finite at the start")
            )
    origin = _find_origin(output, results)
    if origin is None:
        return "the operator is not known, for a second pass over the same samples gave finite numbers"
    if origin in role_of:
        kind, name = role_of[origin]
        return {
            "input": f"input {name} of the batch is not finite" if isinstance(name, int) else "",
            "value": f"it came in with the value of {_describe_node(nodes, str(name))}",
            "buffer": f"the buffer {name} is not finite",
        }.get(kind) or f"a constant of the model ({name}) is not finite"
    return f"the first operator is {_describe_node(nodes, str(origin.meta['name']))}"


def _find_origin(output: fx.Node | None, results: Mapping[fx.Node, Any]) -> fx.Node | None:
    """Find the first node that the faulty outputs depend on whose own value is wrong, and whose inputs are not."""
    assert output is not None
    leaving = [node for node in output.all_input_nodes if node in results]
    nan = any(_has_nan(results[node]) for node in leaving)
    # A NaN is followed back over NaNs only: an infinity before it may be a mask's. Without NaNs it is an infinite loss.
    wrong = _has_nan if nan else _has_non_finite
    order = {node: position for position, node in enumerate(results)}
    todo, seen_nodes, origins = [node for node in leaving if wrong(results[node])], set[fx.Node](), list[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen_nodes:
            continue
        seen_nodes.add(node)
        sources = [source for source in node.all_input_nodes if wrong(results[source])]
        todo += sources
        if not sources:
            origins.append(node)
    return min(origins, key=order.__getitem__, default=None)


def _describe_node(nodes: Mapping[str, Node], name: str) -> str:
    node = nodes.get(name)
    return f"{name} ({node.source})" if node is not None and node.source else name
