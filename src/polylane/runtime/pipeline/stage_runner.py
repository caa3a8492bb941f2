"""Stage runner: one stage's code on the tensors of a worker, with its forward and backward passes.

Between the stages autograd does not see the graph: incoming values are leaves, whose gradients are sent back; the
backward pass starts at the outgoing values with the gradients that their consumers returned. It runs at once, or in two
halves: the gradients of incoming values now, those of weights later (weight_gradients.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polylane.graph.graph import Node
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.precision import autocast_to
from polylane.runtime.pipeline.stage_code import LocalStageCode, StageCode
from polylane.runtime.pipeline.weight_gradients import DEFERRED, DeferredGradients
from polylane.runtime.stage_hooks import StageHooks


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
    deferred: DeferredGradients | None = None  # gradients of weights, where its backward pass is in two halves


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
        deferred: by microbatch between the halves of its backward pass, what its second half needs.
        recording: the gradients that the running forward pass defers; None outside of one.
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
    deferred: dict[int, DeferredGradients] = field(default_factory=dict)
    recording: DeferredGradients | None = None

    def code_for(self, samples: int) -> StageCode:
        """Return the code for a part with that number of samples, which :meth:`fit_to_sizes` has made."""
        return self.code if self.local_code is None else self.codes[samples]

    def fit_to_sizes(self, sizes: Collection[int], open_sizes: tuple[int, ...] = ()) -> StageRunner:
        """Return this runner for parts of these sizes: with the code for each size, where it depends on that.

        Args:
            sizes: numbers of samples of the parts.
            open_sizes: the batch's sizes that the graph leaves open.
        """
        if self.local_code is None:
            return self
        codes = {samples: self.local_code.rewrite_for(samples, open_sizes) for samples in sizes}
        return replace(self, codes=codes, live_microbatches={})

    def forward(
        self,
        microbatch: int,
        values: Mapping[str, Tensor],
        leaves: Sequence[Any],
        part: SampleSlice,
        in_halves: bool = True,
    ) -> LiveMicrobatch:
        """Run a forward pass; what its backward pass needs is kept until then, unless gradients are disabled.

        Args:
            microbatch: number of the microbatch, from 0.
            values: incoming values of this microbatch by name.
            leaves: the part's samples, as flat leaves of the batch.
            part: which samples of the batch they are.
            in_halves: whether the backward pass comes in two halves, if the stage's code is written for that; else
                autograd computes the gradients of weights beside the others, which takes less time.
        """
        inputs = {
            name: value.requires_grad_() if name in self.differentiable_inputs and torch.is_grad_enabled() else value
            for name, value in values.items()
        }
        code = self.code_for(part.samples)
        groups, recomputation = code.weight_groups if in_halves else (), code.recomputation
        self.recording = deferred = DeferredGradients(groups) if groups and torch.is_grad_enabled() else None
        try:
            recording = recomputation.recording(self.precision_context) if recomputation.again else nullcontext()
            with self.precision_context(), self.hooks.forward(), recording:
                result = self.run_code(inputs, leaves, part)
        finally:
            self.recording = None
        count = len(self.code.outputs)
        outputs = dict(zip(self.code.outputs, result[:count], strict=True))
        live = LiveMicrobatch(inputs, outputs, tuple(result[count:]), deferred)
        if torch.is_grad_enabled():
            self.live_microbatches[microbatch] = live
        return live

    def precision_context(self) -> AbstractContextManager[Any]:
        """Return the context manager in which the stage's operators run: autocast, or nothing."""
        return nullcontext() if self.autocast is None else autocast_to(self.autocast, self.device.type)

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
        if role == DEFERRED:
            return self.recording
        return part if kind == "part" else self.tensors[role]

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None) -> dict[str, Tensor]:
        """Run a backward pass: parameters accumulate gradients, those of the incoming values are returned by name.

        Args:
            microbatch: number of the microbatch, from 0.
            gradients: gradients of the outgoing values by name, summed over their consumers.
            seed: gradient of the loss, on the stage that computes it; else None.
        """
        with self.hooks.backward():
            result = self._propagate(microbatch, gradients, seed)
            self._accumulate_deferred(microbatch)
        return result

    def backward_input(
        self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None
    ) -> dict[str, Tensor]:
        """Run the first half of a backward pass: return the gradients of the incoming values by name.

        Gradients of weights wait for :meth:`backward_weight`; other parameters accumulate theirs. Of what the forward
        pass saved, only what the second half needs is kept.

        Args:
            microbatch: number of a microbatch whose forward pass was run for a backward pass in two halves.
            gradients: gradients of the stage's results by name, as for :meth:`backward`.
            seed: gradient of the loss on the last stage; None on the others.
        """
        with self.hooks.backward_input():
            return self._propagate(microbatch, gradients, seed)

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of a backward pass: weights accumulate their gradients.

        Args:
            microbatch: number of a microbatch whose first half has run.
        """
        with self.hooks.backward_weight():
            self._accumulate_deferred(microbatch)

    def _accumulate_deferred(self, microbatch: int) -> None:
        deferred = self.deferred.pop(microbatch, None)
        if deferred is not None:
            deferred.accumulate()

    def _propagate(self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None) -> dict[str, Tensor]:
        """Go back through a microbatch's autograd graph; weights of code in two halves get no gradient yet."""
        live = self.live_microbatches.pop(microbatch)
        roots = [(live.outputs[name], grad) for name, grad in gradients.items() if live.outputs[name].requires_grad]
        # A Mean's count is not a root: the gradient is taken of its total alone.
        if seed is not None and live.loss[0].requires_grad:
            roots.append((live.loss[0], seed.to(live.loss[0].dtype)))
        if live.deferred is not None:
            live.deferred.is_recording, self.deferred[microbatch] = True, live.deferred
        if roots:
            torch.autograd.backward([value for value, _ in roots], [grad for _, grad in roots])
        if live.deferred is not None:
            live.deferred.is_recording = False
        if self.code.watch.current_node is not None:  # nothing below it needs a gradient
            self.code.watch.leave()
        inputs = {name: live.inputs[name] for name in self.differentiable_inputs if name in live.inputs}
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}
