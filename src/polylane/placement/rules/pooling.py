"""Sharding rules of pooling, padding, interpolation, and of folding positions into channels and back."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from string import ascii_letters

import torch

from polylane.placement.kernels.empty_shards import skip_empty_ranks
from polylane.placement.kernels.halo_exchange import pick, strategies_by_position, trim, weighted
from polylane.placement.placement import PARTIAL, Shard, contiguous_ranges, repeat_cuts, scale_cuts
from polylane.placement.redistribute import Range
from polylane.placement.rules.by_dimension import label_dimensions, partial_sums, strategies_by_dimension
from polylane.placement.rules.convolution import (
    POSITIONS,
    ReadWindow,
    in_units,
    per_dimension,
    per_group,
    set_argument,
    set_local_groups,
    strategies_in_units,
)
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, RankCall, Strategy


def _by_kept(call: OperatorCall, dims: Sequence[int], spatial: int | None = None) -> Iterator[Strategy]:
    """Yield shards of dimensions that all inputs and outputs have in common, and that the operator does not touch.

    Args:
        call: the operator with concrete shapes.
        dims: indices of the untouched dimensions.
        spatial: number of spatial dimensions behind samples and channels; None where that is not known.
    """
    x = call.inputs[0]
    dim_labels = label_dimensions(x, [d for d in range(x.dim) if d not in dims])
    names = {ascii_letters[d]: f"dim {d}" for d in dims}
    if spatial is not None:
        names |= {ascii_letters[x.dim - spatial - 1]: "channels", ascii_letters[x.dim - spatial - 2]: "samples"}
    inputs, outputs = [dim_labels] * len(call.inputs), [dim_labels] * len(call.outputs)
    yield from map(skip_empty_ranks, strategies_by_dimension(call, inputs, outputs, names=names))


def _by_sample_and_channel(call: OperatorCall, spatial: int) -> Iterator[Strategy]:
    yield from _by_kept(call, range(call.inputs[0].dim - spatial), spatial)


def _spatial(call: OperatorCall) -> int:
    """Return the number of spatial dimensions, from the operator's name: max_pool2d."""
    return next(int(c) for c in call.base if c.isdigit())


# ---- pools -----------------------------------------------------------------------------------------------------------


@rule("max_pool1d", "max_pool2d", "max_pool3d", composes=True)
def max_pool(call: OperatorCall) -> Iterator[Strategy]:
    """Samples, channels and positions."""
    spatial = _spatial(call)
    yield from _by_sample_and_channel(call, spatial)
    # Integer pooling has no -inf to fill positions beyond the ends.
    if not call["self"].dtype.is_floating_point:
        return
    for d, dilation in enumerate(per_dimension(call["dilation"], spatial)):
        yield from _pool(call, spatial, d, _window(call, spatial, d, dilation), -math.inf)


@rule(
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_unpool2d", "max_unpool3d",
)  # fmt: skip
def pool_with_indices(call: OperatorCall) -> Iterator[Strategy]:
    """Samples and channels, of values and their indices together: an index counts positions of the whole."""
    yield from _by_sample_and_channel(call, _spatial(call))


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", composes=True)
def avg_pool(call: OperatorCall) -> Iterator[Strategy]:
    """Samples, channels and positions; windows at the ends are scaled by what they hold."""
    spatial = _spatial(call)
    yield from _by_sample_and_channel(call, spatial)
    yield from partial_sums(call, call.inputs[0])
    for d in range(spatial):
        window = _window(call, spatial, d, 1)
        yield from _pool(call, spatial, d, window, 0.0, _weights(call, window, call["self"].dim - spatial + d))


def _window(call: OperatorCall, spatial: int, d: int, dilation: int) -> ReadWindow:
    kernel = per_dimension(call["kernel_size"], spatial)[d]
    stride = per_dimension(call["stride"], spatial)[d] if call["stride"] else kernel
    return ReadWindow(kernel, stride, dilation, per_dimension(call["padding"], spatial)[d])


