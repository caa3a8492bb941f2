"""LARS and LAMB against their papers' formulas, in float64: what every step makes of every parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.optim import LAMB, LARS, split_decay_groups
from tests.optim.layerwise import REFERENCES, gradients_of, random, reference_lamb, reference_lars, stepped

SHAPES = [(5, 3), (4,), (2, 3, 2, 2), ()]
KINDS: dict[str, Any] = {"LARS": LARS, "LAMB": LAMB}


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-14)


def check(kind: str, rates: list[float], **options: Any) -> None:
    """Several parameters of all shapes at once, with a rate for each step."""
    parameters = [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    before = [p.detach().clone() for p in parameters]
    gradients = [gradients_of(shape, len(rates), 100 * (i + 1)) for i, shape in enumerate(SHAPES)]
    optimizer = KINDS[kind](parameters, lr=rates[0], **options)
    for step, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        stepped(optimizer, parameters, [[each[step] for each in gradients]])
    for parameter, weight, each in zip(parameters, before, gradients, strict=True):
        same(parameter, REFERENCES[kind](weight, each, rates, **options))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"momentum": 0.0, "weight_decay": 0.05},
        {"weight_decay": 0.05, "trust": 0.02},
        {"nesterov": True, "eps": 0.3},
        {"nesterov": True, "weight_decay": 0.05, "momentum": 0.5},
        {"adapt": False, "weight_decay": 0.05},
    ],
)
def test_lars_is_algorithm_1(options: dict[str, Any], steps: int) -> None:
    check("LARS", [0.5] * steps, **options)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"betas": (0.0, 0.0), "eps": 1e-3},
        {"betas": (0.5, 0.9), "weight_decay": 0.01},
        {"bounds": (2.0, 3.0)},
        {"adapt": False, "weight_decay": 0.1},
    ],
)
def test_lamb_is_algorithm_2(options: dict[str, Any], steps: int) -> None:
    check("LAMB", [0.05] * steps, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_that_change_count_from_the_step_on(kind: str) -> None:
    """In LARS the rate is inside of the momentum, as in the paper."""
    check(kind, [0.1, 0.2, 0.4, 0.4, 0.05], weight_decay=0.01)


def test_lamb_that_does_not_adapt_is_adamw_at_every_step() -> None:
    mine, theirs = (nn.Parameter(random(4, 3)) for _ in range(2))
    gradients = [[g] for g in gradients_of((4, 3), 6)]
    stepped(LAMB([mine], lr=0.01, eps=1e-8, weight_decay=0.1, adapt=False), [mine], gradients)
    stepped(torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1), [theirs], gradients)
    same(mine, theirs.detach())


def test_lars_that_does_not_adapt_is_sgd_at_a_constant_rate() -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    mine, theirs = (nn.Parameter(random(4, 3)) for _ in range(2))
    gradients = [[g] for g in gradients_of((4, 3), 6)]
    stepped(LARS([mine], adapt=False, **options), [mine], gradients)
    stepped(torch.optim.SGD([theirs], **options), [theirs], gradients)
    same(mine, theirs.detach())


def test_a_layer_moves_by_a_fraction_of_its_length_whatever_its_gradient() -> None:
    for scale in (1e-6, 1.0, 1e6):
        for optimizer, fraction in ((LARS, 0.5 * 0.01), (LAMB, 0.5)):
            options = {"trust": 0.01, "momentum": 0.0} if optimizer is LARS else {"eps": 0.0}
            parameter = nn.Parameter(random(6, 2))
            before = parameter.detach().clone()
            stepped(optimizer([parameter], lr=0.5, **options), [parameter], [[scale * random(6, 2, seed=1)]])
            moved = (parameter.detach() - before).norm() / before.norm()
            assert moved.item() == pytest.approx(fraction, rel=1e-12)


# Zero norms


@pytest.mark.parametrize("zero", ["weight", "gradient", "both"])
def test_where_a_norm_is_zero_the_ratio_is_one(zero: str) -> None:
    weight = torch.zeros(3, 2).double() if zero != "gradient" else random(3, 2)
    gradient = torch.zeros(3, 2).double() if zero != "weight" else random(3, 2, seed=1)
    for kind, reference in REFERENCES.items():
        parameter = nn.Parameter(weight.clone())
        stepped(KINDS[kind]([parameter], lr=0.1), [parameter], [[gradient], [gradient]])
        same(parameter, reference(weight, [gradient, gradient], [0.1, 0.1]))
    parameter = nn.Parameter(weight.clone())
    stepped(LARS([parameter], lr=0.1, momentum=0.0, weight_decay=0.5), [parameter], [[gradient]])
    same(parameter, weight - 0.1 * (gradient + 0.5 * weight))


# Groups


def test_groups_have_options_of_their_own() -> None:
    a, b = (nn.Parameter(random(3, 3, seed=i)) for i in range(2))
    weights, gradients = (a.detach().clone(), b.detach().clone()), [gradients_of((3, 3), 3, i * 10) for i in (1, 2)]
    groups = [{"params": [a], "weight_decay": 0.1}, {"params": [b], "adapt": False, "lr": 0.02}, {"params": []}]
    stepped(LARS(groups, lr=0.5), [a, b], list(zip(*gradients, strict=True)))
    same(a, reference_lars(weights[0], gradients[0], [0.5] * 3, weight_decay=0.1))
    same(b, reference_lars(weights[1], gradients[1], [0.02] * 3, adapt=False))


@pytest.mark.parametrize("named", [False, True])
def test_vectors_apart_take_plain_steps_without_decay(named: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    groups = split_decay_groups(list(model.named_parameters()) if named else model.parameters(), lr=0.01)
    optimizer = LAMB(groups, lr=0.1, weight_decay=0.1)
    adapting, plain = optimizer.param_groups
    assert [p.dim() for p in adapting["params"]] == [2] and adapting["adapt"] and adapting["weight_decay"] == 0.1
    assert [p.dim() for p in plain["params"]] == [1, 1, 1]
    assert (plain["adapt"], plain["weight_decay"], plain["lr"]) == (False, 0.0, 0.01)
    assert plain.get("param_names") == (["0.bias", "1.weight", "1.bias"] if named else None)
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    gradients = [random(*p.shape, seed=i) for i, p in enumerate(parameters)]
    stepped(optimizer, parameters, [gradients])
    same(parameters[0], reference_lamb(before[0], gradients[:1], [0.1], weight_decay=0.1))
    same(parameters[1], reference_lamb(before[1], gradients[1:2], [0.01], adapt=False))


def test_apart_makes_no_empty_group_and_takes_no_groups() -> None:
    (only,) = LAMB(split_decay_groups([("bias", nn.Parameter(torch.zeros(3)))])).param_groups
    assert only["param_names"] == ["bias"] and not only["adapt"]
    with pytest.raises(PolylaneError, match="makes the groups itself"):
        split_decay_groups([{"params": [nn.Parameter(torch.zeros(3))]}])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_a_gradient_stay_and_catch_up_later(kind: str) -> None:
    a, b = (nn.Parameter(random(3, 3, seed=i)) for i in range(2))
    first, second = b.detach().clone(), gradients_of((3, 3), 2)
    optimizer = KINDS[kind]([a, b], lr=0.1)
    stepped(optimizer, [a, b], [[random(3, 3), None]])
    assert torch.equal(b.detach(), first) and b not in optimizer.state
    stepped(optimizer, [a, b], [[None, second[0]], [random(3, 3), second[1]]])
    same(b, REFERENCES[kind](first, second, [0.1, 0.1]))


# States, closures, types


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_goes_on_where_it_was(kind: str) -> None:
    options = {"nesterov": True} if kind == "LARS" else {"betas": (0.8, 0.9)}
    gradients = [[g] for g in gradients_of((4, 2), 6)]
    parameter = nn.Parameter(random(4, 2))
    optimizer = KINDS[kind]([parameter], lr=0.1, weight_decay=0.01, **options)
    stepped(optimizer, [parameter], gradients[:3])
    saved, other = copy.deepcopy(optimizer.state_dict()), nn.Parameter(parameter.detach().clone())
    stepped(optimizer, [parameter], gradients[3:])
    again = KINDS[kind]([other], lr=7.0)
    again.load_state_dict(saved)
    stepped(again, [other], gradients[3:])
    assert torch.equal(parameter, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_computes_the_gradients(kind: str) -> None:
    parameter = nn.Parameter(random(3, 3))
    optimizer = KINDS[kind]([parameter], lr=0.1)
    before = parameter.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item() / 2)
    same(parameter, REFERENCES[kind](before, [before], [0.1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_and_several_dtypes(kind: str, dtype: torch.dtype) -> None:
    """A norm of 1,000 weights of 100 in half precision neither overflows nor loses its digits."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    low, high = nn.Parameter(torch.full((1000, 10), 100.0, dtype=dtype)), nn.Parameter(random(3, 3))
    gradients = torch.full_like(low, 0.5), random(3, 3, seed=1)
    before = low.detach().double(), high.detach().clone()
    options = {"trust": 0.5} if kind == "LARS" else {}
    stepped(KINDS[kind]([low, high], lr=0.1, **options), [low, high], [gradients])
    expected = REFERENCES[kind](before[0], [gradients[0].double()], [0.1], **options)
    torch.testing.assert_close(low.detach().double(), expected, rtol=tolerance, atol=0)
    assert low.dtype == dtype and not torch.equal(low.detach().double(), before[0])
    same(high, REFERENCES[kind](before[1], [gradients[1]], [0.1], **options))


