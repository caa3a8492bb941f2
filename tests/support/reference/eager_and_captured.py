"""Steps of a model itself and of its captured graph, side by side; both draw from torch's own generator."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.capture.assign_keys import DrawnPerSlice, KeyedInPlace, PythonOnSlice
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import run_code, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.facts import UnderSetting
from polylane.graph.nodes.sample_slice import SampleSlice
from tests.support import models

SIZES = (1, 2, 3, 5, 7)


@functools.cache
def _captured(name: str, samples: int, training: bool, in_float64: bool) -> tuple[Graph, nn.Module, models.Case]:
    torch.manual_seed(0)
    case = models.CASES[name]() if name in models.CASES else models.example_case(name)
    model, batch = case.model(), case.batch(samples, 1)
    if in_float64:
        leaves, rebuild = flatten(batch)
        model, batch = model.double(), rebuild(cast_leaves(leaves, torch.float64))
    before = state(model)
    graph = capture(model, case.loss, batch, training=training, in_float64=in_float64)
    assert_unchanged(before, state(model))
    return graph, model, case


def captured(
    name: str, samples: int = 5, training: bool = True, in_float64: bool = False
) -> tuple[Graph, nn.Module, models.Case]:
    """The graph of a case or example, captured once for all tests, its model and the case. Leave the model's values."""
    graph, model, case = _captured(name, samples, training, in_float64)
    model.zero_grad(set_to_none=True)
    return graph, model.train(training), case


def executable(graph: Graph) -> Callable[..., Any]:
    return fx.GraphModule(nn.Module(), graph.code.fx)


def run(graph: Graph, whole: ModelWithLoss, leaves: Sequence[Any], part: SampleSlice) -> tuple[Tensor, ...]:
    """The graph's outputs, with keys."""
    result: tuple[Tensor, ...] = run_code(
        executable(graph), graph.code.fx, tensors_by_role(whole, graph.code.constants, leaves), part
    )
    return result


def unkeyed(graph: Graph) -> fx.Graph:
    """A copy of the code whose random operators are torch's own again, so that it can be held against eager."""
    code = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    output = code.graph_copy(graph.code.fx, copied)
    code.output(output)
    for node in code.nodes:
        if node.op != "call_function":
            continue
        holder: Any = node
        if isinstance(node.target, UnderSetting):
            node.target = holder = copy.copy(node.target)
        target: Any = holder.target
        if isinstance(target, PythonOnSlice):
            holder.target = target.target
        elif target.__module__ == "polylane.graph.operators.keyed_random" or isinstance(
            target, (KeyedInPlace, DrawnPerSlice)
        ):
            _, name, overload = node.meta["op"].split(".")
            holder.target = getattr(getattr(torch.ops.aten, name), overload)
            node.args = node.args[3:]
    return code


def steps(
    whole: ModelWithLoss, run: Callable[[Sequence[Any]], Any], batches: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Losses, gradients and buffers of consecutive steps, by name."""
    seen: dict[str, Any] = {}
    for step, batch in enumerate(batches):
        whole.zero_grad(set_to_none=True)
        result = run([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in batch])
        seen |= {f"loss {step}.{i}": value.detach().clone() for i, value in enumerate(result)}
        if result[0].requires_grad:
            result[0].backward()
        for name, parameter in whole.named_parameters():
            # A parameter that the loss does not reach: eager leaves no gradient, captured code may leave zeros.
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            seen[f"gradient {step} {name}"] = grad
        seen |= {f"buffer {step} {name}": buffer.clone() for name, buffer in whole.named_buffers()}
    return seen


def compare(
    graph: Graph,
    model: nn.Module,
    loss: Any,
    batch: Callable[[int, int], Any],
    samples: int,
    same: Callable[[Any, Any], bool] = torch.equal,
) -> bool:
    """Two steps, eager against captured. Returns whether eager works with so many samples at all.

    Raises:
        AssertionError: naming what differs.
    """
    flat = [flatten(batch(samples, seed)) for seed in (11, 12)]
    batches = [leaves for leaves, _ in flat]
    whole = ModelWithLoss(model, loss, flat[0][1])
    code = unkeyed(graph)
    module = fx.GraphModule(nn.Module(), code)
    state = copy.deepcopy(whole.state_dict())

    def captured(leaves: Sequence[Any]) -> Any:
        return run_code(
            module, code, tensors_by_role(whole, graph.code.constants, leaves), SampleSlice(samples, batch=samples)
        )

    torch.manual_seed(5)
    try:
        expected = steps(whole, lambda leaves: whole(*leaves), batches)
    except Exception:
        return False
    finally:
        whole.load_state_dict(state)
    torch.manual_seed(5)
    got = steps(whole, captured, batches)
    whole.load_state_dict(state)
    for name, value in expected.items():
        assert same(value, got[name]), f"{samples} samples: {name} differs by {(value - got[name]).abs().max():.3g}"
    return True


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of float32."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that capture must leave alone."""
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "training": [m.training for m in model.modules()],
        "attributes": [{k: id(v) for k, v in m.__dict__.items() if k != "training"} for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "cache": [getattr(getattr(m, "config", None), "use_cache", None) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, tensor in before["tensors"].items():
        assert torch.equal(tensor, after["tensors"][name]), name
    assert torch.equal(before["random"], after["random"])
    for key in ("identities", "grads", "training", "attributes", "hooks", "cache"):
        assert before[key] == after[key], key
