"""Normalizations, split in every way, give what they give whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.placement.kernels.normalization import ShardedBatchNorm, ShardedLayerNorm, ShardedRmsNorm
from polylane.placement.placement import Shard, divide_cuts, even_cuts
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import (
    Ring,
    ThreadAxis,
    check,
    cut_outputs,
    large_dims,
    on_threads,
    tensor,
    uneven_cuts,
)
from tests.support import subsets

aten = torch.ops.aten
BATCH_NORM = "aten.batch_norm.default"


def talking(checked: list[Strategy]) -> set[int]:
    """Dimensions along which the ranks talk inside."""
    return {s.outputs[0].dim for s in checked if isinstance(s.outputs[0], Shard) and s.sent and s.messages}


# Over features -------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
    lambda shape: st.tuples(st.just(shape), st.integers(1, len(shape)))
)


@given(SHAPES, st.sampled_from(["", "w", "wb"]), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(25), deadline=None)
def test_layer_norm(of: tuple[list[int], int], affine: str, degree: int) -> None:
    shape, behind = of
    form = shape[len(shape) - behind :]
    weight = tensor(*form, seed=1) if "w" in affine else None
    bias = tensor(*form, seed=2) if "b" in affine else None
    checked = check(
        aten.layer_norm.default,
        [tensor(*shape), form, weight, bias, 1e-3],
        degree=degree,
        cuts=uneven_cuts(shape, degree),
    )
    assert cut_outputs(checked) == large_dims(shape)
    assert talking(checked) == {d for d in large_dims(shape) if d >= len(shape) - behind}


def test_layer_norm_with_a_bias_only() -> None:
    checked = check(aten.layer_norm.default, [tensor(2, 5), [5], None, tensor(5, seed=1)], degree=3)
    features = [s for s in checked if s.name == "features"]
    assert features
    assert all(isinstance(s.inputs[1], Shard) for s in features)


@given(SHAPES, st.booleans(), st.sampled_from([None, 1e-3]), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(25), deadline=None)
def test_rms_norm(of: tuple[list[int], int], affine: bool, eps: float | None, degree: int) -> None:
    shape, behind = of
    form = shape[len(shape) - behind :]
    args = [tensor(*shape), form, tensor(*form, seed=1) if affine else None, eps]
    checked = check(aten.rms_norm.default, args, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_outputs(checked) == large_dims(shape)
    assert talking(checked) == {d for d in large_dims(shape) if d >= len(shape) - behind}


def test_native_forms() -> None:
    x, weight = tensor(3, 4, 5), tensor(5, seed=1)
    args = [x.detach(), [5], weight.detach(), None, 1e-5]
    assert cut_outputs(check(aten.native_layer_norm.default, args, degree=3)) == {0, 1}
    assert cut_outputs(check(aten._fused_rms_norm.default, [*args[:3], 1e-5], degree=3)) == {0, 1}


@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float32])
def test_narrow_types_are_normalized_in_a_wide_one(weight_type: torch.dtype) -> None:
    x = (torch.randn(3, 512) * 4 + 20).to(torch.bfloat16)
    weight = torch.randn(512).to(weight_type)
    cuts = even_cuts(512, 2)[0]

    def part(tensor: Tensor, axis: ThreadAxis) -> Tensor:
        return tensor[..., cuts[axis.index] : cuts[axis.index + 1]].clone()

    def layer(axis: ThreadAxis) -> Tensor:
        return ShardedLayerNorm(torch.bfloat16)([axis], part(x, axis), [512], part(weight, axis))

    def rms(axis: ThreadAxis) -> Tensor:
        return ShardedRmsNorm(torch.bfloat16)([axis], part(x * 1e-4, axis), [512], part(weight, axis).to(x.dtype))

    expected = torch.nn.functional.layer_norm(x.float(), [512], weight.float())
    torch.testing.assert_close(torch.cat(on_threads(2, layer), -1).float(), expected, rtol=0.01, atol=0.01)
    expected = torch.nn.functional.rms_norm(x * 1e-4, [512], weight.to(x.dtype))
    torch.testing.assert_close(torch.cat(on_threads(2, rms), -1), expected, rtol=0.01, atol=0.01)


def test_what_lies_far_from_zero_is_normalized_as_well() -> None:
    """A sum of squares less a squared sum would have lost it."""
    x = tensor(2, 64, grad=False) + 1e8
    cuts = even_cuts(64, 2)[0]
    parts = on_threads(
        2, lambda axis: ShardedLayerNorm(torch.float64)([axis], x[:, cuts[axis.index] : cuts[axis.index + 1]], [64])
    )
    torch.testing.assert_close(torch.cat(parts, -1), torch.layer_norm(x, [64]), rtol=1e-6, atol=1e-6)


# Over channels and space ---------------------------------------------------------------------------------------------


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 4), max_size=2), st.booleans(),
    st.sampled_from([2, 3]),
)  # fmt: skip
@settings(max_examples=subsets.examples(25), deadline=None)
def test_group_norm(samples: int, groups: int, unit: int, space: list[int], affine: bool, degree: int) -> None:
    shape = [samples, groups * unit, *space]
    if unit * max(1, *space, 1) == 1:
        shape[1] = groups * (unit := 2)  # one value has no variance
    weights = [tensor(shape[1], seed=1), tensor(shape[1], seed=2)] if affine else [None, None]
    args = [tensor(*shape), groups, *weights, 1e-3]
    checked = check(aten.group_norm.default, args, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_outputs(checked) == large_dims(shape) - ({1} if groups == 1 else set())
    assert talking(checked) == {d for d in large_dims(shape) if d > 1}
    channels = [s for s in checked if s.name == "channels"]
    for strategy in channels:
        (out,) = strategy.outputs
        assert isinstance(out, Shard)
        assert divide_cuts(out.cuts, unit) is not None
        assert all(isinstance(p, Shard) for p in strategy.inputs)


@given(
    st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(2, 4), min_size=1, max_size=2), st.booleans(),
    st.booleans(), st.sampled_from([2, 3]),
)  # fmt: skip
@settings(max_examples=subsets.examples(20), deadline=None)
def test_instance_norm(samples: int, channels: int, space: list[int], affine: bool, own: bool, degree: int) -> None:
    shape = [samples, channels, *space]
    weights = [tensor(channels, seed=1), tensor(channels, seed=2)] if affine else [None, None]
    running = [None, None] if own else [tensor(channels, grad=False), tensor(channels, grad=False).abs() + 0.5]
    args = [tensor(*shape), *weights, *running, own, 0.1, 1e-3, True]
    checked = check(aten.instance_norm.default, args, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_outputs(checked) == large_dims(shape)
    assert talking(checked) == ({d for d in large_dims(shape) if d > 1} if own else set())


def test_running_statistics_of_instances_are_written_whole() -> None:
    running = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    args = [tensor(3, 4, 5), None, None, *running, True, 0.1, 1e-5, True]
    assert not cut_outputs(check(aten.instance_norm.default, args))


@st.composite
def batches(draw: Any) -> tuple[list[int], list[Any], int]:
    """What batch normalization is given, and how many ranks share it."""
    shape = [draw(st.integers(2, 4)), draw(st.integers(1, 4)), *draw(st.lists(st.integers(1, 3), max_size=2))]
    channels = shape[1]
    affine, running = draw(st.booleans()), draw(st.booleans())
    weights = [tensor(channels, seed=1), tensor(channels, seed=2)] if affine else [None, None]
    means = [tensor(channels, seed=3, grad=False), tensor(channels, seed=4, grad=False).abs() + 0.5]
    return shape, [tensor(*shape), *weights, *(means if running else [None, None])], draw(st.sampled_from([2, 3]))


@given(batches())
@settings(max_examples=subsets.examples(20), deadline=None)
def test_batch_norm_in_training(of: tuple[list[int], list[Any], int]) -> None:
    shape, given, degree = of
    part = SampleSlice(shape[0], batch=shape[0])
    args = [part, *given, True, 0.1, 1e-3, True]
    checked = check(batch_norm, args, degree=degree, op=BATCH_NORM, part=part, cuts=uneven_cuts(shape, degree))
    assert cut_outputs(checked) == large_dims(shape)
    assert talking(checked) == large_dims(shape) - {1}
    for strategy in checked:
        if strategy.name == "channels":
            assert all(isinstance(p, Shard) for p in strategy.inputs)


@given(batches())
@settings(max_examples=subsets.examples(20), deadline=None)
def test_batch_norm_out_of_training(of: tuple[list[int], list[Any], int]) -> None:
    shape, given, degree = of
    given[3:] = [tensor(shape[1], seed=3, grad=False), tensor(shape[1], seed=4, grad=False).abs() + 0.5]
    args = [*given, False, 0.1, 1e-3, True]
    checked = check(aten.batch_norm.default, args, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_outputs(checked) == large_dims(shape)
    assert not talking(checked)


def test_without_a_part_in_hand_only_channels_are_cut() -> None:
    args = [tensor(4, 3, 2), None, None, None, None, True, 0.1, 1e-5, True]
    assert cut_outputs(check(aten.batch_norm.default, args)) == {1}


@pytest.mark.parametrize("cut", [(0, 2, 3), (0, 3, 3)])  # the latter leaves nothing to one rank of each replica
def test_replicas_and_ranks_share_statistics(cut: tuple[int, int, int]) -> None:
    """Two replicas of samples, each cut along space over two ranks: all statistics are those of everything."""
    x, weight, bias = tensor(5, 4, 3), tensor(4, seed=1), tensor(4, seed=2)
    running = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    seed = tensor(5, 4, 3, seed=8, grad=False)
    known = [r.clone() for r in running]
    whole = torch.batch_norm(x, weight, bias, *known, True, 0.1, 1e-5, True)
    whole.backward(seed)
    rings = {"space": [Ring(2), Ring(2)], "replicas": [Ring(2), Ring(2)]}
    rows = [slice(0, 3), slice(3, 5)]

    def work(axis: ThreadAxis) -> Any:
        replica, rank = divmod(axis.index, 2)
        space = ThreadAxis(rings["space"][replica], rank)
        replicas = ThreadAxis(rings["replicas"][rank], replica)
        part = SampleSlice(rows[replica].stop - rows[replica].start, batch=5, sum_replicas=_in_place(replicas))
        here = rows[replica], slice(None), slice(cut[rank], cut[rank + 1])
        own = [t.detach().clone().requires_grad_() for t in (x[here], weight, bias)]
        means = [r.clone() for r in running]
        out = ShardedBatchNorm(batch_norm)([space], part, *own, *means, True, 0.1, 1e-5, True)
        out.backward(seed[here])
        return here, out.detach(), [t.grad for t in own], means

    results = on_threads(4, work)
    for here, out, grads, means in results:
        torch.testing.assert_close(out, whole.detach()[here])
        torch.testing.assert_close(grads[0], x.grad[here])  # type: ignore[index]
        torch.testing.assert_close(means, known)
    torch.testing.assert_close(sum(grads[1] for _, _, grads, _ in results), weight.grad)
    torch.testing.assert_close(sum(grads[2] for _, _, grads, _ in results), bias.grad)


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float64, 1.0), (torch.float64, 0.0), (torch.float32, 0.0)])
def test_replicas_share_statistics_of_values_far_from_zero(dtype: torch.dtype, spread: float) -> None:
    """The mean's square is 1e17 of the variance and more: a difference of squares has no digit left, or is negative."""
    x = (3e8 + spread * tensor(5, 4, 3, grad=False)).to(dtype)
    whole = torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, True)
    rows = [slice(0, 3), slice(3, 5)]

    def work(axis: ThreadAxis) -> Tensor:
        part = SampleSlice(len(x[rows[axis.index]]), batch=5, sum_replicas=_in_place(axis))
        return batch_norm(part, x[rows[axis.index]], None, None, None, None, True, 0.1, 1e-5)

    # A mean that is off by one unit in the last place moves every value by that much.
    unit = torch.finfo(dtype).eps * 3e8 / max(spread, 1e-5**0.5)
    torch.testing.assert_close(torch.cat(on_threads(2, work)), whole, rtol=1e-6, atol=2 * unit)


