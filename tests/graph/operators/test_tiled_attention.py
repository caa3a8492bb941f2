"""Attention with dropout in tiles: function, gradients and random numbers of attention as a whole, in less memory."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.graph.nodes.sample_slice import SampleSlice, TensorRegion
from polylane.graph.operators import tiled_attention
from polylane.graph.operators.counter_rng import random_bits
from polylane.graph.operators.keyed_random import attention
from tests.support import subsets

PART = SampleSlice(3, first=2, batch=9, step=1, seed=4)
WHOLE = 1 << 60  # more scores than any attention has


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles for attentions of any size, of a few rows each."""
    monkeypatch.setattr(tiled_attention, "LEAST_SCORES", 0)
    monkeypatch.setattr(tiled_attention, "_LEAST_ROWS", 3)


def compare(monkeypatch: pytest.MonkeyPatch, tile: int, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
    """Hold attention in tiles to attention as a whole: output and gradients, in float64."""
    torch.manual_seed(0)
    inputs = [torch.randn(shapes[name], dtype=torch.float64, requires_grad=True) for name in ("q", "k", "v")]
    options = {"part": PART, "salt": 5, "batch_dim": 0, "dropout_p": 0.3, **options}

    def run() -> list[Tensor]:
        tensors = dict(zip(("query", "key", "value"), inputs, strict=True))
        out = attention(**tensors, **options, tile=tile)
        given = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        return [out, *torch.autograd.grad(out, inputs, given)]

    tiled = run()
    monkeypatch.setattr(tiled_attention, "LEAST_SCORES", WHOLE)
    whole = run()
    assert "_Tiled" in type(tiled[0].grad_fn).__name__
    assert "_Tiled" not in type(whole[0].grad_fn).__name__
    for one, other in zip(tiled, whole, strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride() or one is not tiled[0]
        assert float((one - other).detach().abs().max()) <= 1e-14 * max(1.0, float(other.detach().abs().max()))


# Laws ----------------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(deadline=None, max_examples=subsets.examples(60))
def test_a_box_draws_the_numbers_of_the_whole(data: st.DataObject) -> None:
    """Also of a value that is itself a region."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    batch_dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    part = SampleSlice(shape[batch_dim] if batch_dim is not None else 1, first=2, batch=9)
    cuts, index = [], [slice(None)] * len(shape)
    for dim in data.draw(st.sets(st.integers(0, len(shape) - 1))):
        kept = sorted(data.draw(st.sets(st.integers(0, shape[dim] - 1), min_size=1)))
        cuts.append((dim, shape[dim], tuple((position, position + 1) for position in kept)))
    region = dataclasses.replace(part, region=TensorRegion(tuple(sorted(cuts))) if cuts else None)
    local = [next((len(spans) for at, _, spans in cuts if at == dim), size) for dim, size in enumerate(shape)]
    bounds = {}
    for dim in data.draw(st.sets(st.integers(0, len(shape) - 1))):
        start = data.draw(st.integers(0, local[dim] - 1))
        bounds[dim] = start, data.draw(st.integers(start + 1, local[dim]))
        index[dim] = slice(*bounds[dim])
    box = [stop - start for start, stop in (bounds.get(dim, (0, local[dim])) for dim in range(len(shape)))]
    drawn = random_bits(region, 3, local, batch_dim, torch.device("cpu"))
    own = random_bits(region.narrow(local, bounds), 3, box, batch_dim, torch.device("cpu"))
    assert torch.equal(own, drawn[tuple(index)])


@given(
    st.lists(st.integers(1, 5), max_size=3), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(1, 600)
)
@settings(deadline=None, max_examples=subsets.examples(100))
def test_tiles_cover_all_scores_once(lead: list[int], rows: int, columns: int, causal: bool, size: int) -> None:
    seen = torch.zeros(*lead, rows, columns, dtype=torch.int64)
    for tile in tiled_attention._tiles(seen.shape, causal, size):
        view = tile.of_queries(seen)[..., : tile.keys]
        assert view.numel() <= max(size, 3 * columns)
        view += 1
    wanted = torch.ones(rows, columns, dtype=torch.int64)
    assert int(seen.max()) == 1
    assert bool((seen >= (wanted.tril() if causal else wanted)).all())


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "heads": {"q": (3, 2, 11, 4), "k": (3, 2, 13, 4), "v": (3, 2, 13, 5)},
    "more queries than keys": {"q": (3, 2, 17, 4), "k": (3, 2, 6, 4), "v": (3, 2, 6, 4)},
    "no heads": {"q": (3, 11, 4), "k": (3, 11, 4), "v": (3, 11, 4)},
    "queries of all samples": {"q": (1, 2, 11, 4), "k": (3, 2, 13, 4), "v": (3, 1, 13, 4)},
    "five dimensions": {"q": (3, 2, 2, 7, 4), "k": (3, 2, 2, 7, 4), "v": (3, 2, 2, 7, 4)},
}


@pytest.mark.parametrize("tile", [1, 40, 150, 400, 100000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_tiles_are_the_whole(monkeypatch: pytest.MonkeyPatch, shapes: str, causal: bool, tile: int) -> None:
    compare(monkeypatch, tile, SHAPES[shapes], is_causal=causal)


@pytest.mark.parametrize("shape", [(11, 13), (3, 1, 11, 13), (3, 2, 1, 13), (13,)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_masks(monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, causal: bool, shape: tuple[int, ...]) -> None:
    """With rows that see no key at all, too."""
    mask = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = mask < 0.4 if kind == torch.bool else mask.masked_fill(mask < 0.3, -torch.inf)
    if len(shape) == 2:
        mask[2] = False if kind == torch.bool else -torch.inf
    compare(monkeypatch, 60, SHAPES["heads"], attn_mask=mask, is_causal=causal)


def test_scales_and_grouped_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"q": (3, 4, 11, 4), "k": (3, 2, 11, 4), "v": (3, 2, 11, 4)}
    compare(monkeypatch, 60, shapes, enable_gqa=True, scale=0.1, is_causal=True)


@pytest.mark.parametrize("batch_dim", [None, 1, 2])
def test_samples_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch, batch_dim: int | None) -> None:
    shape = (3, 3, 3, 4)
    compare(monkeypatch, 10, {"q": shape, "k": shape, "v": shape}, batch_dim=batch_dim)


def test_parts_of_scores_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and striped queries of a rank, where other ranks have the others."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, 12, 4, dtype=torch.float64) for _ in range(3))
    whole = attention(PART, 5, 0, q, k, v, dropout_p=0.3, tile=50)
    rows = ((1, 4), (7, 12))
    region = TensorRegion(((1, 4, ((1, 3),)), (2, 12, rows)))
    taken = torch.cat([q[:, 1:3, start:stop] for start, stop in rows], 2)
    part = dataclasses.replace(PART, region=region)
    own = attention(part, 5, 0, taken, k[:, 1:3], v[:, 1:3], dropout_p=0.3, tile=20)
    wanted = torch.cat([whole[:, 1:3, start:stop] for start, stop in rows], 2)
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_gradients(masked: bool) -> None:
    q, k, v = (torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.7 if masked else None

    def run(*tensors: Tensor) -> Tensor:
        return attention(PART, 5, None, *tensors, attn_mask=mask, dropout_p=0.3, tile=20)

    assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_what_it_saves_is_autograd_s_to_free() -> None:
    """Hooks on saved tensors, as recomputation has, free all of them: the mask too."""
    q = torch.randn(3, 2, 11, 4, requires_grad=True)
    mask = torch.ones(11, 11, dtype=torch.bool)
    held = weakref.ref(mask)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: pytest.fail("not unpacked")):
        out = attention(PART, 5, 0, q, q, q, attn_mask=mask, dropout_p=0.3)
    del mask
    assert held() is None and out.requires_grad


def test_a_mask_with_a_gradient_gets_it() -> None:
    q = torch.randn(3, 2, 11, 4, dtype=torch.float64)
    mask = torch.zeros(11, 11, dtype=torch.float64, requires_grad=True)
    out = attention(PART, 5, 0, q, q, q, attn_mask=mask, dropout_p=0.3)
    (grad,) = torch.autograd.grad(out.square().sum(), mask)
    assert bool((grad != 0).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_numbers(dtype: torch.dtype, autocast: bool) -> None:
    """Rounded as torch's own attention rounds them, also where autocast narrows them."""
    torch.manual_seed(0)
    wide = [torch.randn(3, 2, 64, 8) for _ in range(3)]
    inputs = [tensor.clone() if autocast else tensor.to(dtype) for tensor in wide]
    results = []
    for tensors in (inputs, [tensor.to(dtype).double() for tensor in wide]):
        for tensor in tensors:
            tensor.requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and tensors is inputs):
            out = attention(PART, 5, 0, *tensors, dropout_p=0.3, is_causal=True, tile=300)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert results[0][0].dtype == dtype
    assert [grad.dtype for grad in results[0][1:]] == [tensor.dtype for tensor in inputs]
    for narrow, exact in zip(*results, strict=True):
        error = float((narrow.double() - exact).detach().abs().max())
        assert error <= 8 * torch.finfo(dtype).eps * float(exact.detach().abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_tiles_are_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The softmax is of 32 bits, and a mask whose least number is none of 16 bits masks no more than it does there."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 64, 8, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(64, 64)
    mask[3:9] = torch.finfo(torch.float32).min  # queries that see nothing: of equal scores, not of none
    results = []
    for least in (0, WHOLE):
        monkeypatch.setattr(tiled_attention, "LEAST_SCORES", least)
        with torch.autocast("cpu", dtype=dtype):
            out = attention(PART, 5, 0, *inputs, attn_mask=mask, dropout_p=0.3, tile=300)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(bool((out[:, :, 3:9] != 0).any()) for out, *_ in results)
    for tiled, whole in zip(*results, strict=True):
        assert tiled.dtype == whole.dtype
        error = float((tiled.double() - whole.double()).detach().abs().max())
        assert error <= 8 * torch.finfo(dtype).eps * float(whole.detach().abs().max())


# Memory --------------------------------------------------------------------------------------------------------------


def test_no_more_than_a_tile_of_scores_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, tile = 512, 1 << 12
    inputs = [torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3)]
    peaks = []
    for least in (0, WHOLE):
        monkeypatch.setattr(tiled_attention, "LEAST_SCORES", least)
        with AllocationMeter(inputs) as meter:
            out = attention(PART, 5, 0, *inputs, dropout_p=0.3, tile=tile)
            saved = meter.current_bytes - out.nbytes
            torch.autograd.grad(out.sum(), inputs)
        peaks.append(meter.peak_bytes)
        assert saved == 0 if least == 0 else saved > 2 * tokens * tokens
    assert peaks[0] < peaks[1] / 10
