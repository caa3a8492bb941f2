"""Backward passes in two halves give every gradient that the whole ones give, in any order of microbatches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polylane.cost.memory.allocation_meter import AllocationMeter, storage_id
from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.capture.capture import capture
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.placement.placement import REPLICATE
from polylane.runtime.pipeline.defer_weights import defer_weight_gradients
from polylane.runtime.pipeline.weight_gradients import DEFERRED, DeferredCall, DeferredGradients
from polylane.sharding.layout import local_part
from tests.placement.split_checks import on_rank
from tests.placement.whole_graphs import execute, on_mesh, random_split, run_split, subject
from tests.support import models
from tests.support.reference.eager_and_captured import captured
from tests.support.reference.split_backward import Pipeline, interleavings, pipeline, take_gradients

MICROBATCHES, SAMPLES = 3, 5
QUICK = ("gpt", "in_place", "separable", "moe")
SLOW_T5 = pytest.param("t5", marks=pytest.mark.slow)
OTHERS = tuple(name for name in (*models.CASES, "digits", "unet") if name not in QUICK)


def parts_of(case: models.Case) -> list[tuple[list[Any], SampleSlice]]:
    found = []
    for i in range(MICROBATCHES):
        leaves = cast_leaves(flatten(case.batch(SAMPLES, i))[0], torch.float64)
        part = SampleSlice(SAMPLES, i * SAMPLES, SAMPLES * MICROBATCHES, microbatch=i, seed=3)
        found.append((list(leaves), part))
    return found


def run_at_once(pipe: Pipeline, parts: list[Any]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor | None]]:
    crossing = []
    for i, (leaves, part) in enumerate(parts):
        pipe.forward(i, leaves, part)
    for i in range(len(parts)):
        crossing.append(pipe.backward(i))
    return crossing, take_gradients(pipe.model)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_two_halves_are_the_whole(name: str) -> None:
    graph, model, case = captured(name, in_float64=True)
    parts = parts_of(case)
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    def reset() -> None:
        for n, b in model.named_buffers():
            b.data.copy_(buffers[n])

    stages = 2
    crossing, gradients = run_at_once(pipeline(model, graph, stages, False, [case.loss]), parts)
    reset()
    split = pipeline(model, graph, stages, True, [case.loss])
    # All that "branching" computes is the user's own Python, which is opaque.
    assert any(runner.code.weight_groups for runner in split.runners) or name == "branching"
    crossing2, gradients2 = run_at_once(split, parts)
    compare(name, crossing, gradients, crossing2, gradients2)
    for seed in range(2):
        reset()
        split.gradients.clear()
        for kind, i in interleavings(MICROBATCHES, seed):
            if kind == "forward":
                split.forward(i, *parts[i])
            elif kind == "backward_input":
                split.backward(i, "backward_input")
            else:
                split.backward_weight(i)
        assert not any(runner.deferred or runner.live_microbatches for runner in split.runners)
        compare(name, crossing, gradients, [split.gradients[i] for i in range(MICROBATCHES)], take_gradients(model))


def compare(name: str, crossing: Any, gradients: Any, crossing2: Any, gradients2: Any) -> None:
    """Hold values' and parameters' gradients against those of whole backward passes."""
    for i, (right, found) in enumerate(zip(crossing, crossing2, strict=True)):
        assert right.keys() == found.keys()
        for value in right:
            torch.testing.assert_close(found[value], right[value], rtol=1e-12, atol=1e-14, msg=f"{name} {i} {value}")
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for parameter, right in gradients.items():
        found = gradients2[parameter]
        assert (right is None) == (found is None), (name, parameter)
        if right is not None:
            atol = 1e-14 * max(1, largest)
            torch.testing.assert_close(found, right, rtol=1e-12, atol=atol, msg=f"{name} {parameter}")


# ---- how much is in the second half, and what is kept until then ----------------------------------------------------


def count_flops(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt", "digits", SLOW_T5])
def test_weight_gradients_are_in_the_second_half(name: str) -> None:
    """At least 90 % of their multiply-adds; all together are those of the whole backward pass, none more."""
    graph, model, case = captured(name, in_float64=True)
    (leaves, part), *_ = parts_of(case)
    whole, split = (pipeline(model, graph, 1, splits, [case.loss]) for splits in (False, True))
    inputs_only = pipeline(model, graph, 1, False, [case.loss])
    (runner,) = inputs_only.runners
    # Scales and biases, which have no multiply-adds, keep autograd going back through all layers.
    runner.tensors = {
        (kind, n): t.detach() if kind == "parameter" and t.dim() > 1 else t for (kind, n), t in runner.tensors.items()
    }
    for pipe in (whole, split, inputs_only):
        pipe.forward(0, leaves, part)
    at_once = count_flops(lambda: whole.backward(0))
    inputs = count_flops(lambda: split.backward(0, "backward_input"))
    weights = count_flops(lambda: split.backward_weight(0))
    assert inputs + weights == at_once
    assert weights >= 0.9 * (at_once - count_flops(lambda: inputs_only.backward(0)))
    take_gradients(model)


@pytest.mark.parametrize("name", ["gpt", "digits", pytest.param("unet", marks=pytest.mark.slow), SLOW_T5])
def test_only_inputs_and_result_gradients_live_between_the_halves(name: str) -> None:
    """Of all that was allocated for a microbatch; and nothing after them but the parameters' gradients."""
    graph, model, case = captured(name, in_float64=True)
    pipe = pipeline(model, graph, 1, True, [case.loss])
    runner = pipe.runners[0]
    (leaves, part), *_ = parts_of(case)
    lasting = [t for t in (*runner.tensors.values(), *leaves) if isinstance(t, Tensor)]
    with AllocationMeter(lasting) as meter:
        pipe.forward(0, leaves, part)
        pipe.backward(0, "backward_input")
        pipe.gradients.clear()
        kept = {storage_id(t) for r in runner.deferred[0]._records for t in (r.kept, r.gradient)}
        accumulated = {storage_id(p.grad) for p in model.parameters() if p.grad is not None}
        assert meter.alive_bytes().keys() <= kept | accumulated
        pipe.backward_weight(0)
        accumulated = {storage_id(p.grad) for p in model.parameters() if p.grad is not None}
        assert meter.alive_bytes().keys() <= accumulated
    take_gradients(model)


