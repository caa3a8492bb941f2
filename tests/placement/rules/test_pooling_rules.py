"""Pooling, padding and interpolation, split in every way, give what they give whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polylane.placement.placement import PARTIAL, REPLICATE_PARTIAL_GRAD, Cuts, Shard
from tests.placement.split_checks import check, even_cuts, join_cuts, names_of_cuts, tensor, uneven
from tests.support import subsets

aten = torch.ops.aten
POSITIONS = {1: ["position"], 2: ["height", "width"], 3: ["depth", "height", "width"]}
DEGREES = st.sampled_from([2, 3])


def verify(call: Callable[..., Any], args: list[Any], degree: int) -> set[str]:
    """Check all strategies, with uneven cuts, empty parts and two segments; their names."""
    try:
        outs = call(*args)
    except RuntimeError:
        assume(False)
        raise
    first = outs[0] if isinstance(outs, (list, tuple)) else outs
    cuts: dict[tuple[str, int, int], list[Cuts]] = {}
    for part, value in (("in", args[0]), ("out", first)):
        for dim, n in enumerate(value.shape):
            if n > 1:
                cuts[part, 0, dim] = [uneven(n, degree), ((*[0] * degree, n),)]
                if n % 2 == 0:
                    cuts[part, 0, dim].append(join_cuts([even_cuts(n // 2, degree)] * 2))
    return names_of_cuts(check(call, args, degree=degree, cuts=cuts))


@st.composite
def images(draw: Any, spatial: int, most: int = 9, batched: bool | None = None) -> torch.Tensor:
    """(N, C, ...) or (C, ...)."""
    lead = [draw(st.integers(1, 3))] if (draw(st.booleans()) if batched is None else batched) else []
    most = 5 if spatial == 3 else most
    return tensor(*lead, draw(st.integers(1, 4)), *(draw(st.integers(1, most)) for _ in range(spatial)))


def kept(x: torch.Tensor, spatial: int) -> set[str]:
    """Samples and channels, where there are several."""
    shape = x.shape[: x.dim() - spatial]
    return {name for name, n in zip(["samples", "channels"][-len(shape) :], shape, strict=True) if n > 1}


def along(x: torch.Tensor, out: torch.Tensor, spatial: int) -> set[str]:
    """The dimensions of positions of which there are several before and after."""
    pairs = zip(POSITIONS[spatial], x.shape[-spatial:], out.shape[-spatial:], strict=True)
    return {name for name, n, m in pairs if min(n, m) > 1}


# ---- pools -----------------------------------------------------------------------------------------------------------


@st.composite
def windows(draw: Any, spatial: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride, padding and dilation."""
    kernel = [draw(st.integers(1, 4)) for _ in range(spatial)]
    stride = [draw(st.integers(1, 4)) for _ in range(spatial)] if draw(st.booleans()) else []
    return kernel, stride, [draw(st.integers(0, k // 2)) for k in kernel], [draw(st.integers(1, 2)) for _ in kernel]


@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data(), degree=DEGREES, ceil=st.booleans())
@settings(max_examples=subsets.examples(8), deadline=None)
def test_max_pool(spatial: int, data: st.DataObject, degree: int, ceil: bool) -> None:
    x, (kernel, stride, padding, dilation) = data.draw(images(spatial)), data.draw(windows(spatial))
    call = {1: aten.max_pool1d, 2: aten.max_pool2d, 3: aten.max_pool3d}[spatial].default
    args = [x, kernel, stride, padding, dilation, ceil]
    try:
        assume(call(*args).isfinite().all())  # a window of padding alone: torch writes its gradient anywhere
    except RuntimeError:
        assume(False)
    found = verify(call, args, degree)
    assert found == kept(x, spatial) | along(x, call(*args), spatial)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data(), degree=DEGREES)
@settings(max_examples=subsets.examples(8), deadline=None)
def test_average_pool(spatial: int, data: st.DataObject, degree: int) -> None:
    x, (kernel, stride, padding, _) = data.draw(images(spatial)), data.draw(windows(spatial))
    call = {1: aten.avg_pool1d, 2: aten.avg_pool2d, 3: aten.avg_pool3d}[spatial].default
    args = [x, kernel, stride, padding, data.draw(st.booleans()), data.draw(st.booleans())]
    if spatial > 1:
        args.append(data.draw(st.sampled_from([None, 3])))
    found = verify(call, args, degree)
    assert found == {"summands"} | kept(x, spatial) | along(x, call(*args), spatial)


def test_one_argument_for_all_dimensions() -> None:
    x = tensor(2, 2, 6, 5)
    assert verify(aten.max_pool2d.default, [x, [3], [2], [1], [1], True], 2) == {
        "samples",
        "channels",
        "height",
        "width",
    }
    assert {"height", "width"} <= verify(aten.avg_pool2d.default, [x, [3], [2], [1], True, False], 2)


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (4, 5, 6)])
@pytest.mark.parametrize("degree", [2, 3])
def test_pools_with_indices(shape: tuple[int, ...], degree: int) -> None:
    x = tensor(*shape)
    for call, argument in ((aten.max_pool2d_with_indices.default, [2, 2]), (aten.adaptive_max_pool2d.default, [2, 3])):
        assert verify(call, [x, argument], degree) == kept(x, 2)
    values, indices = aten.max_pool2d_with_indices.default(x.detach(), [2, 2])
    assert verify(aten.max_unpool2d.default, [values.requires_grad_(), indices, [5, 6]], degree) == kept(x, 2)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data(), degree=DEGREES)
