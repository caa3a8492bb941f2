"""A loss along which nothing descends is refused before any worker starts: plain PyTorch raises in backward()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polylane
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.recipe import Mean
from tests.support.workers.training import batch_of, classify, mlp, sgd

BATCH = batch_of(6)
Loss = Callable[[nn.Module, Any], Any]


def argmax(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).argmax(1).double().mean()


def constant(model: nn.Module, batch: Any) -> Tensor:
    return torch.tensor(1.0)


def of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return batch[0].square().mean()


def detached(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch).detach()


def without_gradients(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return classify(model, batch)


def counted(model: nn.Module, batch: Any) -> Mean:
    return Mean(detached(model, batch) * 6, 6)


@pytest.mark.parametrize("loss", [argmax, constant, of_the_batch, detached, without_gradients, counted])
def test_a_loss_without_gradient_is_refused_at_its_line(loss: Loss) -> None:
    line = loss.__code__.co_firstlineno
    with pytest.raises(PolylaneError, match=rf"does not depend on any parameter .*{__file__}:{line}\)"):
        capture(mlp(6, 8, 4), loss, BATCH)
    for plan in ("data=1", "data=1,microbatches=3"):
        with pytest.raises(PolylaneError, match="does not depend on any parameter"):
            polylane.parallelize(mlp(6, 8, 4), loss, sgd, example=BATCH, plan=plan)
    capture(mlp(6, 8, 4), loss, BATCH, training=False)  # there is nothing to descend along


def test_so_it_is_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 4, dtype=torch.float64)
    with pytest.raises(PolylaneError, match="does not depend on any parameter"):
        capture(model, detached, BATCH)
    capture(model, classify, BATCH)


@pytest.mark.parametrize("total", [False, True])
def test_a_complex_loss_is_refused_and_not_cast(total: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        value = torch.complex(classify(model, batch), classify(model, batch))
        return Mean(value, 6) if total else value

    with pytest.raises(PolylaneError, match=r"a real number, not a complex one \(torch.complex128\)"):
        capture(mlp(6, 8, 4), loss, BATCH)


def test_a_loss_that_is_no_number_on_the_example_is_none_the_less_a_loss() -> None:
    for value in (float("nan"), float("inf")):
        graph = capture(mlp(6, 8, 4), lambda model, batch, value=value: classify(model, batch) * value, BATCH)
        assert not graph.is_opaque and not graph.notes


def test_a_frozen_part_is_no_reason() -> None:
    model = mlp(6, 8, 4)
    model[0].requires_grad_(False)
    assert not capture(model, classify, BATCH).parameters["0.weight"].trainable


def penalty(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_(True)
    value = model(inputs).sum() * (1 if float(inputs.sum()) > -1e9 else 2)  # for no graph
    (gradient,) = torch.autograd.grad(value, inputs, create_graph=True)
    return gradient.square().sum(1).mean()


def test_a_loss_that_takes_gradients_for_no_graph_is_one_leaf_that_needs_no_gradients_around_it() -> None:
    model = mlp(6, 8, 4)
    graph = capture(model, penalty, BATCH)
    assert graph.is_opaque and "depends on the data" in graph.notes[0]
    # In evaluation nothing around it wants gradients.
    job = polylane.parallelize(model, penalty, sgd, example=BATCH)
    assert job.evaluate(BATCH) == pytest.approx(penalty(model, BATCH).item())


def test_a_loss_that_calls_backward_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = classify(model, batch)
        value.backward(retain_graph=True)
        return value

    with pytest.raises(PolylaneError, match=r"calls backward\(\) itself, .*test_loss_without_gradient.py:\d+\)"):
        capture(mlp(6, 8, 4), loss, BATCH)


def test_gradients_that_need_no_autograd_around_them_are_none_of_its_business() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_(True)
            (weights,) = torch.autograd.grad(inputs.square().sum(), inputs)
        return (model(batch[0]).square().sum(1) * weights.sum(1)).mean()

    graph = capture(mlp(6, 8, 4), loss, BATCH)
    assert not graph.is_opaque and not graph.notes


def frozen() -> nn.Module:
    return mlp(6, 8, 4).requires_grad_(False)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def learning_ones(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("optimizer", [sgd, learning_ones])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Nothing, "the model has no parameters"),
        (frozen, "no parameter of the model requires a gradient"),
        (lambda: nn.Linear(6, 0, dtype=torch.float64), "has any elements"),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(model: Callable[[], nn.Module], says: str, optimizer: Any) -> None:
    with pytest.raises(PolylaneError, match=f"{says}.*nothing to train"):
        polylane.parallelize(model(), classify, optimizer, example=BATCH)


def test_an_optimizer_of_nothing_that_is_trained_is_refused() -> None:
    model = mlp(6, 8, 4)
    model[0].requires_grad_(False)
    with pytest.raises(PolylaneError, match="the optimizer takes no parameter that requires a gradient"):
        polylane.parallelize(
            model, classify, lambda pairs: torch.optim.SGD([p for _, p in pairs][:2], lr=0.1), example=BATCH
        )


def test_parameters_without_elements_beside_others_are_noted() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = mlp(6, 0, 4)
    notes = capture(model, classify, BATCH).notes
    assert notes == ("nothing is trained of parameters without elements (a width of 0?): 0.weight, 0.bias, 2.weight",)
