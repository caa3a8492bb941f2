"""Any optimizer of torch.optim on a worker's own parameters, and clipping by the norm over the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective, build_objectives, find_held_names, trainable_names
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.parameters.optimizer import GradientClipper, SumOverMesh, build_optimizer
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.thread_transport import LocalTransport, run_local
from tests.support.workers.training import (
    Tied,
    adamw,
    assert_same,
    assert_state,
    batch_of,
    classify,
    mlp,
    plainly,
    sgd,
    trained,
    workers,
)

BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5))]
CPU = torch.device("cpu")


def of(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(list(parameters), **options)


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Muon takes matrices only; so the biases are not trained."""
    return torch.optim.Muon([p for _, p in parameters if p.ndim == 2], lr=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": of(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW fused": of(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "AdamW foreach": of(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    "Adagrad": of(torch.optim.Adagrad, lr=0.05),  # makes its state at once
    "Adadelta": of(torch.optim.Adadelta, lr=1.0),
    "RMSprop": of(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": of(torch.optim.NAdam, lr=0.01),
    "RAdam": of(torch.optim.RAdam, lr=0.01),
    "Adamax": of(torch.optim.Adamax, lr=0.01),
    "ASGD": of(torch.optim.ASGD, lr=0.1),
    "Rprop": of(torch.optim.Rprop, lr=0.01),
    "Adafactor": of(torch.optim.Adafactor, lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = muon


class Uneven(nn.Module):
    """Most of it has no parameters: a stage may have none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(6):
            x = torch.tanh(torch.sin(x))
        return self.last(x)


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return Uneven().double()


@pytest.mark.parametrize("name", subsets.one_in(3, subsets.one_in(2, OPTIMIZERS)))
def test_any_optimizer(name: str) -> None:
    """On stages of which one may be without parameters, and on replicas; with clipping that binds."""
    tolerance = 1e-5 if name == "Muon" else 1e-9  # Muon orthogonalizes in bfloat16
    if name == "Rprop":  # steps by signs: those of gradients that are rounding noise are nobody's promise
        tolerance = 1e-6
    factory = OPTIMIZERS[name]
    reference = plainly(uneven(), BATCHES, optimizer=factory, clip_norm=0.3, microbatches=2)
    for plan in ("pipeline=4,microbatches=2", "data=2,microbatches=2"):
        for worker in trained(uneven(), plan, BATCHES, optimizer=factory, clip_norm=0.3):
            assert_same(worker, reference, tolerance)


def test_a_stage_may_have_no_parameters() -> None:
    def work(job: Job) -> int:
        job.step(BATCHES[0])
        return len(job.gradients())

    counts = workers(work, uneven(), "pipeline=4,microbatches=2", clip_norm=0.3)
    assert 0 in counts and sum(counts) == 4


class Clips(torch.optim.SGD):
    """Does something to all gradients at once before it steps, as code does that was written for some parameters."""

    def step(self, closure: Any = None) -> None:
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_value_(own, 0.01)
        torch._foreach_mul_([parameter.grad for parameter in own if parameter.grad is not None], 0.5)
        super().step(closure)


def test_an_optimizer_that_takes_no_empty_lists_has_nothing_to_do_without_parameters(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def late(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    reference = plainly(uneven(), BATCHES, optimizer=of(Clips, lr=0.5), scheduler=late)
    for worker in trained(uneven(), "pipeline=4,microbatches=2", BATCHES, optimizer=of(Clips, lr=0.5), scheduler=late):
        assert_same(worker, reference)
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


# Groups


class ClipsGroups(torch.optim.SGD):
    """Clips the values of each group by themselves; a worker may have a share of one group and nothing of another."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], 0.01)
        super().step(closure)


def test_values_of_groups_are_clipped_where_a_worker_has_none_of_a_group() -> None:
    def each_by_itself(parameters: Any) -> torch.optim.Optimizer:
        return ClipsGroups([{"params": [p]} for _, p in parameters], lr=0.5)

    reference = plainly(uneven(), BATCHES, optimizer=each_by_itself)
    for plan in ("data=2,shard=parameters", "data=2,shard=optimizer"):
        for worker in trained(uneven(), plan, BATCHES, optimizer=each_by_itself):
            assert_same(worker, reference)


def by_kind(parameters: Any) -> torch.optim.Optimizer:
    """Two groups by position, one of which is empty on some stages, and one that is empty everywhere."""
    parameters = list(parameters)
    groups = [
        {"params": [p for _, p in parameters[:2]], "lr": 0.2},
        {"params": [p for _, p in parameters[2:]], "weight_decay": 0.1},
        {"params": []},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def named(parameters: Any) -> torch.optim.Optimizer:
    """Groups of (name, parameter) pairs, as torch.optim takes them since 2.6."""
    parameters = list(parameters)
    weights = [(name, p) for name, p in parameters if name.endswith("weight")]
    biases = [(name, p) for name, p in parameters if name.endswith("bias")]
    return torch.optim.SGD([{"params": weights, "lr": 0.2}, {"params": biases, "momentum": 0.9}], lr=0.1)


@pytest.mark.parametrize("factory", [by_kind, named])
@pytest.mark.parametrize("plan", ["data=2", "pipeline=2,microbatches=2"])
def test_groups(plan: str, factory: Any) -> None:
    def groups(job: Job) -> list[list[str]]:
        return [list(group.get("param_names", [])) for group in job.optimizer.param_groups]

    reference = plainly(mlp(6, 8, 8, 4), BATCHES, optimizer=factory)
    results = trained(mlp(6, 8, 8, 4), plan, BATCHES, groups, optimizer=factory)
    for worker in results:
        assert_same(worker, reference)
    if factory is named and "pipeline" in plan:
        held = [name for worker in results for group in worker.extra for name in group]
        assert sorted(held) == sorted(dict(mlp(6, 8, 8, 4).named_parameters()))
        assert all(len(g) >= 1 for worker in results for g in worker.extra)


def test_what_others_hold_leaves_the_groups() -> None:
    model = mlp(6, 8, 4)
    every = list(model.named_parameters())
    built = build_optimizer(Objective("loss", classify, OPTIMIZERS["Adagrad"]), every[:2], every)
    assert [len(group["params"]) for group in built.param_groups] == [2]
    assert built.param_groups[0]["param_names"] == ["0.weight", "0.bias"]
    assert set(built.state) == {p for _, p in every[:2]}


# Schedulers

S = torch.optim.lr_scheduler
STEPS = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5, 8, 6, 8))]


def in_turn(optimizer: torch.optim.Optimizer) -> Any:
    parts = [S.LinearLR(optimizer, 0.1, total_iters=2), S.ExponentialLR(optimizer, 0.5)]
    return S.SequentialLR(optimizer, parts, milestones=[2])


# All of torch's, at settings that move the rates within a few steps.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, [lambda step: 1 / (step + 1)] * len(o.param_groups)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: S.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3], gamma=0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 5, power=2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": in_turn,
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.3, total_iters=3), S.ExponentialLR(o, 0.9)]),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.2, step_size_up=2),  # moves the momentum as well
    "OneCycleLR": lambda o: S.OneCycleLR(o, max_lr=0.2, total_steps=7),  # and this
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.1),  # gets the step's loss
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, which a pipeline's stages hold parts of."""
    every = [p for _, p in parameters]
    return torch.optim.SGD([{"params": every[::2], "lr": 0.2}, {"params": every[1::2]}], lr=0.1, momentum=0.9)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group[key]) for group in optimizer.param_groups for key in ("lr", "momentum")]


