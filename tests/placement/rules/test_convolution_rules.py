"""Convolutions, split in every way, give what they give whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polylane.placement.kernels.halo_exchange import HaloExchange
from polylane.placement.placement import PARTIAL, REPLICATE_PARTIAL_GRAD, Cuts, Shard, repeat_cuts
from tests.placement.split_checks import check, even_cuts, join_cuts, names_of_cuts, on_threads, tensor, uneven
from tests.support import subsets

aten = torch.ops.aten
FORWARD = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
TRANSPOSED = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}
NAMED = {1: aten.conv1d.padding, 2: aten.conv2d.padding, 3: aten.conv3d.padding}
POSITIONS = {1: ["position"], 2: ["height", "width"], 3: ["depth", "height", "width"]}


@st.composite
def subjects(draw: Any, transposed: bool = False) -> dict[str, Any]:
    """A convolution of any shape, and cuts that neighbours ask for."""
    spatial = draw(st.sampled_from([1, 1, 2, 2, 3]))
    groups, read, made = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    small = st.integers(1, 3 if spatial > 1 else 5)
    kernel = [draw(small) for _ in range(spatial)]
    stride = [draw(st.integers(1, 4)) for _ in range(spatial)]
    padding = [draw(st.integers(0, 4)) for _ in range(spatial)]
    dilation = [draw(st.integers(1, 3)) for _ in range(spatial)]
    size = [draw(st.integers(1, 5 if spatial == 3 else 11)) for _ in range(spatial)]
    batch = draw(st.sampled_from([None, 1, 2, 3]))
    x = tensor(*([] if batch is None else [batch]), groups * read, *size, grad=draw(st.booleans()))
    first, second = (groups * read, made) if transposed else (groups * made, read)
    weight = tensor(first, second, *kernel, seed=1)
    bias = tensor(groups * made, seed=2) if draw(st.booleans()) else None
    return {
        "spatial": spatial, "groups": groups, "x": x, "weight": weight, "bias": bias, "stride": stride,
        "padding": padding, "dilation": dilation, "lead": int(batch is not None),
        "degree": draw(st.sampled_from([2, 3])), "output_padding": [draw(st.integers(0, s - 1)) for s in stride],
    }  # fmt: skip


def asked(c: dict[str, Any], out: torch.Tensor) -> dict[tuple[str, int, int], list[Cuts]]:
    """Uneven cuts, with empty parts, of all dimensions; and of channels as they come from two matrices in one."""
    found: dict[tuple[str, int, int], list[Cuts]] = {}
    for part, value in (("in", c["x"]), ("out", out)):
        for dim in range(value.dim()):
            n = value.shape[dim]
            if n > 1:
                found[part, 0, dim] = [uneven(n, c["degree"], 2), ((*[0] * c["degree"], n),)]
                if n % 2 == 0:
                    found[part, 0, dim].append(join_cuts([even_cuts(n // 2, c["degree"])] * 2))
    return found


def verify(call: Callable[..., Any], args: list[Any], c: dict[str, Any]) -> None:
    try:
        out = call(*args)
    except RuntimeError:
        assume(False)
        raise
    found = check(call, args, degree=c["degree"], cuts=asked(c, out))
    groups, x, lead = c["groups"], c["x"], c["lead"]
    read, made = x.shape[lead] // groups, out.shape[lead] // groups
    expected = {
        "samples": lead and x.shape[0] > 1,
        "filters": made > 1,
        "input channels": read > 1,
        "groups": groups > 1,
    }
    for d, name in enumerate(POSITIONS[c["spatial"]]):
        expected[name] = x.shape[lead + 1 + d] > 1 and out.shape[lead + 1 + d] > 1
    assert names_of_cuts(found) == {name for name, offered in expected.items() if offered}


@given(subjects())
@settings(max_examples=subsets.examples(40), deadline=None)
def test_convolution(c: dict[str, Any]) -> None:
    args = [c["x"], c["weight"], c["bias"], c["stride"], c["padding"], c["dilation"], c["groups"]]
    verify(FORWARD[c["spatial"]], args, c)


@given(subjects(transposed=True))
@settings(max_examples=subsets.examples(40), deadline=None)
def test_transposed_convolution(c: dict[str, Any]) -> None:
    args = [c["x"], c["weight"], c["bias"], c["stride"], c["padding"], c["output_padding"], c["groups"], c["dilation"]]
    verify(TRANSPOSED[c["spatial"]], args, c)


@given(subjects(), st.sampled_from(["same", "valid"]))
@settings(max_examples=subsets.examples(25), deadline=None)
def test_padding_by_name(c: dict[str, Any], padding: str) -> None:
    stride = [1] * c["spatial"] if padding == "same" else c["stride"]
    verify(
        NAMED[c["spatial"]], [c["x"], c["weight"], c["bias"], stride, padding, c["dilation"], c["groups"]], c
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_the_general_operator(transposed: bool) -> None:
    weight = tensor(4, 3, 3, 3) if transposed else tensor(6, 2, 3, 3)
    args = [tensor(2, 4, 7, 5), weight, tensor(6), [2], [1], [1], transposed, [0], 2]
    found = names_of_cuts(check(aten.convolution.default, args, degree=3))
    assert found == {"samples", "filters", "input channels", "groups", "height", "width"}


def test_halos_reach_beyond_the_neighbour() -> None:
    """A kernel wider than three parts together, and a rank between them that has none."""
    args = [tensor(1, 2, 9), tensor(2, 2, 9), None, [1], [8], [1], 1]
    cuts: Cuts = ((0, 1, 1, 2, 9),)
    found = check(
        aten.conv1d.default, args, degree=4, cuts={("in", 0, 2): [cuts], ("out", 0, 2): [((0, 5, 6, 6, 17),)]}
    )
    lengthwise = [s for s in found if s.name == "position"]
    assert cuts in {s.inputs[0].cuts for s in lengthwise if isinstance(s.inputs[0], Shard)}
    assert all(s.sent > 0 and s.messages == 2 for s in lengthwise)


def test_a_pointwise_convolution_needs_no_halo() -> None:
    found = check(aten.conv2d.default, [tensor(2, 3, 6, 5), tensor(4, 3, 1, 1), tensor(4)], degree=2)
    assert all(s.sent == 0 for s in found)


def test_filters_give_the_input_channels_that_the_next_one_reads() -> None:
    """Filters, then input channels: what the first gives lies as the second wants it."""
    filters = next(
        s for s in check(aten.conv2d.default, [tensor(1, 3, 4, 4), tensor(6, 3, 1, 1)], degree=2) if s.name == "filters"
    )
    channels = next(
        s
        for s in check(aten.conv2d.default, [tensor(1, 6, 4, 4), tensor(5, 6, 1, 1), tensor(5)], degree=2)
        if s.name == "input channels"
    )
    assert filters.inputs == (REPLICATE_PARTIAL_GRAD, Shard(0, even_cuts(6, 2)))
    assert filters.outputs == (channels.inputs[0],)
    assert (channels.inputs[1:], channels.outputs) == ((Shard(1, even_cuts(6, 2)), PARTIAL), (PARTIAL,))


def test_groups_take_the_cuts_of_their_neighbours() -> None:
    """Cut between whole groups, whoever asks; a cut inside of each group is one of filters."""
    args = [tensor(1, 8, 5), tensor(12, 2, 2), tensor(12), [1], [0], [1], 4]
    within = repeat_cuts(((0, 1, 3),), 3, 4)
    found = check(
        aten.conv1d.default, args, degree=2, cuts={("in", 0, 1): [((0, 2, 8),), ((0, 3, 8),)], ("out", 0, 1): [within]}
    )
    groups = {(s.inputs[0], s.outputs[0]) for s in found if s.name == "groups"}
    assert groups == {
        (Shard(1, ((0, 4, 8),)), Shard(1, ((0, 6, 12),))),
        (Shard(1, ((0, 2, 8),)), Shard(1, ((0, 3, 12),))),
    }
    assert Shard(1, within) in {s.outputs[0] for s in found if s.name == "filters"}


@given(st.integers(1, 9), st.sampled_from([2, 3, 4]), st.data())
@settings(max_examples=subsets.examples(40), deadline=None)
def test_halo(size: int, degree: int, data: st.DataObject) -> None:
    """Whatever each rank wants of a dimension, however that is cut; the way back is the transpose."""
    x = tensor(2, size, 3, grad=False)
    ends = st.lists(st.integers(0, size), min_size=degree - 1, max_size=degree - 1).map(sorted)
    cuts: Cuts = ((0, *data.draw(ends), size),)
    if data.draw(st.booleans()):
        cuts = join_cuts([cuts, cuts])
        x = torch.cat([x, x + 1], 1)
    borders = st.lists(st.integers(-4, x.shape[1] + 4), max_size=4, unique=True).map(sorted)
    wanted = [[(b[i], b[i + 1]) for i in range(0, len(b) - 1, 2)] for b in (data.draw(borders) for _ in range(degree))]
    halo, shard = HaloExchange(1, cuts, wanted, 0.5), Shard(1, cuts)
    padded = torch.nn.functional.pad(x, (0, 0, 5, 5), value=0.5)
    rights = [torch.cat([padded[:, a + 5 : b + 5] for a, b in [(0, 0), *each]], 1) for each in wanted]
    back = torch.zeros_like(padded)
    for right, each in zip(rights, wanted, strict=True):
        at = 0
        for a, b in each:
            back[:, a + 5 : b + 5] += right[:, at : at + b - a].square()
            at += b - a
    whole = back[:, 5 : 5 + x.shape[1]]

    def work(axis: Any) -> None:
        own = torch.cat([x[:, a:b] for a, b in [(0, 0), *shard.ranges(axis.index)]], 1).requires_grad_()
        out = halo(axis, own)
        assert torch.equal(out, rights[axis.index])
        out.backward(out.detach().square())
        mine = torch.cat([whole[:, a:b] for a, b in [(0, 0), *shard.ranges(axis.index)]], 1)
        assert own.grad is not None
        torch.testing.assert_close(own.grad, mine, rtol=1e-12, atol=1e-12)

    on_threads(degree, work)
