"""A stage as a function: cut into stages a graph computes what the whole model does, and errors name its nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.reshard import value_specs
from polylane.compile.sample_shares import Batch
from polylane.errors import ActionFailed
from polylane.graph.capture.capture import capture
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.partition import Partition, cut_positions
from polylane.runtime.job import Job
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.pipeline.stage_code import extract_stage
from polylane.runtime.pipeline.stage_runner import StageRunner, find_failing_node
from polylane.runtime.stage_hooks import StageHooks
from polylane.runtime.step_result import StepState
from polylane.schedule.action import Action, ActionKind
from tests.support.workers.training import batch_of, classify, mlp, workers

CPU = torch.device("cpu")


class Skipping(nn.Module):
    """The first value is read by all that follow; a buffer and a constant are read on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.register_buffer("offset", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x) + first * self.offset)
        return self.head(x + first + torch.arange(6, dtype=x.dtype))


def skipping() -> nn.Module:
    torch.manual_seed(0)
    return Skipping().double()


def runners(model: nn.Module, partition: Partition) -> list[StageRunner]:
    tensors = ModelTensors(model, [], CPU)
    table: dict[tuple[str, Any], Any] = {("parameter", n): p for n, p in tensors.parameters().items()}
    table |= {("buffer", n): b for n, b in tensors.buffers().items()}
    table |= {("constant", n): c for n, c in partition.graph.code.constants.items()}
    result = []
    for stage in range(partition.stages):
        incoming = {c.value for c in partition.crossings if stage in c.consumers and c.requires_grad}
        result.append(StageRunner(extract_stage(partition, stage, CPU, StageHooks()), table, frozenset(incoming), CPU))
    return result


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_one_after_another_are_the_model(stages: int) -> None:
    """With values and gradients carried by hand, as the transport does."""
    model, batch = skipping(), batch_of(5)
    graph = capture(model, classify, batch)
    positions = cut_positions(graph)
    partition = Partition(graph, tuple(positions[len(positions) * s // stages] for s in range(1, stages)))
    made = runners(model, partition)
    values: dict[str, Tensor] = {}
    part = SampleSlice(5, 0, 5)
    for stage, runner in enumerate(made):
        incoming = {c.value: values[c.value].detach().clone() for c in partition.crossings if stage in c.consumers}
        live = runner.forward(0, incoming, list(batch), part)
        values |= live.outputs
    loss = classify(model, batch)
    assert torch.equal(live.loss[0], loss)
    wire = value_specs(partition, {})
    assert all(wire[name].shape(5) == value.shape and wire[name].dtype == value.dtype for name, value in values.items())
    gradients: dict[str, Tensor] = {}
    for stage in reversed(range(stages)):
        own = {c.value: gradients[c.value] for c in partition.crossings if c.producer == stage and c.requires_grad}
        seed = torch.ones((), dtype=torch.float64) if stage == stages - 1 else None
        for name, gradient in made[stage].backward(0, own, seed).items():
            gradients[name] = gradients.get(name, 0) + gradient
        assert not made[stage].live_microbatches
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14, msg=name)


def test_an_error_names_the_node_of_its_line() -> None:
    model, batch = skipping(), batch_of(5)
    graph = capture(model, classify, batch)
    (runner,) = runners(model, Partition(graph, ()))
    assert set(runner.code.nodes_by_line.values()) == {
        node for node in graph.nodes if node in runner.code.nodes_by_line.values()
    }
    assert len(runner.code.nodes_by_line) == len(graph.nodes)
    with pytest.raises(RuntimeError) as caught:
        runner.forward(0, {}, [batch[0][:, :4], batch[1]], SampleSlice(5, 0, 5))
    node = find_failing_node(runner, caught.value)
    assert node is not None and node.module == "layers.0" and node.op == "aten.linear.default"
    assert find_failing_node(runner, ValueError("of somebody else")) is None


def test_a_value_of_another_shape_is_refused_before_it_travels() -> None:
    """gloo would end the process."""

    def work(job: Job) -> str:
        worker: Executor = job._role._cache.compiled_for("loss", Batch.whole(batch_of(8))).executor
        if job.world.rank == 0:
            send = next(a for a in worker.program.actions if a.kind is ActionKind.SEND)
            share = job._role.shares(8)[0]
            wrong = {(0, 0): {str(send.value): torch.zeros(share.samples, 99)}}
            state = StepState({0: SampleSlice(share.samples)}, worker._tables, samples_in_mean=8, output_values=wrong)
            with pytest.raises(RuntimeError) as caught:
                worker._send(Action(ActionKind.SEND, 0, 0, send.value, 1), state)
            return str(caught.value)
        return ""

    said, _ = workers(work, mlp(6, 8, 4), "pipeline=2,microbatches=2")
    assert "torch.float32 (4, 99) where capture saw torch.float64 (4," in said


class Looked(torch.autograd.Function):
    """The identity, of a library that looks at what it is given: no graph shows why it raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.detach().abs().max() > 1e3:
            raise OSError("the device is gone")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(Looked.apply(self.first(x)))
        return y


def test_the_error_of_a_step_says_where() -> None:
    import polylane

    torch.manual_seed(0)
    job = polylane.parallelize(Looking().double(), classify, lambda p: torch.optim.SGD(p, lr=0.1), example=batch_of(8))
    inputs, labels = batch_of(8)
    with pytest.raises(ActionFailed) as caught:
        job.step((inputs * 1e6, labels))
    assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (0, 0, 0)
    assert isinstance(caught.value.cause, OSError)
    assert job.step(batch_of(8)).loss > 0  # alone, the user may go on
