"""Losses, split in every way, give what they give whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from polylane.placement.placement import PARTIAL, REPLICATE, Shard
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.rules.registry import strategies
from polylane.placement.rules.vocabulary import ShardedClassLoss
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import (
    Ring,
    ThreadAxis,
    call_for,
    check,
    cut_inputs,
    even_cuts,
    graph_of,
    join_cuts,
    large_dims,
    on_threads,
    uneven,
)
from tests.support import subsets

aten = torch.ops.aten
brief = settings(max_examples=subsets.examples(25), deadline=None)
degrees = st.sampled_from([2, 3])
reductions = st.sampled_from([0, 1, 2])  # none, mean, sum
MEAN = 1


def tensor(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Numbers between 0 and 1."""
    return tensor(*shape, seed=seed).detach().sigmoid().requires_grad_()


def integers(limit: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def named(found: list[Strategy]) -> dict[str, Strategy]:
    return {s.name: s for s in found}


# ---- of elements -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # torch's own, of broadcasting
@settings(max_examples=subsets.examples(60), deadline=None)
@given(
    st.sampled_from(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson"]),
    st.lists(st.integers(1, 4), max_size=3),
    st.booleans(),
    reductions,
    st.booleans(),
    degrees,
)
def test_elementwise(op: str, shape: list[int], spread: bool, reduction: int, flag: bool, degree: int) -> None:
    other = [1 if spread and d % 2 else n for d, n in enumerate(shape)]
    x, y = positive(*shape), positive(*other, seed=1)
    if op == "poisson":
        args = [x, y.detach(), flag, not flag, 1e-8, reduction]
        found = check(aten.poisson_nll_loss.default, args, degree=degree)
    else:
        y = positive(*shape, seed=1).detach() if op == "soft_margin_loss" else y
        more = {"kl_div": {"log_target": flag}, "smooth_l1_loss": {"beta": 0.3}, "huber_loss": {"delta": 0.2}}
        found = check(getattr(aten, op).default, [x, y, reduction], more.get(op), degree=degree)
    own_mean = op in ("mse_loss", "smooth_l1_loss", "huber_loss") and reduction == MEAN
    assert cut_inputs(found) == (large_dims(shape) & large_dims(other) if own_mean else large_dims(shape))
    assert all((s.outputs[0] == PARTIAL) == (reduction > 0) for s in found if isinstance(s.inputs[0], Shard))


@brief
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 7), reductions, st.booleans(), degrees)
def test_binary_cross_entropy(shape: list[int], form: int, reduction: int, soft: bool, degree: int) -> None:
    target = positive(*shape, seed=1) if soft else integers(2, *shape).double()
    weight = [None, positive(*shape, seed=2), positive(shape[-1], seed=2), positive(*shape[:-1], 1, seed=2)][form % 4]
    detached = None if weight is None else weight.detach()
    probable = check(aten.binary_cross_entropy.default, [positive(*shape), target, detached, reduction], degree=degree)
    importance = positive(shape[-1], seed=3).detach() if form > 3 else None
    args = [tensor(*shape), target, detached, importance, reduction]
    found = check(aten.binary_cross_entropy_with_logits.default, args, degree=degree)
    assert cut_inputs(found) == cut_inputs(probable) == large_dims(shape)


@brief
@given(st.integers(1, 5), st.integers(1, 4), reductions, st.sampled_from([0.0, 0.4]), degrees)
def test_ranking(samples: int, features: int, reduction: int, margin: float, degree: int) -> None:
    sign = integers(2, samples) * 2 - 1
    pair = [tensor(samples, features), tensor(samples, features, seed=1)]
    vectors = check(aten.cosine_embedding_loss.default, [*pair, sign, margin, reduction], degree=degree)
    assert ("batch" in named(vectors)) == (samples >= degree)
    scores = [tensor(samples), tensor(samples, seed=1), sign]
    assert cut_inputs(
        check(aten.margin_ranking_loss.default, [*scores, margin, reduction], degree=degree)
    ) == large_dims([samples])
    hinge = check(aten.hinge_embedding_loss.default, [scores[0], sign, margin, reduction], degree=degree)
    assert cut_inputs(hinge) == large_dims([samples])
    triple = [*pair, tensor(samples, features, seed=2), margin, 2.0, 1e-6, margin > 0, reduction]
    assert cut_inputs(check(aten.triplet_margin_loss.default, triple, degree=degree)) == large_dims([samples])