@settings(max_examples=subsets.examples(10), deadline=None)
def test_adaptive_average(spatial: int, data: st.DataObject, degree: int) -> None:
    x = data.draw(images(spatial))
    sizes = [data.draw(st.sampled_from([1, 2, 3, n, 2 * n])) for n in x.shape[-spatial:]]
    call = {1: aten.adaptive_avg_pool1d, 2: aten.adaptive_avg_pool2d, 3: aten.adaptive_avg_pool3d}[spatial].default
    found = verify(call, [x, sizes], degree)
    pairs = zip(POSITIONS[spatial], x.shape[-spatial:], sizes, strict=True)
    assert found == {"summands"} | kept(x, spatial) | {
        name for name, n, m in pairs if n > 1 and (m == 1 or n % m == 0 or m % n == 0)
    }


def test_a_global_average_gives_summands() -> None:
    found = check(aten.adaptive_avg_pool2d.default, [tensor(1, 2, 5, 4), [1, 1]], degree=2)
    (height,) = [s for s in found if s.name == "height"]
    assert (height.inputs, height.outputs, height.sent) == ((Shard(2, even_cuts(5, 2)),), (PARTIAL,), 0)


# ---- padding ---------------------------------------------------------------------------------------------------------


@given(
    images(2, batched=True), st.lists(st.integers(-2, 3), min_size=2, max_size=8), st.sampled_from([0, 1.5]), DEGREES
)
@settings(max_examples=subsets.examples(15), deadline=None)
def test_constant_padding(x: torch.Tensor, amounts: list[int], value: float, degree: int) -> None:
    amounts = amounts[: len(amounts) // 2 * 2]
    by_name = x.shape[0] == 2
    args = [x, amounts, "constant", value] if by_name else [x, amounts, value]
    found = verify(aten.pad.default if by_name else aten.constant_pad_nd.default, args, degree)
    out = aten.constant_pad_nd.default(x, amounts, value)
    assert len(found) == sum(min(n, m) > 1 for n, m in zip(x.shape, out.shape, strict=True)) + (value == 0)


@pytest.mark.parametrize("mode", subsets.one_in(2, ["reflect", "replicate", "circular"]))
@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data(), degree=DEGREES)
@settings(max_examples=subsets.examples(6), deadline=None)
def test_padding_from_the_value_itself(mode: str, spatial: int, data: st.DataObject, degree: int) -> None:
    x = data.draw(images(spatial, batched=True if mode == "circular" else None))
    most = {"reflect": -1, "circular": 0, "replicate": 3}[mode]
    ends = [
        (data.draw(st.integers(0, n + most)), data.draw(st.integers(0, n + most))) for n in reversed(x.shape[-spatial:])
    ]
    amounts = [n for pair in ends for n in pair]
    found = verify(aten.pad.default, [x, amounts, mode], degree)
    assert len(found) == sum(n > 1 for n in x.shape) + 1
    if mode != "circular":
        kind = "reflection" if mode == "reflect" else "replication"
        assert verify(getattr(aten, f"{kind}_pad{spatial}d").default, [x, amounts], degree) == found


# ---- interpolation ---------------------------------------------------------------------------------------------------

