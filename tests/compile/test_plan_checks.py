"""What an optimizer or a scheduler cannot do by a plan is said before any worker starts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from polylane.compile.objectives import build_objectives, needs_metric
from polylane.compile.optimizer_parts import explain_coupling, split_by_bits
from polylane.compile.plan_checks import refuse_kept_gradients
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import OverAll, assert_same, batch_of, classify, mlp, plainly, sgd, trained

EXAMPLE = batch_of(8)


class Noisy(torch.optim.SGD):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


class WithClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def of(kind: Any, **options: Any) -> Any:
    return lambda parameters: kind(list(parameters), lr=0.1, **options)


def check(optimizer: Any, plan: str, scheduler: Any = None) -> None:
    """Compile a plan; stages are cut so that each has parameters, which measured times of a busy machine may not do."""

    def seconds(graph: Graph, loss: Any, leaves: Any) -> tuple[float, ...]:
        return tuple(float(len(node.parameters)) for node in graph.nodes)

    objectives = build_objectives(classify, optimizer, scheduler)
    compile_training(mlp(6, 8, 8, 4), objectives, EXAMPLE, plan, seconds=seconds)


class Accumulating(torch.optim.SGD):
    """Makes an update of the gradients of several steps."""

    calls, every = 0, 2

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % self.every == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step() if self.calls % self.every == 0 else None


class Delegating(Accumulating):
    """As optimizers around another one are written, and one that sets to zero."""

    every = 1


class ZeroFilling(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize("every", [2, 5])
def test_gradients_of_several_steps_are_refused(every: int) -> None:
    parameters = list(mlp(6, 4).named_parameters())

    def ask(kind: Any) -> None:
        objective = build_objectives(classify, of(kind), None)["loss"]
        refuse_kept_gradients(parameters, objective, objective.optimizer(parameters))

    with pytest.raises(PolylaneError, match=r"Accumulating.zero_grad\(\) leaves gradients in place"):
        ask(type("Accumulating", (Accumulating,), {"every": every}))
    ask(Delegating)
    ask(ZeroFilling)


@pytest.mark.parametrize("kind", [OverAll, Noisy])
def test_updates_that_depend_on_other_workers_parameters_are_refused(kind: Any) -> None:
    for plan, where in (("pipeline=2,microbatches=2", "pipeline=2"), ("data=2,servers=2", "servers=2")):
        why = (
            r"Noisy draws random numbers \(" if kind is Noisy else "OverAll looks at several parameters .* --clip-norm"
        )
        with pytest.raises(PolylaneError, match=f"plan: {where} updates parameters on several workers, and {why}"):
            check(of(kind), plan)
    for plan in ("data=2", "data=2,servers=1"):  # all parameters are updated together
        check(of(kind), plan)


def test_others_are_not() -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Adagrad):
        for plan in ("pipeline=2,microbatches=2", "data=2,servers=2"):
            check(of(kind), plan)


def test_an_optimizer_that_runs_on_no_small_parameters_is_warned_of() -> None:
    def of_six(parameters: Any) -> torch.optim.Optimizer:
        named = dict(parameters)
        if named["0.weight"].shape[1] != 6:
            raise ValueError("six features?")
        return torch.optim.SGD(named.values(), lr=0.1)

    seen = set[int]()

    def of_its_own(parameters: Any) -> torch.optim.Optimizer:
        own = [p for _, p in parameters]
        seen.update([] if seen else map(id, own))
        if not seen.issuperset(map(id, own)):
            raise ValueError("others?")
        return torch.optim.SGD(own, lr=0.1)

    check(of_six, "pipeline=2,microbatches=2")  # it is tried on the model's own shapes
    with pytest.warns(UserWarning, match="not known whether the optimizer's updates of some depend on others"):
        check(of_its_own, "pipeline=2,microbatches=2")


def test_halves_tell_any_two_apart() -> None:
    names = [str(i) for i in range(11)]
    halves = split_by_bits(names)
    for a in names:
        for b in names:
            assert a == b or any((a in half) != (b in half) for half in halves)
    assert split_by_bits(["only"]) == [["only"], []]


def test_groups_are_what_is_tried() -> None:
    """A norm within each group of options couples no two groups."""

    class ByGroup(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                norm = torch.stack([p.grad.norm() for p in group["params"]]).norm() if group["params"] else 1.0
                for p in group["params"]:
                    p.grad = p.grad / norm
            return super().step(closure)

    def built(parameters: Any) -> torch.optim.Optimizer:
        named = list(parameters)
        return ByGroup([{"params": [p for n, p in named if k in n]} for k in ("weight", "bias")], lr=0.1)

    named = list(mlp(6, 8, 8, 4).named_parameters())
    weights, biases = [n for n, _ in named if "weight" in n], [n for n, _ in named if "bias" in n]
    assert not explain_coupling(named, built, [weights, biases])
    assert "several parameters" in explain_coupling(named, built, [weights[:1], weights[1:] + biases])


class TogetherFrom(torch.optim.SGD):
    """Scales by the norm of all gradients of so many elements or more, which smaller parameters do not show."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        large = [p for p in every if p.numel() >= self.param_groups[0]["momentum"] * 100]
        for p in large:
            p.grad = p.grad / torch.stack([other.grad.norm() for other in large]).norm()
        for p in every:
            p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(("width", "from_elements", "separate"), [(8, 30, False), (8, 100, True), (600, 30_000, False)])
