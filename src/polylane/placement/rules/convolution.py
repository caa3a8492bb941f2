"""Sharding rules of convolutions: by samples, filters, input channels, groups, or positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polylane.placement.kernels.empty_shards import has_empty_rank, nothing, skip_empty_ranks
from polylane.placement.kernels.halo_exchange import strategies_by_position, trim
from polylane.placement.placement import (
    PARTIAL,
    Cuts,
    Placement,
    Shard,
    divide_cuts,
    even_cuts,
    repeat_cuts,
    scale_cuts,
    slice_cuts,
)
from polylane.placement.redistribute import Range
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, RankCall, Strategy, TensorValue

POSITIONS = {1: ("position",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def per_dimension(value: Any, count: int) -> list[Any]:
    """Return an argument as one value per spatial dimension: torch takes one for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * count if len(values) == 1 else values


def set_argument(edit: RankCall, name: str, at: int, count: int, value: Any) -> None:
    """Set an argument's value for one spatial dimension."""
    values = per_dimension(edit[name], count)
    values[at] = value
    edit[name] = values


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution's inputs and dimensions.

    Attributes:
        x, weight: the convolution's input and its filters.
        biases: the bias, if there is one.
        channels: index of the channel dimension of x; spatial dimensions follow it.
        spatial: number of spatial dimensions, 1 to 3.
        groups: number of groups of channels.
        transposed: the weight is (channels in, filters / groups, ...), not (filters, channels in / groups, ...).
    """

    x: TensorValue
    weight: TensorValue
    biases: tuple[TensorValue, ...]
    channels: int
    spatial: int
    groups: int
    transposed: bool

    @property
    def filter_dim(self) -> int:
        """The weight's dimension that holds the filters."""
        return 1 if self.transposed else 0


@rule(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "_convolution", composes=True,
)  # fmt: skip
def convolution(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, ...) or (C, ...), weight (F, C / groups, ...), bias (F); transposed: weight (C, F / groups, ...)."""
    weight = call["weight"]
    spatial = weight.dim - 2
    form = ConvolutionShape(
        x=call["input"],
        weight=weight,
        biases=() if call["bias"] is None else (call["bias"],),
        channels=call["input"].dim - spatial - 1,
        spatial=spatial,
        groups=int(call["groups"]),
        transposed=bool(call.arguments.get("transposed", call.base.startswith("conv_transpose"))),
    )
    if form.channels == 1:
        for cuts in call.common_cuts(form.x.at(0), call.outputs[0].at(0)):
            yield skip_empty_ranks(call.strategy("samples", {form.x.index: Shard(0, cuts)}, Shard(0, cuts)))
    yield from _by_filters(call, form)
    yield from _by_input_channels(call, form)
    yield from _by_groups(call, form)
    for d in range(spatial):
        yield from _by_position(call, form, d)


# ---- channels --------------------------------------------------------------------------------------------------------


def _by_filters(call: OperatorCall, form: ConvolutionShape) -> Iterator[Strategy]:
    """Yield shards of each group's filters."""
    out = call.outputs[0]
    size = out.shape[form.channels] // form.groups
    dims = [(out, form.channels), (form.weight, form.filter_dim), *((bias, 0) for bias in form.biases)]
    # Each group is cut alike, so that every rank keeps all groups and the argument ``groups`` stays as it is.
    for cuts in per_group(call, form.groups, size, dims):
        channel_cuts = repeat_cuts(cuts, size, form.groups)
        placed = {form.weight.index: Shard(form.filter_dim, cuts if form.transposed else channel_cuts)}
        placed |= {bias.index: Shard(0, channel_cuts) for bias in form.biases}
        yield skip_empty_ranks(call.strategy("filters", placed, Shard(form.channels, channel_cuts)))