def _pool(
    call: OperatorCall, spatial: int, d: int, window: ReadWindow, value: float, weights: Sequence[float] = ()
) -> Iterator[Strategy]:
    dim = call["self"].dim - spatial + d

    def local(edit: RankCall, start: int, stop: int) -> None:
        # The halo has put the padding's values next to the local part: the operator itself must not pad.
        set_argument(edit, "padding", d, spatial, 0)
        local_weights = weights[start:stop]
        if any(weight != 1.0 for weight in local_weights):
            edit.append(weighted, dim, tuple(local_weights))

    yield from strategies_by_position(call, POSITIONS[spatial][d], "self", dim, window.reads, local, value=value)


def _weights(call: OperatorCall, window: ReadWindow, dim: int) -> list[float]:
    """Return, for every output along a dimension, the window's size over the number of its positions that count.

    The divisor is a product over the dimensions, so that each can be corrected independently.
    """
    size, count = call["self"].shape[dim], call.outputs[0].shape[dim]
    if call.arguments.get("divisor_override") is not None:
        return [1.0] * count
    # With ceil_mode a window may reach beyond the padding; positions there never count.
    low, high = (-window.before, size + window.before) if call["count_include_pad"] else (0, size)
    weights = []
    for o in range(count):
        ((start, stop),) = window.reads(o, o + 1)
        weights.append(window.kernel / max(min(stop, high) - max(start, low), 1))
    return weights