def test_every_scheduler_of_torch_is_here() -> None:
    every = {n for n, kind in vars(S).items() if isinstance(kind, type) and issubclass(kind, S.LRScheduler)}
    assert every - {"LRScheduler", "_LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize(
    "plan", subsets.one_in(2, ["data=2", "pipeline=2,microbatches=2", "data=2,shard=optimizer"], first=1)
)
def test_rates_and_weights_of_every_scheduler_are_those_of_a_plain_loop(plan: str) -> None:
    prepared = {
        name: compile_training(mlp(6, 8, 4), build_objectives(classify, grouped, each), STEPS[0], plan, seconds=equally)
        for name, each in SCHEDULERS.items()
    }

    def work(_: Any) -> dict[str, Any]:
        found = {}
        for name, compiled in prepared.items():
            with Job(compiled, World.join(), example=STEPS[0]) as job:
                rates = [(rates_of(job.optimizer), job.step(batch).loss)[0] for batch in STEPS]
                found[name] = rates, job.state_dict()
        return found

    results = fork_workers(work, 2)
    for name, scheduler in SCHEDULERS.items():
        rates, state = plain_rates(scheduler)
        assert len(set(map(tuple, rates))) > 1, f"{name} moves nothing"
        for worker in results:
            got, weights = worker[name]
            torch.testing.assert_close(got, rates, rtol=1e-12, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert_state(weights, state)


def equally(graph: Any, *_: Any) -> tuple[float, ...]:
    return (1.0,) * len(graph.nodes)


def plain_rates(scheduler: Callable[[torch.optim.Optimizer], Any]) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = mlp(6, 8, 4)
    optimizer = grouped(list(model.named_parameters()))
    schedule, rates = scheduler(optimizer), []
    for batch in STEPS:
        rates.append(rates_of(optimizer))
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step(*([loss.item()] if isinstance(schedule, S.ReduceLROnPlateau) else []))
    return rates, model.state_dict()


def test_without_a_scheduler_the_users_own_loop_may_set_the_rate() -> None:
    def work(job: Job) -> dict[str, Tensor]:
        for step, batch in enumerate(BATCHES):
            for group in job.optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            job.step(batch)
        return job.state_dict()

    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    reference = plainly(mlp(6, 8, 4), BATCHES, scheduler=halving)
    for state in workers(work, mlp(6, 8, 4), "data=2"):
        assert all(torch.allclose(state[n], v, rtol=1e-12) for n, v in reference.state.items())


# Clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_clipped_norm_is_torchs_to_the_last_bit(dtype: torch.dtype, stages: int) -> None:
    """However the parameters are spread: norms are combined in the model's order."""
    random = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (1,), (4, 4), (30, 9), (2,), (3, 3, 3), (11,)]
    grads = {f"p{i}": torch.randn(shape, generator=random, dtype=dtype) for i, shape in enumerate(shapes)}

    def parameters(names: list[str]) -> dict[str, nn.Parameter]:
        made = {name: nn.Parameter(torch.zeros_like(grads[name])) for name in names}
        for name, parameter in made.items():
            parameter.grad = grads[name].clone()
        return made

    expected = parameters(list(grads))
    torch.nn.utils.clip_grad_norm_(expected.values(), 0.7)

    def worker(transport: LocalTransport) -> dict[str, Tensor | None]:
        # p0 is tied: the first and the last stage hold it, the first counts it.
        names = [name for i, name in enumerate(grads) if i % stages == transport.rank]
        counted = list(names)
        if transport.rank == stages - 1 and "p0" not in names:
            names.append("p0")
        held = parameters(names)
        sums = SumOverMesh(list(grads), counted, held, CPU, lambda v: transport.all_reduce(v, range(stages)).wait())
        GradientClipper(0.7, sums).clip_gradients()
        return {name: parameter.grad for name, parameter in held.items()}

    for clipped in run_local(stages, worker):
        for name, grad in clipped.items():
            assert grad is not None and torch.equal(grad, expected[name].grad), name