def _by_input_channels(call: OperatorCall, form: ConvolutionShape) -> Iterator[Strategy]:
    """Yield shards of each group's input channels: every rank has a partial sum of every output."""
    size = form.x.shape[form.channels] // form.groups
    for cuts in per_group(call, form.groups, size, [(form.x, form.channels), (form.weight, 1 - form.filter_dim)]):
        channel_cuts = repeat_cuts(cuts, size, form.groups)
        placed: dict[int, Placement] = {
            form.x.index: Shard(form.channels, channel_cuts),
            form.weight.index: Shard(1 - form.filter_dim, channel_cuts if form.transposed else cuts),
        }
        # The bias is added once in the sum over ranks, not once per rank.
        placed |= {bias.index: PARTIAL for bias in form.biases}
        local = _without_channels if has_empty_rank(placed[form.x.index]) else None
        yield call.strategy("input channels", placed, PARTIAL, local=local)


def _without_channels(edit: RankCall) -> None:
    """Replace the operator on a rank without channels: what is left is the bias, if this rank has it."""
    if edit.input_shard(edit.call["input"].index).local_length(edit.index):
        return
    out, bias = edit.call.outputs[0], edit["bias"]
    spatial = edit.call["weight"].dim - 2
    empty = edit.insert(nothing, [edit.output_shape()], [out.dtype], edit["input"], edit["weight"])
    edit.replace(biased, spatial, empty, bias)


