"""Asynchronous pipeline: 1F1B that is not emptied between steps, with weights updated while batches are under way.

A step runs the forward passes of its own batch, and the backward passes and updates of those that come through
(:func:`polylane.schedule.asynchronous.steady_step`). Its actions name the batch by how many steps ago it began. A batch
computes on one version of the weights (:mod:`polylane.runtime.parameters.weight_versions`).

Source: Narayanan et al., "PipeDream", SOSP 2019; "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polylane.compile.sample_shares import Batch
from polylane.graph.nodes.memory import find_written_buffers
from polylane.program.program import Program
from polylane.runtime.parameters.weight_versions import WeightVersions
from polylane.runtime.pipeline.batch_tables import runs
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.span_clock import TimedSpan
from polylane.runtime.step_result import StepState
from polylane.schedule.action import Action, ActionKind


@dataclass
class _BatchUnderWay:
    """A batch between its first forward pass and its update, with what runs it.

    Attributes:
        executor: fitted to the batch's size.
        batch: the batch, as this worker has it.
        state: the state of its passes on this worker.
        finish: updates the weights, called with the state.
        has_gradients: whether its gradients are those of the parameters, on their way to the update.
    """

    executor: AsynchronousExecutor
    batch: Batch
    state: StepState
    finish: Callable[[StepState], None]
    has_gradients: bool = False


@dataclass
class AsynchronousPipeline:
    """The batches under way on one worker, over all sizes and forms of batches.

    Attributes:
        versions: versions of this worker's weights.
        delay: steps after a batch's own in which its last backward pass runs on some stage.
        begun: number of steps so far.
        batches: batches under way, by the number of their step.
        program: program of the newest batch; None before the first one.
        buffers: this worker's buffers that passes write, by role, as the newest batch has them.
    """

    versions: WeightVersions
    delay: int
    begun: int = 0
    batches: dict[int, _BatchUnderWay] = field(default_factory=dict)
    program: Program | None = None
    buffers: dict[tuple[str, Any], Tensor] = field(default_factory=dict)
    # Batches whose update is made, until their last messages have been received.
    _ended: list[StepState] = field(default_factory=list)

    def empty(self) -> None:
        """Run the backward passes and updates that are left; every worker calls it at the same time."""
        if self.batches:
            executor = next(reversed(self.batches.values())).executor
            for _ in range(self.delay):
                executor.run_step(self.begun, [])
                self.begun += 1
            assert not self.batches
            executor.store_buffers()
        self.release(0)
        self.begun = self.versions.newest
        self.versions.restart()

    def end(self, number: int) -> None:
        """Record that a batch's update is made."""
        self._ended.append(self.batches.pop(number).state)
        self.versions.end(number)

    def release(self, count: int) -> None:
        """Wait for the messages of all but the last ``count`` batches that have ended, and free their buffers."""
        while len(self._ended) > count:
            state = self._ended.pop(0)
            for key in list(state.pending_sends):
                state.wait_sent(key)


@dataclass
class AsynchronousExecutor(Executor):
    """Runs a program whose batches are under way through several steps.

    Attributes:
        pipeline: the batches under way, shared by the executors of all sizes and forms of batches.
    """

    pipeline: AsynchronousPipeline = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plain_arguments = {stage: runner.tensors for stage, runner in self.runners.items()}
        written = find_written_buffers(self.program.partition.graph.code.fx)
        self._written = [("buffer", name) for name in written if ("buffer", name) in self.any_runner.tensors]

    def _begin_versions(self, number: int) -> None:
        """Have the stages compute a batch on its version of the weights, and on buffers of its own that it writes.

        Backward passes of earlier batches read the buffers as these had left them. What the batch's own hold after its
        forward passes becomes the model's.
        """
        plain = self._plain_arguments[self.program.stage]
        buffers = {role: plain[role].clone() for role in self._written}
        changed = {("parameter", name): leaf for name, leaf in self.pipeline.versions.begin(number).items()} | buffers
        for stage, runner in self.runners.items():
            tensors = self._plain_arguments[stage]
            runner.tensors = {**tensors, **{role: value for role, value in changed.items() if role in tensors}}
        self.pipeline.buffers = buffers

    def store_buffers(self) -> None:
        """Make what the newest batch has left in its buffers the model's."""
        with torch.no_grad():
            for role, buffer in self.pipeline.buffers.items():
                self._plain_arguments[self.program.stage][role].copy_(buffer)

    def run(self, batch: Batch, step: int, seed: int, finish: Callable[[StepState], None]) -> StepState:
        """Run one step; ``finish`` is called for the update of this batch, in this step or a later one."""
        pipeline = self.pipeline
        # Batches of another form have other values to send: the pipeline is emptied between them. Also on stages that
        # have no batch under way: all begin anew with the newest weights.
        if pipeline.program is not None and pipeline.program is not self.program:
            pipeline.empty()
        pipeline.program = self.program
        state = self._begin(batch, step, seed)
        state.first_pass = pipeline.begun * self.microbatches
        self._begin_versions(pipeline.begun)
        pipeline.batches[pipeline.begun] = _BatchUnderWay(self, batch, state, finish)
        number, pipeline.begun = pipeline.begun, pipeline.begun + 1
        spans = list[TimedSpan]()
        self.run_step(number, spans)
        self.store_buffers()
        # Two steps later the receivers have got their messages, and these sends need no waiting.
        pipeline.release(2 + pipeline.delay)
        state.spans = spans
        return state

    def run_step(self, number: int, spans: list[TimedSpan]) -> None:
        """Run the actions of a step for the batches that are under way, and append what was measured to ``spans``."""
        for index, action in enumerate(self.program.actions):
            self._post_receives(index, number)
            batch = self.pipeline.batches.get(number - action.steps_back)
            if batch is not None and runs(action, batch.state.tables):
                batch.executor._run_of(batch, action, number - action.steps_back)
                # Taken out again: the state of an earlier step's batch holds what was measured in that step.
                spans.append(batch.state.spans.pop())
        self._post_receives(len(self.program.actions), number)

    def _post_receives(self, index: int, number: int) -> None:
        """Post what is posted before an action of a step, of the batches that are under way."""
        for posting in self._postings[index]:
            batch = self.pipeline.batches.get(number + posting.steps_ahead - posting.receive.steps_back)
            if batch is not None:
                batch.executor._post_receive(posting.receive, batch.state)

    def _run_of(self, batch: _BatchUnderWay, action: Action, number: int) -> None:
        """Run one action of a batch, by its number."""
        versions = self.pipeline.versions
        if action.kind in (ActionKind.REDUCE, ActionKind.STEP) and not batch.has_gradients:
            # Not behind the last backward pass: a batch too short for all microbatches has that in an earlier step.
            batch.has_gradients = True
            versions.load_gradients(number)
            for reducer in self.reducers.values():
                reducer.begin_last_backward()
                reducer.launch_remaining()
        if action.kind is ActionKind.STEP:
            versions.begin_update()
            # Of replicas in turn running statistics move at the update, in the step of a later batch, maybe one of
            # another size: what is stored behind that step is the later batch's buffers.
            self.any_runner.tensors = {**self.any_runner.tensors, **self.pipeline.buffers}
        self._run_action(action, batch.batch, batch.state, batch.finish)
        if action.kind is ActionKind.STEP:
            self.pipeline.end(number)