@brief
@given(st.integers(1, 5), st.integers(2, 5), reductions, st.booleans(), degrees)
def test_margins(samples: int, classes: int, reduction: int, weighted: bool, degree: int) -> None:
    weight = positive(classes, seed=2).detach() if weighted else None
    args = [tensor(samples, classes), integers(classes, samples), 2, 0.7, weight, reduction]
    assert cut_inputs(check(aten.multi_margin_loss.default, args, degree=degree)) == (
        {0} if samples >= degree else set()
    )
    several = integers(classes + 1, samples, classes) - 1
    found = check(aten.multilabel_margin_loss.default, [tensor(samples, classes), several, reduction], degree=degree)
    assert cut_inputs(found) == ({0} if samples >= degree else set())


@brief
@given(st.integers(2, 4), reductions, st.booleans(), st.booleans(), degrees)
def test_ctc(samples: int, reduction: int, infinity: bool, numbers: bool, degree: int) -> None:
    scores = tensor(7, samples, 4).detach().log_softmax(2).requires_grad_()
    targets = integers(3, samples, 3) + 1
    lengths = [[7 - i % 2 for i in range(samples)], [max(3 - i, 1) for i in range(samples)]]
    given_lengths = lengths if numbers else [torch.tensor(each) for each in lengths]
    op = aten.ctc_loss.IntList if numbers else aten.ctc_loss.Tensor
    found = check(op, [scores, targets, *given_lengths, 0, reduction, infinity], degree=degree)
    assert cut_inputs(found) == ({1} if samples >= degree else set())


# ---- of one of several classes ---------------------------------------------------------------------------------------


@st.composite
def classified(draw: Any) -> tuple[list[int], Tensor, Tensor | None, int, int]:
    """The shape of scores, targets, weights, how to reduce, and what to ignore."""
    classes, rest = draw(st.integers(1, 7)), draw(st.lists(st.integers(1, 4), max_size=3))
    shape = [classes] if not rest else [rest[0], classes, *rest[1:]]
    target = integers(classes, *rest, seed=draw(st.integers(0, 9)))
    ignore = draw(st.sampled_from([-100, 0, classes - 1]))
    if draw(st.booleans()) and ignore < 0:
        target[integers(2, *rest, seed=5) > 0] = ignore
    weight = positive(classes, seed=4).detach() if draw(st.booleans()) else None
    return shape, target, weight, draw(reductions), ignore


def places(shape: list[int]) -> tuple[int, set[int]]:
    """The dimension of the classes, and those that can be cut."""
    return (0 if len(shape) == 1 else 1), large_dims(shape)


@settings(max_examples=subsets.examples(50), deadline=None)
@given(classified(), st.sampled_from([0.0, 0.0, 0.2]), degrees)
def test_cross_entropy(case: tuple[list[int], Tensor, Tensor | None, int, int], smoothing: float, degree: int) -> None:
    shape, target, weight, reduction, ignore = case
    args = [tensor(*shape), target, weight, reduction, ignore, smoothing]
    found = check(aten.cross_entropy_loss.default, args, degree=degree)
    dim, every = places(shape)
    assert cut_inputs(found) == every
    assert dim not in every or named(found)["classes"].outputs == (REPLICATE,)


@brief
@given(classified(), degrees)
def test_negative_log_likelihood(case: tuple[list[int], Tensor, Tensor | None, int, int], degree: int) -> None:
    shape, target, weight, reduction, ignore = case
    found = check(aten.nll_loss_nd.default, [tensor(*shape), target, weight, reduction, ignore], degree=degree)
    dim, every = places(shape)
    assert cut_inputs(found) == every
    assert dim not in every or named(found)["classes"].outputs == (PARTIAL,)
    if len(shape) == 4 or len(shape) < 3:
        op = aten.nll_loss2d.default if len(shape) == 4 else aten.nll_loss.default
        assert cut_inputs(check(op, [tensor(*shape), target, weight, reduction, ignore], degree=degree)) == every


@brief
@given(
    st.integers(1, 6), st.lists(st.integers(1, 4), max_size=2), st.booleans(), reductions,
    st.sampled_from([0.0, 0.3]), degrees,
)  # fmt: skip
def test_cross_entropy_of_probabilities(
    classes: int, rest: list[int], weighted: bool, reduction: int, smoothing: float, degree: int
) -> None:
    shape = [classes] if not rest else [rest[0], classes, *rest[1:]]
    weight = positive(classes, seed=4) if weighted else None
    args = [tensor(*shape), positive(*shape, seed=1), weight, reduction, -100, smoothing]
    found = check(aten.cross_entropy_loss.default, args, degree=degree)
    assert cut_inputs(found) == large_dims(shape)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_uneven_and_empty_parts_of_a_vocabulary(soft: bool, smoothing: float) -> None:
    target = positive(4, 9, seed=1) if soft else integers(9, 4)
    several = [join_cuts([even_cuts(5, 2), even_cuts(4, 2)]), uneven(9, 2, 3), ((0, 0, 9),), ((0, 9, 9),)]
    cuts = {("in", 0, 1): several, ("in", 0, 0): [((0, 0, 4),), ((0, 3, 4),)]}
    args = [tensor(4, 9), target, positive(9, seed=2).detach(), MEAN, -100, smoothing]
    found = check(aten.cross_entropy_loss.default, args, cuts=cuts)
    assert {s.inputs[0] for s in found} >= {Shard(1, each) for each in several} | {Shard(0, ((0, 0, 4),))}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("degree", [2, 3])