@pytest.mark.parametrize("kind", KINDS)
def test_complex_numbers_are_pairs_of_real_ones(kind: str) -> None:
    parts = random(3, 4, 2)
    parameter = nn.Parameter(torch.view_as_complex(parts.clone()))
    gradients = gradients_of((3, 4, 2), 3)
    stepped(KINDS[kind]([parameter], lr=0.1), [parameter], [[torch.view_as_complex(g)] for g in gradients])
    same(torch.view_as_real(parameter.detach()), REFERENCES[kind](parts, gradients, [0.1] * 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_may_be_a_tensor(kind: str) -> None:
    parameter = nn.Parameter(random(3, 4))
    before, gradients = parameter.detach().clone(), gradients_of((3, 4), 2)
    stepped(KINDS[kind]([parameter], lr=torch.tensor(0.25)), [parameter], [[g] for g in gradients])
    same(parameter, REFERENCES[kind](before, gradients, [0.25] * 2))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_may_lie_in_memory_in_different_ways(kind: str) -> None:
    weights = [random(4, 3, 5, 5).contiguous(memory_format=torch.channels_last), random(3, 4).t(), random(4, 6)[:, 1:4]]
    for weight in weights:
        gradients = gradients_of(weight.shape, 3)
        across = [g.transpose(0, 1).contiguous().transpose(0, 1) for g in gradients]
        for each in (gradients, across, [gradients[0], across[1], gradients[2]]):
            parameter = nn.Parameter(torch.zeros(0).double())
            parameter.data = weight.clone(memory_format=torch.preserve_format) if weight.shape[1:] != (3,) else weight
            before = parameter.detach().clone()
            stepped(KINDS[kind]([parameter], lr=0.1, weight_decay=0.1), [parameter], [[g] for g in each])
            same(parameter, REFERENCES[kind](before, gradients, [0.1] * 3, weight_decay=0.1))


def test_without_a_fused_kernel_lamb_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polylane.optim.lamb._can_fuse", lambda *lists: False)
    check("LAMB", [0.1, 0.2, 0.2], weight_decay=0.1)


# What is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: LARS(p, lr=-1.0), r"LARS: lr=-1.0 must be a number not below 0"),
        (lambda p: LARS(p, lr=0.1, momentum=1.0), r"LARS: momentum=1.0 must be a number in \[0, 1\)"),
        (lambda p: LARS(p, lr=0.1, trust=float("nan")), r"LARS: trust=nan must be"),
        (lambda p: LARS(p, lr=0.1, weight_decay="much"), r"LARS: weight_decay='much' must be"),
        (lambda p: LARS(p, lr=0.1, momentum=0.0, nesterov=True), r"LARS: nesterov=True .*give a momentum above 0"),
        (lambda p: LARS(p, lr=0.1, adapt="no"), r"LARS: adapt='no' must be True or False"),
        (lambda p: LAMB(p, eps=-1e-6), r"LAMB: eps=-1e-06 must be"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), r"LAMB: betas=\(0.9, 1.0\) must be two numbers in \[0, 1\)"),
        (lambda p: LAMB(p, betas=0.9), r"LAMB: betas=0.9 must be two numbers"),
        (lambda p: LAMB(p, bounds=(10.0, 1.0)), r"LAMB: bounds=\(10.0, 1.0\) must be two numbers, 0 <= low <= high"),
        (lambda p: LAMB([{"params": p, "weight_decay": -0.1}]), r"LAMB: weight_decay=-0.1 must be"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        make([nn.Parameter(torch.zeros(2, 2))])


def test_a_refused_group_is_not_added() -> None:
    optimizer = LAMB([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(PolylaneError, match="lr=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(PolylaneError, match="LARS takes no sparse gradients: make the embedding with sparse=False"):
        LARS(table.parameters(), lr=0.1).step()
