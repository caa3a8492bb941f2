"""What users of PyTorch have at hand: an optimizer on the model's parameters, and a criterion of output and target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import Objective, build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.compile.user_objects import OptimizerObject, take_loss
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import assert_same, batch_of, classify, mlp, plainly, trained

BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5))]
PLANS = [
    "data=2",
    "pipeline=2,microbatches=2",
    "data=2,shard=parameters",
    pytest.param("tensor=2", marks=pytest.mark.slow),
]
EXAMPLE = batch_of(8)


def two_groups(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Adagrad makes its state at once."""
    parameters = [p for _, p in named]
    groups = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}]
    return torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1)


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_object_and_a_criterion_train_as_in_a_plain_loop(plan: str) -> None:
    model = mlp(6, 8, 8, 4)
    given = two_groups(list(model.named_parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)

    def decay(job: Job) -> None:
        assert job.optimizer is given
        scheduler.step()

    reference = plainly(mlp(6, 8, 8, 4), BATCHES, optimizer=two_groups)
    for worker in trained(model, plan, BATCHES, decay, optimizer=given, loss=nn.CrossEntropyLoss()):
        assert_same(worker, reference)
    assert all(p.grad is None for p in model.parameters()) and scheduler.last_epoch == 0


class Wraps(torch.optim.Optimizer):
    """Keeps what torch's own way of copying an optimizer leaves out."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.slow, self.steps = inner, [p.detach().clone() for p in inner.param_groups[0]["params"]], 3
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


def test_a_copy_has_all_that_an_optimizer_keeps() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    given = Wraps(two_groups(list(model.named_parameters())))
    torch.optim.lr_scheduler.StepLR(given.inner, 1)
    make = OptimizerObject(given, model.named_parameters())
    copied: Any = make(other.named_parameters())
    assert copied.steps == 3 and copied.inner is not given.inner and copied.param_groups is copied.inner.param_groups
    assert [group["lr"] for group in copied.param_groups] == [0.2, 0.05]
    assert copied.param_groups[0]["params"] == [other.weight] and set(copied.state) == set(other.parameters())
    assert "step" not in vars(copied.inner) and given.state[model.weight]["sum"].shape == (2, 3)
    small = {name: nn.Parameter(torch.zeros([4] * p.dim())) for name, p in model.named_parameters()}
    assert make(small.items()).state[small["weight"]]["sum"].tolist() == [[pytest.approx(0.1)] * 4] * 4
    assert make.take(list(model.named_parameters())) is given


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_a_copy_on_parameters_of_another_type_has_the_state_in_that_type(kind: Any) -> None:
    model = nn.Linear(3, 2)
    given = kind(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    given.step()
    make = OptimizerObject(given, model.named_parameters())
    doubled = {n: nn.Parameter(torch.ones([4] * p.dim(), dtype=torch.float64)) for n, p in model.named_parameters()}
    copied = make(doubled.items())
    for parameter in doubled.values():
        parameter.grad = torch.ones_like(parameter)
        assert all(v.dtype == torch.float64 for v in copied.state[parameter].values() if v.dim())
    copied.step()


BUILT: list[str] = []
STEPPED: list[str] = []


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """Notes that it builds, and that each optimizer steps."""
    BUILT.append("optimizer")
    optimizer = torch.optim.SGD([p for _, p in parameters], 0.1)
    optimizer.register_step_post_hook(lambda *_: STEPPED.append("after"))
    return optimizer


def warming(optimizer: torch.optim.Optimizer) -> Any:
    BUILT.append("scheduler")
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: STEPPED.append("rate") or 1.0)  # type: ignore[func-returns-value]


@pytest.mark.parametrize("is_object", [False, True])
@pytest.mark.parametrize("plan", ["data=2", "data=2,shard=optimizer"])
def test_what_optimizers_keep_in_python_on_trial_is_put_back(plan: str, is_object: bool) -> None:
    BUILT.clear()
    STEPPED.clear()
    model = mlp(6, 8, 4)
    given: Any = hooked(list(model.named_parameters())) if is_object else hooked
    before = list(BUILT)
    compile_training(model, build_objectives(classify, given, warming), EXAMPLE, plan)
    assert (before, []) == (BUILT, STEPPED)


class Bare(torch.optim.SGD):
    """An optimizer that has forgotten torch's tables of hooks, as one has that does not call ``super().__init__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])

    step.hooked = True  # type: ignore[attr-defined]  # torch puts no wrapper around it that looks for hooks


def test_lists_of_optimizers_and_bare_ones_are_taken_as_they_are() -> None:
    model = mlp(6, 8, 4)
    first, *others = model.parameters()
    for given in ([torch.optim.SGD([first], 0.1), torch.optim.SGD(others, 0.1)], Bare(model.parameters(), 0.1)):
        compile_training(model, build_objectives(classify, given, None), EXAMPLE, "data=2")


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(5, 5).parameters(), lr=0.1)
    with pytest.raises(PolylaneError, match=r"a SGD, has a parameter of shape \(5, 5\) that is not the model's"):
        compile_training(mlp(6, 4), {"loss": Objective("loss", classify, other)}, EXAMPLE, "data=1")  # type: ignore[arg-type]


# Criteria -------------------------------------------------------------------------------------------------------------


def reshapes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(1), target.view(-1))


def subtracts(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target[:, None]) ** 2).mean()


class Weighted(nn.Module):
    """A criterion with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, prediction: Tensor, label: Tensor) -> Tensor:
        try:
            return self.scale * F.cross_entropy(prediction, label)
        except IndexError:
            raise ValueError("no") from None


@pytest.mark.parametrize(
    "criterion", [nn.CrossEntropyLoss(), nn.MSELoss(), F.cross_entropy, F.mse_loss, reshapes, subtracts, Weighted()]
)
def test_criteria_are_called_with_output_and_target(criterion: Any) -> None:
    model, batch = mlp(6, 4), EXAMPLE
    if "mse" in getattr(criterion, "__name__", type(criterion).__name__).lower():
        batch = (EXAMPLE[0], torch.zeros(8, 4, dtype=torch.float64))
    problem = TrainingProblem(model, build_objectives(criterion, two_groups, None), batch)
    assert torch.equal(problem.objective.loss(model, batch), criterion(model(batch[0]), batch[1]))
    assert [n for n, _ in problem.parameters if n not in dict(model.named_parameters())] == (
        ["loss.criterion.scale"] if isinstance(criterion, Weighted) else []
    )


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        net = net.to(torch.float64)
        return F.cross_entropy(net(batch[0]), batch[1])


def of_parameters(net: nn.Module, data: Any) -> Tensor:
    return sum(p.square().sum() for p in net.parameters()) + F.mse_loss(net(data[0]), data[0])


def with_an_error(net: nn.Module, data: Any) -> Tensor:
    return data.image + net(data)


@pytest.mark.parametrize("loss", [classify, Counts(), of_parameters, with_an_error])
def test_losses_of_a_model_stay_as_they_are(loss: Any) -> None:
    assert take_loss(loss, mlp(6, 4), EXAMPLE) is loss and getattr(loss, "calls", 0) == 0


def test_a_criterion_needs_batches_of_two() -> None:
    with pytest.raises(PolylaneError, match=r"CrossEntropyLoss takes an output and a target.*\(a dict of x, y\)"):
        take_loss(nn.CrossEntropyLoss(), mlp(6, 4), dict(zip("xy", EXAMPLE, strict=True)))