@pytest.mark.parametrize("plan", ["pipeline=2,microbatches=2", "[data=2 | 1],microbatches=2"])
def test_a_weight_that_two_stages_hold_counts_once_in_the_norm(plan: str) -> None:
    reference = plainly(Tied(), BATCHES, microbatches=2, clip_norm=0.3)
    for worker in trained(Tied(), plan, BATCHES, clip_norm=0.3):
        assert_same(worker, reference)


def test_gradients_within_the_bound_stay_as_they_are() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.1, 0.2, 0.2])
    GradientClipper(1.0, SumOverMesh(["p"], ["p"], {"p": parameter}, CPU, lambda v: v)).clip_gradients()
    assert parameter.grad.tolist() == torch.tensor([0.1, 0.2, 0.2]).tolist()


def test_clipping_without_any_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    GradientClipper(1.0, SumOverMesh(["p"], ["p"], {"p": parameter}, CPU, lambda v: v)).clip_gradients()
    GradientClipper(1.0, SumOverMesh(["p"], [], {}, CPU, lambda v: v)).clip_gradients()
    assert parameter.grad is None


# What is refused


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (lambda named: torch.optim.LBFGS([p for _, p in named]), "LBFGS evaluates the loss several times"),
        (lambda named: None, "must return a torch.optim.Optimizer, or a list of them, not a NoneType"),
        (lambda named: torch.optim.SGD([], lr=0.1), "optimizer.parameters. fails: ValueError"),
        (lambda named: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), "a parameter of shape .1. that it"),
        (lambda named: torch.optim.SGD([p.lr for _, p in named]), "optimizer.parameters. fails: AttributeError"),
    ],
)
def test_what_is_refused(factory: Any, says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        compile_training(mlp(6, 4), build_objectives(classify, factory, None), BATCHES[0], "data=1")


def test_an_optimizer_holds_what_it_was_given_and_frozen_parameters_are_not_trained() -> None:
    model = mlp(6, 8, 4)
    model[0].requires_grad_(False)
    held = find_held_names(list(model.named_parameters()), sgd)
    assert held == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert trainable_names(list(model.named_parameters()), held) == ["2.weight", "2.bias"]


def test_mappings_must_have_the_same_names() -> None:
    with pytest.raises(PolylaneError, match="one loss takes one optimizer"):
        build_objectives(classify, {"loss": sgd}, None)
    with pytest.raises(PolylaneError, match=r"losses named \['a', 'b'\] take a mapping of optimizers"):
        build_objectives({"a": classify, "b": classify}, {"a": sgd}, None)
    with pytest.raises(PolylaneError, match="take a mapping of optimizers"):
        build_objectives({"a": classify}, adamw, None)