def test_all_targets_ignored(smoothing: float, degree: int) -> None:
    args = [tensor(5, 6), torch.full((5,), -100), None, MEAN, -100, smoothing]
    assert {"classes", "batch"} <= set(named(check(aten.cross_entropy_loss.default, args, degree=degree)))
    assert {"classes", "batch"} <= set(named(check(aten.nll_loss_nd.default, args[:4], degree=degree)))


def test_logits_that_a_naive_sum_of_exponentials_cannot_hold() -> None:
    logits = (tensor(6, 8).detach() * 3000).requires_grad_()
    check(aten.cross_entropy_loss.default, [logits, integers(8, 6)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_reduced_in_single_precision(dtype: torch.dtype) -> None:
    x, target = (tensor(5, 6).detach() * 4).to(dtype), integers(6, 5)
    whole = x.float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole, target)
    expected.backward()
    assert whole.grad is not None
    cuts = even_cuts(6, 2)

    def work(axis: ThreadAxis) -> tuple[Tensor, Tensor]:
        ranges = Shard(1, cuts).ranges(axis.index)
        own = x[:, ranges[0][0] : ranges[0][1]].clone().requires_grad_()
        loss = ShardedClassLoss(logits=True, classes=6, dtype=torch.float32, ranges=ranges)(
            own, target, vocabulary=axis
        )
        loss.backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    ranks = on_threads(2, work)
    for loss, grad in ranks:
        assert loss.dtype == torch.float32
        assert grad.dtype == dtype
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks], 1), whole.grad.to(dtype))


def test_a_class_that_no_rank_has_is_refused() -> None:
    loss = ShardedClassLoss(logits=False, classes=4, dtype=torch.float64, ranges=((0, 2),))
    with pytest.raises(RuntimeError, match="out of range"):
        loss(tensor(3, 2), torch.tensor([0, 4, 1]))


# ---- on two axes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["classes", "smoothed", "probabilities", "likelihood"])
@pytest.mark.parametrize("dims", [(1, 0), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_two_axes_cut_a_loss(target: str, dims: tuple[int, int], reduction: int) -> None:
    shape, likelihood = (3, 5, 4), target == "likelihood"
    scores, weight = tensor(*shape), positive(5, seed=2).detach()
    probabilities = positive(*shape, seed=1).detach()
    right = probabilities if target == "probabilities" else integers(5, 3, 4).fill_diagonal_(-100)
    op = aten.nll_loss_nd.default if likelihood else aten.cross_entropy_loss.default
    args = [scores, right, weight, reduction, -100, *([] if likelihood else [0.1 * (target == "smoothed")])]
    expected = op(*args)
    seed = tensor(*expected.shape, seed=8).detach()
    (wanted,) = torch.autograd.grad(expected, scores, seed, retain_graph=True)
    graph, tensors = graph_of(op, args, {}, expected)
    call = call_for(graph, 2, gradient=True)
    whole = {(f"input:{i}", 0): REPLICATE for i in range(len(tensors))}
    chosen = [next(s for s in strategies(call) if s.inputs[0] == Shard(d, even_cuts(shape[d], 2))) for d in dims]
    splits = {axis: AxisSplit(2, {"op": strategy}, whole) for axis, strategy in zip("xy", chosen, strict=True)}
    rings = {axis: [Ring(2), Ring(2)] for axis in "xy"}

    def work(place: ThreadAxis) -> None:
        at = {"x": place.index // 2, "y": place.index % 2}
        axes = {"x": ThreadAxis(rings["x"][at["y"]], at["x"]), "y": ThreadAxis(rings["y"][at["x"]], at["y"])}
        own = rewrite(graph, {"op": call}, splits, 1, at)
        x = scores.detach().clone().requires_grad_()
        table = {"axis": axes, "input": [x, *tensors[1:]], "part": [None]}
        given = [table[kind][key] for kind, key in (n.meta["role"] for n in own.nodes if n.op == "placeholder")]
        (loss,) = fx.Interpreter(fx.GraphModule({}, own)).run(*given)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(loss, x, seed)
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)

    on_threads(4, work)