def biased(spatial: int, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add a bias (C), if there is one, to x (..., C, positions) with ``spatial`` dimensions of positions."""
    return x if bias is None else (x + bias.view(-1, *[1] * spatial)).to(x.dtype)


def per_group(call: OperatorCall, groups: int, size: int, dims: Sequence[tuple[TensorValue, int]]) -> Iterator[Cuts]:
    """Yield cuts of the ``size`` channels of one group, from cuts of all groups that neighbours ask for."""

    def of_one_group(value: TensorValue, dim: int, cuts: Cuts) -> Cuts | None:
        group_cuts = slice_cuts(cuts, 0, size)
        return group_cuts if value.shape[dim] == size or repeat_cuts(group_cuts, size, groups) == cuts else None

    wishes = ((value, dim, cuts) for value, dim in dims for cuts in call.common_cuts(value.at(dim)))
    return _even_and_asked_cuts(call, size, (of_one_group(*wish) for wish in wishes))


def _even_and_asked_cuts(call: OperatorCall, size: int, candidates: Iterable[Cuts | None]) -> Iterator[Cuts]:
    """Yield the even cuts of ``size`` units, and those that neighbours ask for and that fit; none of a single unit."""
    if size > 1:
        yield from dict.fromkeys([even_cuts(size, call.degree), *(cuts for cuts in candidates if cuts is not None)])


def _by_groups(call: OperatorCall, form: ConvolutionShape) -> Iterator[Strategy]:
    """Yield shards of whole groups, with their channels and their filters."""
    groups, out = form.groups, call.outputs[0]
    read, out_channels = form.x.shape[form.channels] // groups, out.shape[form.channels] // groups
    weight_size = read if form.transposed else out_channels
    parts = [(form.x, form.channels, read), (form.weight, 0, weight_size), (out, form.channels, out_channels)]
    parts += [(bias, 0, out_channels) for bias in form.biases]
    yield from map(skip_empty_ranks, strategies_in_units(call, "groups", groups, parts, set_local_groups))


def strategies_in_units(
    call: OperatorCall,
    name: str,
    count: int,
    parts: Sequence[tuple[TensorValue, int, int]],
    local: Callable[[RankCall], None] | None = None,
) -> Iterator[Strategy]:
    """Yield shards of dimensions of inputs and of the output that consist of equally many units, which stay whole.

    Args:
        call: an operator with one output.
        name: the strategies' name for users.
        count: number of units that the dimension has.
        parts: tensors with the dimension that consists of units, and the length of a unit there; the output is one.
        local: changes each rank's call; None if the operator runs unchanged on parts.
    """
    for cuts in in_units(call, count, parts):
        shards = [(value, Shard(dim, scale_cuts(cuts, unit))) for value, dim, unit in parts]
        inputs = {value.index: shard for value, shard in shards if value.side == "in"}
        yield call.strategy(name, inputs, [shard for value, shard in shards if value.side == "out"], local=local)


def in_units(call: OperatorCall, count: int, dims: Sequence[tuple[TensorValue, int, int]]) -> Iterator[Cuts]:
    """Yield cuts of ``count`` units that stay whole: the even one, and those that neighbours ask for.

    Args:
        call: the operator whose neighbours are looked up.
        count: number of units in the dimension.
        dims: a tensor, its dimension that consists of these units, and the length of a unit there.
    """
    reduced = (divide_cuts(cuts, unit) for value, dim, unit in dims for cuts in call.common_cuts(value.at(dim)))
    return _even_and_asked_cuts(call, count, reduced)


def set_local_groups(edit: RankCall) -> None:
    """Set the argument ``groups`` to the number of groups of this rank."""
    out = edit.output_shard()
    edit["groups"] = int(edit["groups"]) * out.local_length(edit.index) // out.size


# ---- positions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadWindow:
    """The inputs that an output of a convolution or pooling reads along one dimension.

    Attributes:
        kernel, stride, dilation: the operator's arguments along this dimension.
        before: number of padded positions before the first.
    """

    kernel: int
    stride: int
    dilation: int
    before: int

    @property
    def reach(self) -> int:
        """Distance from the first to the last position that an output reads."""
        return (self.kernel - 1) * self.dilation

    def reads(self, start: int, stop: int) -> list[Range]:
        """Return the range of inputs that outputs from ``start`` to ``stop`` read; it may reach into the padding."""
        return [(start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.reach + 1)]

    def feeds(self, start: int, stop: int) -> list[Range]:
        """Return the range of inputs that write to outputs from ``start`` to ``stop`` of a transposed convolution.

        Inputs around them are included until what they write covers all of the outputs.
        """
        # Input i writes to outputs from i * stride - before to i * stride - before + reach.
        low = min((start + self.before) // self.stride, -(-(start + self.before - self.reach) // self.stride))
        high = max((stop - 1 + self.before) // self.stride, -(-(stop + self.before - self.reach - 1) // self.stride))
        return [(low, high + 1)]


def _by_position(call: OperatorCall, form: ConvolutionShape, d: int) -> Iterator[Strategy]:
    spatial, dim = form.spatial, form.channels + 1 + d
    name = POSITIONS[spatial][d]
    padding = call["padding"]
    kernel, dilation = form.weight.shape[2 + d], per_dimension(call["dilation"], spatial)[d]
    is_same = padding == "same"
    # torch pads "same" unevenly: the smaller half comes before.
    front = (kernel - 1) * dilation // 2 if is_same else 0 if padding == "valid" else per_dimension(padding, spatial)[d]
    window = ReadWindow(kernel, per_dimension(call["stride"], spatial)[d], dilation, front)

    def unpadded(edit: RankCall, start: int, stop: int) -> None:
        if is_same:  # "same" pads the local input again and returns as many outputs: keep those in the middle
            edit.append(trim, dim, front, stop - start)
        elif padding != "valid":
            set_argument(edit, "padding", d, spatial, 0)

    def written(edit: RankCall, start: int, stop: int) -> None:
        # No padding or output_padding locally: compute all outputs of the fetched inputs, and keep this rank's.
        set_argument(edit, "padding", d, spatial, 0)
        set_argument(edit, "output_padding", d, spatial, 0)
        ((first_input, _),) = window.feeds(start, stop)
        edit.append(trim, dim, start - (first_input * window.stride - front), stop - start)

    if form.transposed:
        yield from strategies_by_position(call, name, "input", dim, window.feeds, written)
    else:
        yield from strategies_by_position(call, name, "input", dim, window.reads, unpadded)