@rule(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def adaptive_avg_pool(call: OperatorCall) -> Iterator[Strategy]:
    """Samples and channels; positions where every output is the mean of equally many, or where there is one output."""
    x, out, spatial = call["self"], call.outputs[0], _spatial(call)
    yield from _by_sample_and_channel(call, spatial)
    yield from partial_sums(call, call.inputs[0])
    for d in range(spatial):
        dim = x.dim - spatial + d
        if out.shape[dim] != 1:
            yield from _by_blocks(call, "self", spatial, d)
            continue
        # One output: every rank's mean, weighted by its share of the positions, is a partial sum.
        for cuts in call.common_cuts(x.at(dim)):
            part = {x.index: Shard(dim, cuts)}
            yield skip_empty_ranks(call.strategy(POSITIONS[spatial][d], part, PARTIAL, local=_mean_of_part))


def _mean_of_part(edit: RankCall) -> None:
    part = edit.input_shard()
    edit.append(operator.mul, part.local_length(edit.index) / part.size)


# ---- interpolation ---------------------------------------------------------------------------------------------------


def _by_blocks(call: OperatorCall, argument: str, spatial: int, d: int, taps: int = 0) -> Iterator[Strategy]:
    """Yield shards of positions where equally many inputs become one output everywhere, or one input several outputs.

    Args:
        call: the operator with concrete shapes.
        argument: name of the input that is sharded.
        spatial: number of spatial dimensions.
        d: index of the spatial dimension, from 0.
        taps: number of neighbouring blocks (or inputs) on either side that an output reads, for linear and cubic
            filters.
    """
    x = call[argument]
    dim = x.dim - spatial + d
    n, m = x.shape[dim], call.outputs[0].shape[dim]
    if min(n, m) < 1 or (n % m and m % n):
        return
    down, up = max(n // m, 1), max(m // n, 1)

    def reads(start: int, stop: int) -> list[Range]:
        # Whole blocks only: the local call then computes with the same ratio of sizes as the whole one.
        return [(max((start // up - taps) * down, 0), min((-(-stop // up) + taps) * down, n))]

    def local(edit: RankCall, start: int, stop: int) -> None:
        ((low, high),) = reads(start, stop)
        if edit.arguments.get("output_size") is not None:
            set_argument(edit, "output_size", d, spatial, (high - low) * m // n)
        if (high - low) * m // n != stop - start:
            edit.append(trim, dim, start - low * m // n, stop - start)

    yield from strategies_by_position(call, POSITIONS[spatial][d], argument, dim, reads, local)


@rule(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
def upsample(call: OperatorCall) -> Iterator[Strategy]:
    """Samples and channels; without antialiasing also positions whose number is an integer multiple or fraction."""
    argument = "input" if "input" in call.arguments else "self"
    x, spatial = call[argument], call[argument].dim - 2
    yield from _by_sample_and_channel(call, spatial)
    yield from partial_sums(call, call.inputs[0])
    if call.base.endswith("_aa"):  # torch's antialiasing is wrong for a single output position (CPU, torch 2.13)
        return
    taps = 0 if "nearest" in call.base else 2 if "cubic" in call.base else 1
    for d in range(spatial):
        n, m = x.shape[2 + d], call.outputs[0].shape[2 + d]
        # With aligned corners the distance between sampled positions depends on the whole size.
        if (n == m or not call.arguments.get("align_corners")) and _is_regular(call, d, n, m):
            yield from _by_blocks(call, argument, spatial, d, taps)


_SCALES = ("scales_d", "scales_h", "scales_w", "scales")


def _is_regular(call: OperatorCall, d: int, n: int, m: int) -> bool:
    """Return whether the scale is exactly the ratio of sizes, and rounds alike for every part of them."""
    if min(n, m) < 1 or (n % m and m % n):
        return False
    factors = call.arguments.get("scale_factors") or [
        call.arguments.get(name) for name in _SCALES if name in call.arguments
    ]
    factor = factors[d] if factors else None
    if factor is not None:
        # The operator computes its output's size by this factor, for every part anew.
        blocks = range(min(n, m) + 1)
        if factor != m / n or any(int(k * max(n // m, 1) * factor) != k * max(m // n, 1) for k in blocks):
            return False
    return "nearest" not in call.base or "exact" in call.base or _finds_nearest(n, m)


@lru_cache(maxsize=256)
def _finds_nearest(n: int, m: int) -> bool:
    """Return whether floating-point rounding finds for every output the input that exact arithmetic gives."""
    positions = torch.ops.aten.upsample_nearest1d(torch.arange(n, dtype=torch.float64).view(1, 1, n), [m])
    return bool((positions.flatten() == torch.arange(m) * n // m).all())


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, ...), grid (N, ..., spatial dimensions): samples, channels, and sampled positions."""
    x = call["input"]
    names = dict(zip("ncdhw", ("samples", "channels", "depth", "height", "width"), strict=True))
    places = "dhw"[-(x.dim - 2) :]
    dim_labels = [["n", "c", *[None] * len(places)], ["n", *places, None]]
    strategies = strategies_by_dimension(call, dim_labels, [["n", "c", *places]], names=names)
    yield from map(skip_empty_ranks, strategies)


# ---- padding ---------------------------------------------------------------------------------------------------------


@rule(
    "pad", "constant_pad_nd", "_pad_circular", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip
def pad(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; what is put at the ends of a sharded one may come from another rank."""
    x, mode = call["self"], _mode(call)
    name = "pad" if "pad" in call.arguments else "padding"
    amounts = list(call[name])
    # Padding amounts start with the last dimension: (before, after) of each.
    value = call.arguments.get("value") or 0
    dims = {x.dim - 1 - j: (amounts[2 * j], amounts[2 * j + 1]) for j in range(len(amounts) // 2)}
    yield from _by_kept(call, [d for d in range(x.dim) if dims.get(d, (0, 0)) == (0, 0)])
    if mode != "constant" or not value:
        yield from partial_sums(call, call.inputs[0])
    for dim, ends in dims.items():
        if ends != (0, 0) and (mode == "constant" or min(ends) >= 0):
            yield from _padded(call, name, dim, mode, value)


def _mode(call: OperatorCall) -> str:
    named = {"constant_pad_nd": "constant", "_pad_circular": "circular", "pad": call.arguments.get("mode")}
    return str(named.get(call.base) or ("reflect" if call.base.startswith("reflection") else "replicate"))


def _padded(call: OperatorCall, name: str, dim: int, mode: str, value: float) -> Iterator[Strategy]:
    x = call["self"]
    n, at = x.shape[dim], 2 * (x.dim - 1 - dim)
    front = int(call[name][at])
    source = _source(mode, front, n)

    def reads(start: int, stop: int) -> list[Range]:
        if mode == "constant":
            return [(start - front, stop - front)]
        return contiguous_ranges([source(p) for p in range(start, stop)])

    def local(edit: RankCall, start: int, stop: int) -> None:
        # The halo holds the padding already: pad the other dimensions only.
        edit[name] = [0 if i in (at, at + 1) else amount for i, amount in enumerate(edit[name])]
        if mode == "constant":
            return
        # The halo fetches each source position once, in order; pick repeats and reorders them.
        positions = [p for a, b in reads(start, stop) for p in range(a, b)]
        indices = {p: i for i, p in enumerate(positions)}
        sources = [source(p) for p in range(start, stop)]
        if sources != positions:
            edit["self"] = edit.insert(pick, dim, tuple(indices[p] for p in sources), edit["self"])

    yield from strategies_by_position(call, f"dim {dim}", "self", dim, reads, local, value=value)


def _source(mode: str, front: int, size: int) -> Callable[[int], int]:
    """Return the function from a position of the padded dimension to the position whose value it repeats."""

    def reflected(p: int) -> int:
        p = abs(p - front)
        return 2 * (size - 1) - p if p >= size else p

    if mode == "reflect":
        return reflected
    if mode == "circular":
        return lambda p: (p - front) % size
    return lambda p: min(max(p - front, 0), size - 1)


# ---- positions and channels ------------------------------------------------------------------------------------------


def _by_units(call: OperatorCall, name: str, dims: tuple[int, int], units: tuple[int, int]) -> Iterator[Strategy]:
    """Yield shards of a dimension of the input and of the output that consist of equally many units, of these sizes."""
    x, out = call["self"], call.outputs[0]
    parts = [(x, dims[0], units[0]), (out, dims[1], units[1])]
    yield from map(skip_empty_ranks, strategies_in_units(call, name, x.shape[dims[0]] // units[0], parts))


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: OperatorCall) -> Iterator[Strategy]:
    """r * r channels become positions, or the reverse: any dimension."""
    x, up = call["self"], call.base == "pixel_shuffle"
    r = int(call["upscale_factor" if up else "downscale_factor"])
    yield from _by_kept(call, range(x.dim - 3), 2)
    yield from partial_sums(call, call.inputs[0])
    for name, dim, units in (
        ("channels", x.dim - 3, (r * r, 1)), ("height", x.dim - 2, (1, r)), ("width", x.dim - 1, (1, r))
    ):  # fmt: skip
        yield from _by_units(call, name, (dim, dim), units if up else units[::-1])


@rule("im2col", "col2im")
def folded(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, H, W) to (N, C * kernel, blocks), or back: samples and channels."""
    x = call["self"]
    kernel, to_blocks = math.prod(per_dimension(call["kernel_size"], 2)), call.base == "im2col"
    lead = x.dim - (3 if to_blocks else 2)
    yield from partial_sums(call, call.inputs[0])
    if lead:
        yield from _by_units(call, "samples", (0, 0), (1, 1))
    yield from _by_units(call, "channels", (lead, lead), (1, kernel) if to_blocks else (kernel, 1))


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, groups * C, ...) to (N, C * groups, ...): a part of each group, or whole groups; all other dimensions."""
    x, out, groups = call["self"], call.outputs[0], int(call["groups"])
    yield from _by_kept(call, [d for d in range(x.dim) if d != 1], x.dim - 2)
    yield from partial_sums(call, call.inputs[0])
    # The shuffle transposes (groups, C): a cut of one factor is segmented on one side and in units on the other.
    size = x.shape[1] // max(groups, 1)
    inner_cuts = [*in_units(call, size, [(out, 1, groups)]), *per_group(call, groups, size, [(x, 1)])]
    for cuts in dict.fromkeys(inner_cuts):
        placed = {x.index: Shard(1, repeat_cuts(cuts, size, groups))}
        yield skip_empty_ranks(call.strategy("channels", placed, Shard(1, scale_cuts(cuts, groups))))
    outer_cuts = [*in_units(call, groups, [(x, 1, size)]), *per_group(call, size, groups, [(out, 1)])]
    for cuts in dict.fromkeys(outer_cuts):
        placed = {x.index: Shard(1, scale_cuts(cuts, size))}
        yield skip_empty_ranks(
            call.strategy("groups", placed, Shard(1, repeat_cuts(cuts, groups, size)), local=set_local_groups)
        )