INTERPOLATIONS = {
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "_upsample_nearest_exact2d": 2,
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3, "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", subsets.one_in(2, INTERPOLATIONS))
@given(data=st.data(), degree=DEGREES, align=st.booleans(), by_factor=st.booleans())
@settings(max_examples=subsets.examples(8), deadline=None)
def test_interpolation(name: str, data: st.DataObject, degree: int, align: bool, by_factor: bool) -> None:
    spatial, nearest = INTERPOLATIONS[name], "nearest" in name
    x = data.draw(images(spatial, most=12, batched=True))
    factors = [data.draw(st.sampled_from([1.0, 2.0, 3.0, 0.5, 1 / 3, 1.5])) for _ in range(spatial)]
    sizes = [int(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
    smooth = name.endswith("_aa")
    assume(min(sizes) > smooth)
    own = [] if nearest else [align]
    if by_factor:
        found = verify(getattr(aten, name).vec, [x, None, *own, factors], degree)
    else:
        found = verify(getattr(aten, name).vec, [x, sizes, *own, None], degree)
        assert found == verify(getattr(aten, name).default, [x, sizes, *own], degree)
    expected = {"summands"} | kept(x, spatial)
    for position, n, m, f in zip(POSITIONS[spatial], x.shape[2:], sizes, factors, strict=True):
        whole = (m % n == 0 or n % m == 0) and (f == m / n or not by_factor)
        if min(n, m) > 1 and not smooth and whole and (n == m or nearest or not align):
            expected.add(position)
    assert found == expected


def test_positions_of_factors_that_are_not_whole_stay_together() -> None:
    assert verify(aten.upsample_nearest1d.vec, [tensor(2, 2, 8), None, [1.5]], 2) == {"summands", "samples", "channels"}
    assert verify(aten.upsample_nearest1d.default, [tensor(2, 2, 8), [16], 1.9], 2) == {
        "summands",
        "samples",
        "channels",
    }


@pytest.mark.parametrize("degree", [2, 3])
def test_grid_sampler(degree: int) -> None:
    found = verify(
        aten.grid_sampler.default, [tensor(2, 3, 4, 5), tensor(2, 3, 4, 2).detach().tanh(), 0, 0, False], degree
    )
    assert found == {"samples", "channels", "height", "width"}


# ---- positions and channels ------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), DEGREES)
@settings(max_examples=subsets.examples(20), deadline=None)
def test_pixel_shuffle(batch: int, channels: int, height: int, width: int, r: int, degree: int) -> None:
    expected = {"summands"} | {
        name for name, n in (("samples", batch), ("channels", channels), ("height", height), ("width", width)) if n > 1
    }
    assert verify(aten.pixel_shuffle.default, [tensor(batch, channels * r * r, height, width), r], degree) == expected
    assert verify(aten.pixel_unshuffle.default, [tensor(batch, channels, height * r, width * r), r], degree) == expected


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("degree", [2, 3])
def test_folding(lead: tuple[int, ...], degree: int) -> None:
    window = [[2, 3], [1, 1], [0, 1], [2, 1]]
    x = tensor(*lead, 4, 5, 4)
    columns = aten.im2col.default(x.detach(), *window).requires_grad_()
    expected = {"summands", "channels", *(["samples"] if lead else [])}
    assert verify(aten.im2col.default, [x, *window], degree) == expected
    assert verify(aten.col2im.default, [columns, [5, 4], *window], degree) == expected


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), DEGREES)
@settings(max_examples=subsets.examples(10), deadline=None)
def test_channel_shuffle(batch: int, groups: int, size: int, degree: int) -> None:
    found = verify(aten.channel_shuffle.default, [tensor(batch, groups * size, 3, 2), groups], degree)
    expected = {"samples": batch, "channels": size, "groups": groups}
    assert found == {"summands", "dim 2", "dim 3", *(name for name, n in expected.items() if n > 1)}


def test_a_shuffle_takes_the_cuts_of_grouped_convolutions() -> None:
    """Between groups before it, inside of each group behind it."""
    groups, size, cuts = 4, 3, ((0, 1, 4),)
    asked: Cuts = (tuple(3 * p for p in cuts[0]),)
    found = check(aten.channel_shuffle.default, [tensor(1, 12, 2), groups], cuts={("in", 0, 1): [asked]})
    segments = tuple(tuple(p + 4 * i for p in cuts[0]) for i in range(size))
    assert ((Shard(1, asked),), (Shard(1, segments),)) in {(s.inputs, s.outputs) for s in found}


def test_sharing_is_offered_too() -> None:
    found = check(aten.max_pool2d.default, [tensor(1, 1, 1, 1), [1, 1]], degree=2)
    assert [s.inputs[0] for s in found][1:] == [REPLICATE_PARTIAL_GRAD]