def test_what_goes_by_the_size_is_tried_at_the_models_own(width: int, from_elements: int, separate: bool) -> None:
    """Also of a model too large for all of it to be tried, with two layers alike that different workers update."""
    named = list(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).named_parameters())
    groups = [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert separate == (not explain_coupling(named, of(TogetherFrom, momentum=from_elements / 100), groups))


def test_random_roundings_of_half_precision_are_seen() -> None:
    """By one unit in the last place, which is no rounding where a parameter is updated whole."""

    class Stochastic(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                exact = p.double() - 0.1 * p.grad.double()
                low = exact.to(p.dtype)
                p.copy_(torch.where(torch.rand(p.shape) < 0.5, torch.nextafter(low, torch.full_like(low, 9e9)), low))

    shapes = {"a": (20, 20), "b": (20, 20)}
    named = [(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))) for name, shape in shapes.items()]
    assert explain_coupling(named, of(Stochastic), [["a"], ["b"]])
    assert not explain_coupling(named, of(torch.optim.SGD), [["a"], ["b"]])


def clips(clip: Any, bound: float, captured: bool) -> Any:
    """A hook before the step that clips every group by itself, as the groups are, or as a list of them was made."""

    def built(parameters: Any) -> torch.optim.Optimizer:
        named = list(parameters)
        made = torch.optim.SGD([{"params": [p for n, p in named if k in n]} for k in ("weight", "bias")], lr=0.1)
        lists = [group["params"] for group in made.param_groups]

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for own in lists if captured else (group["params"] for group in optimizer.param_groups):
                clip(own, bound)

        made.register_step_pre_hook(hook)
        return made

    return built


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("bound", [1e-2, 1e5])
def test_norms_that_hooks_clip_are_of_whole_groups(bound: float, captured: bool) -> None:
    """Also where only large gradients are clipped; a list of the model's own parameters knows nothing of shards."""
    factory = clips(torch.nn.utils.clip_grad_norm_, bound, captured)
    for plan in ("pipeline=2,microbatches=2", "data=2,servers=2", "data=2,shard=optimizer", "data=2,shard=parameters"):
        with pytest.raises(PolylaneError, match=r"depends on others|looks at several parameters at once"):
            check(factory, plan)
    check(factory, "data=2")


@pytest.mark.parametrize("captured", [False, True])
def test_values_that_hooks_clip_are_anyones(captured: bool) -> None:
    factory = clips(torch.nn.utils.clip_grad_value_, 1e-2, captured)
    for plan in ("pipeline=2,microbatches=2", "data=2"):
        check(factory, plan)
    for plan in ("data=2,shard=optimizer", "data=2,shard=parameters"):
        with pytest.raises(PolylaneError, match="at once") if captured else nullcontext():
            check(factory, plan)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (of(WithClosure), r"WithClosure.step\(closure\) needs a closure that evaluates the loss"),
        (of(torch.optim.LBFGS), "LBFGS evaluates the loss several times a step"),
        (of(torch.optim.Adam, differentiable=True), r"Adam\(differentiable=True\) steps inside of another loss"),
        (of(torch.optim.SparseAdam), "a first step raises RuntimeError: SparseAdam does not support dense gradients"),
        (lambda p: torch.optim.Muon(list(p), lr=0.1), "Muon only supports 2D parameters"),
    ],
)
def test_optimizers_that_cannot_step(optimizer: Any, says: str) -> None:
    with pytest.raises(PolylaneError, match=says) as caught:
        check(optimizer, "data=2")
    assert "\n" not in str(caught.value)


# Schedulers -----------------------------------------------------------------------------------------------------------


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ("data=2,servers=1", "servers=1"),
        ("data=2,every=2", "every=2"),
        ("pipeline=2,schedule=pipedream,microbatches=2", "schedule=pipedream"),
    ],
)
def test_a_scheduler_on_the_loss_needs_the_loss_of_every_step(plan: str, word: str) -> None:
    with pytest.raises(PolylaneError, match=f"{word} does not give a ReduceLROnPlateau the loss of every step"):
        check(sgd, plan, plateau)


def test_which_schedulers_need_a_metric() -> None:
    optimizer = torch.optim.SGD(mlp(6, 4).parameters(), lr=0.1)
    assert needs_metric(plateau(optimizer)) and not needs_metric(None)
    assert not needs_metric(torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(PolylaneError, match="this StepLR sets the rates of another one"):
        check(sgd, "data=1", lambda _: torch.optim.lr_scheduler.StepLR(other, 1))


class Sharpness(torch.optim.SGD):
    """Evaluates the loss again at moved weights, as sharpness-aware minimization does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a second evaluation"
        with torch.enable_grad():
            closure()
        return super().step()


def test_a_second_evaluation_in_a_step_is_refused() -> None:
    with pytest.raises(
        PolylaneError, match=r"Sharpness.step\(\) needs a closure .*AssertionError: a second evaluation"
    ):
        check(of(Sharpness), "data=1")


@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "data=2,shard=parameters"])
def test_a_step_left_out_for_all_gradients_is_left_out_by_all(plan: str) -> None:
    """It is an outlier's, so that the bound lies between two batches and no trial has to cross it."""

    class SkipsOutliers(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
            return None if float(norm) > 1.0 else super().step(closure)

    def loss(model: nn.Module, batch: Any) -> Any:
        return classify(model, batch) * batch[2].mean()

    batches = [(*batch_of(8, seed), torch.full((8,), size).double()) for seed, size in enumerate((1.0, 50.0, 1.0))]
    kinds = {"loss": loss, "optimizer": of(SkipsOutliers)}
    if "shard" in plan:
        with pytest.raises(PolylaneError, match=r"SkipsOutliers looks at several parameters at once \(.*_checks"):
            trained(mlp(6, 8, 4), plan, batches, **kinds)
        return
    reference = plainly(mlp(6, 8, 4), batches, **kinds)
    for worker in trained(mlp(6, 8, 4), plan, batches, **kinds):
        assert_same(worker, reference)