# ---- what a weight may be --------------------------------------------------------------------------------------------


def test_a_first_gradient_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes the parameter's: copying all gradients in every step would take a fraction of their products' time."""
    graph, model, case = captured("gpt", in_float64=True)
    pipe = pipeline(model, graph, 1, True)
    (leaves, part), *_ = parts_of(case)
    computed, send = set[int](), DeferredGradients._send_on

    def noting(self: DeferredGradients, complete: dict[int, Tensor]) -> None:
        computed.update(g.data_ptr() for g in complete.values())
        send(self, complete)

    monkeypatch.setattr(DeferredGradients, "_send_on", noting)
    pipe.forward(0, leaves, part)
    pipe.backward(0, "backward_input")
    before = {n for n, p in model.named_parameters() if p.grad is not None}
    pipe.backward_weight(0)
    later = {n: p.grad.data_ptr() for n, p in model.named_parameters() if p.grad is not None and n not in before}
    assert len(later) > 10 and set(later.values()) <= computed
    take_gradients(model)


def test_a_frozen_weight_gets_no_gradient() -> None:
    """And nothing is kept for it."""
    graph, model, case = captured("gpt", in_float64=True)
    pipe = pipeline(model, graph, 1, True)
    (leaves, part), *_ = parts_of(case)
    frozen = [n for n in graph.parameters if "mlp" in n]
    (runner,) = pipe.runners
    runner.tensors = {k: v.detach() if k[1] in frozen else v for k, v in runner.tensors.items()}
    pipe.forward(0, leaves, part)
    pipe.backward(0, "backward_input")
    assert not any("mlp" in r.call.label for r in runner.deferred[0]._records)
    pipe.backward_weight(0)
    found = take_gradients(model)
    assert all((found[n] is None) == (n in frozen) for n in found)


def test_halves_under_autocast_are_the_whole_bit_for_bit() -> None:
    """Autocast casts inside of operators: the second half multiplies in its precision, as autograd would."""
    graph, model, case = captured("gpt")
    found = []
    for splits in (False, True):
        pipe = pipeline(model, graph, 2, splits, autocast=torch.bfloat16)
        leaves = flatten(case.batch(SAMPLES, 0))[0]
        pipe.forward(0, leaves, SampleSlice(SAMPLES, 0, SAMPLES, seed=3))
        if splits:
            assert all(runner.code.weight_groups for runner in pipe.runners)
            pipe.backward(0, "backward_input")
            pipe.backward_weight(0)
        else:
            pipe.backward(0)
        found.append(take_gradients(model))
    for name, right in found[0].items():
        assert right is not None and torch.equal(found[1][name], right), name


def test_without_gradients_nothing_is_kept() -> None:
    graph, model, case = captured("gpt", in_float64=True)
    whole, split = (pipeline(model, graph, 1, splits) for splits in (False, True))
    (leaves, part), *_ = parts_of(case)
    with torch.no_grad():
        losses = [pipe.runners[0].forward(0, {}, leaves, part).loss[0] for pipe in (whole, split)]
    assert torch.equal(*losses) and not split.runners[0].live_microbatches and split.runners[0].recording is None


class Readers(nn.Module):
    """One weight with several readers: products, and operators whose gradients are computed in the first half."""

    def __init__(self, *reads: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads, self.shared = reads, nn.Linear(6, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        penalty = x.new_zeros(())
        for read in self.reads:
            if read == "product":
                x = torch.tanh(self.shared(x))
            elif read == "transposed product":
                x = torch.tanh(x @ self.shared.weight)
            elif read == "sum of squares":
                penalty = penalty + self.shared.weight.square().sum()
            else:
                x = x * self.shared.weight[0]
        return x.square().mean() + penalty


READS = ("product", "transposed product", "sum of squares", "row")


@pytest.mark.parametrize("reads", [(a, b) for a in READS for b in READS if "product" in (a, b)], ids=" and ".join)
def test_the_gradients_of_all_readers_of_a_weight_are_summed(reads: tuple[str, ...]) -> None:
    """In the first microbatch, and in later ones, whose gradients come on top."""
    model, batches = Readers(*reads), [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    graph = capture(model, loss, batches[0])
    parts = [([x], SampleSlice(4, 4 * i, 12, microbatch=i, seed=3)) for i, x in enumerate(batches)]
    _, gradients = run_at_once(pipeline(model, graph, 1, False, [loss]), parts)
    split = pipeline(model, graph, 1, True, [loss])
    for i, (leaves, part) in enumerate(parts):
        split.forward(i, leaves, part)
        split.backward(i, "backward_input")
        split.backward_weight(i)
    compare(" and ".join(reads), [], gradients, [], take_gradients(model))


# ---- on a rank of a mesh ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seed"), [("gpt", 0), ("gpt", 3), ("digits", 0), pytest.param("t5", 0, marks=pytest.mark.slow)]
)
def test_halves_of_a_rewritten_stage_are_the_whole(name: str, seed: int) -> None:
    """With operators split in any way over two ranks: collectives, held weights, partial gradients."""
    case = subject(name)
    shown, offered = case.at(2)
    splits = {"tensor": random_split(shown, offered, 2, random.Random(seed))}
    whole = run_split(case, splits)
    calls = {step.name: step.call for step in shown.operators}

    def work(axes: dict[str, Any]) -> tuple[int, dict[Any, Tensor]]:
        at = {axis: ring.index for axis, ring in axes.items()}
        code = on_rank(case.graph.code.fx, calls, splits, 4, at, shown.aliases)
        deferred = DeferredGradients(defer_weight_gradients(code, lambda n: case.graph.parameters[n].trainable))
        deferred.is_recording = True

        def given(role: tuple[str, Any]) -> Any:
            if role == DEFERRED:
                return deferred
            value = case.table[role]
            placed = splits["tensor"].source_placements.get((f"{role[0]}:{role[1]}", 0), REPLICATE)
            return local_part(value.detach(), {"tensor": placed}, at) if isinstance(value, Tensor) else value

        run = execute(case.graph, code, given, axes)
        assert len(deferred._records) == sum(isinstance(unwrap_settings(n.target), DeferredCall) for n in code.nodes)
        deferred.accumulate()
        return len(deferred.groups), dict(run.sources)

    ranks = on_mesh({"tensor": 2}, work)
    assert all(count for count, _ in ranks.values())
    for at, (_, sources) in ranks.items():
        for key, value in whole[at].sources.items():
            assert (value.grad is None) == (sources[key].grad is None), key
            if value.grad is not None:
                atol = 1e-13 * max(1.0, float(value.grad.abs().max()))
                torch.testing.assert_close(sources[key].grad, value.grad, rtol=1e-12, atol=atol, msg=str(key))