def _in_place(axis: ThreadAxis) -> Any:
    return lambda sums: sums.copy_(axis.all_reduce(sums))


def test_one_value_has_no_variance_wherever_it_lies() -> None:
    x = tensor(1, 3, 1)

    def work(axis: ThreadAxis) -> Any:
        own = x.detach()[:, :, : 1 - axis.index]
        return ShardedBatchNorm(batch_norm)(
            [axis], SampleSlice(1, batch=1), own, None, None, None, None, True, 0.1, 1e-5, True
        )

    with pytest.raises(PolylaneError, match="1 value per channel"):
        on_threads(2, work)


# Weights -------------------------------------------------------------------------------------------------------------


@given(st.sampled_from([-1, 0, 2]), st.integers(1, 5), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(10), deadline=None)
def test_weight_norm(dim: int, size: int, degree: int) -> None:
    shape = [size, 3, 4] if dim < 1 else [3, 4, size]
    norms = [n if d == dim else 1 for d, n in enumerate(shape)]
    args = [tensor(*shape), tensor(*(norms if dim >= 0 else [])), dim]
    checked = check(aten._weight_norm.default, args, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_outputs(checked) == ({dim} if dim >= 0 and size > 1 else set())
    if dim >= 0:
        assert cut_outputs(check(aten._weight_norm_interface.default, args, degree=degree)) == cut_outputs(checked)
