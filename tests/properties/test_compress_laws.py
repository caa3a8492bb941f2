"""Laws of compressed sums: nothing is lost, all ranks agree, and what leaves nothing out is the sum itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.program.program import GradientBucket
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor, orthonormalize_rows
from polylane.runtime.sync.compression.top_k import SAMPLED, TopKCompressor, find_largest
from tests.support import subsets
from tests.support.workers.compressed_sums import Tensors, residuals_of
from tests.support.workers.thread_transport import LocalTransport, run_local

law = settings(max_examples=subsets.examples(30), deadline=None)

# Gradients of a step: of parameters, of ranks.
Shares = list[list[Tensor]]

shapes = st.lists(
    st.sampled_from([(), (1,), (7,), (3, 5), (6, 9), (4, 2, 3, 3), (1, 8), (12, 5), (0, 3)]), min_size=1, max_size=4
)
fractions = st.sampled_from([0.001, 0.01, 0.1, 0.3, 0.5, 0.99, 1.0])
codecs = st.one_of(
    st.just(GradientCompressor),
    fractions.map(lambda fraction: lambda: TopKCompressor(fraction)),
    st.tuples(st.integers(1, 4), st.integers(0, 2)).map(lambda both: lambda: PowerSGDCompressor(*both)),
)


@st.composite
def trainings(draw: st.DrawFn) -> list[Shares]:
    """Shares by step, parameter and rank; some are zeros, some tie, some are far larger than others."""
    own, ranks, steps = draw(shapes), draw(st.integers(2, 4)), draw(st.integers(1, 4))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        torch.zeros_like,
        torch.sign,
        lambda x: x * 1e6,
        lambda x: x * 1e-12,
        lambda x: x.where(x > 1, torch.zeros(())),
    ]
    chosen = st.sampled_from(ways)
    return [
        [
            [draw(chosen)(torch.randn(shape, generator=random, dtype=torch.float64)) for _ in range(ranks)]
            for shape in own
        ]
        for _ in range(steps)
    ]


def summed(codec: Callable[[], GradientCompressor], steps: list[Shares]) -> list[tuple[list[list[Tensor]], Tensors]]:
    """Of every rank: the sums by step and parameter, and what the codec owes at the end."""
    names = tuple(f"w{i}" for i in range(len(steps[0])))
    ranks = len(steps[0][0])

    def work(transport: LocalTransport) -> tuple[list[list[Tensor]], Tensors]:
        parameters = {n: nn.Parameter(torch.zeros_like(w[0])) for n, w in zip(names, steps[0], strict=True)}
        own = codec()
        bucket = GradientBucket("stage0.0", tuple(range(ranks)), names)
        reducer, found = AllReducer([bucket], parameters, (), transport, own, range(ranks)), []
        for step in steps:
            reducer.begin_last_backward()
            for parameter, shares in zip(parameters.values(), step, strict=True):
                parameter.grad = shares[transport.rank].clone()
            reducer.launch_remaining()
            reducer.wait_bucket("stage0.0")
            found.append([parameter.grad.clone() for parameter in parameters.values() if parameter.grad is not None])
        return found, dict(residuals_of(own))

    return run_local(ranks, work)


@law
@given(codecs, trainings())
def test_what_was_sent_and_what_is_owed_is_all_there_was(
    codec: Callable[[], GradientCompressor], steps: list[Shares]
) -> None:
    runs = summed(codec, steps)
    for i, first in enumerate(steps[0]):
        entered = sum(sum(step[i]) for step in steps)
        scale = sum(float(share.abs().sum()) for step in steps for share in step[i])
        sent = sum(sums[i] for sums in runs[0][0])
        owed = sum(owed.get(f"w{i}", torch.zeros_like(first[0])) for _, owed in runs)
        torch.testing.assert_close(sent + owed, entered, rtol=0, atol=1e-12 * scale + 1e-300)


@law
@given(codecs, trainings())
def test_all_ranks_have_the_same_bits(codec: Callable[[], GradientCompressor], steps: list[Shares]) -> None:
    (first, _), *others = summed(codec, steps)
    for found, _ in others:
        for mine, theirs in zip(first, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@law
@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 1 << 30))
def test_powersgd_depends_on_the_sum_alone(rank: int, ranks: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    totals = [torch.randn(9, 11, generator=random, dtype=torch.float64) for _ in range(4)]
    shared = list[Shares]()
    for total in totals:
        parts = [torch.randn(9, 11, generator=random, dtype=torch.float64) for _ in range(ranks - 1)]
        shared.append([[*parts, total - sum(parts)]])
    alone = [[[total, torch.zeros_like(total)]] for total in totals]
    one, other = (
        summed(lambda: PowerSGDCompressor(rank), shared)[0][0],
        summed(lambda: PowerSGDCompressor(rank), alone)[0][0],
    )
    for (a,), (b,) in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@law
@given(trainings(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_a_wire_errs_by_a_unit_in_the_last_place(steps: list[Shares], dtype: torch.dtype) -> None:
    found = summed(lambda: HalfPrecisionCompressor(dtype), steps)[0][0]
    finfo = torch.finfo(dtype)
    for sums, step in zip(found, steps, strict=True):
        # float16 is scaled: what is 2^40 times smaller than the largest of the bucket is nothing beside it.
        largest = sum(max((float(share.abs().max()) for share in each if share.numel()), default=0.0) for each in step)
        least = 2**-39 * largest if dtype == torch.float16 else finfo.smallest_normal * finfo.eps
        for total, shares in zip(sums, step, strict=True):
            size = sum(share.abs() for share in shares)
            bound = finfo.eps * (1 + finfo.eps) * size + len(shares) * least
            assert bool(((total - sum(shares)).abs() <= bound).all())


@law
@given(trainings(), st.integers(-120, 120))
def test_a_power_of_two_passes_through_a_scaled_wire(steps: list[Shares], power: int) -> None:
    scaled = [[[share * 2.0**power for share in shares] for shares in step] for step in steps]
    plain, other = (summed(lambda: HalfPrecisionCompressor(torch.float16), each)[0][0] for each in (steps, scaled))
    for sums, others in zip(plain, other, strict=True):
        for a, b in zip(sums, others, strict=True):
            assert torch.equal(a * 2.0**power, b)


@law
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 1e300, float("inf"), float("nan")]), min_size=1),
    st.data(),
)
def test_the_largest_are_the_first_of_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    sizes = np.abs(np.array(values))
    sizes[np.isnan(sizes)] = np.inf
    expected = set(np.argsort(-sizes, kind="stable")[:count].tolist())
    places = find_largest(torch.tensor(values, dtype=torch.float64), count).tolist()
    assert len(places) == count and set(places) == expected


@pytest.mark.parametrize("kind", ["normal", "ties", "few", "sorted", "striped"])
@pytest.mark.parametrize("count", [1, 100, SAMPLED // 8, SAMPLED // 8 + 1, SAMPLED])
def test_the_largest_of_many_are_those_of_a_sort_as_well(kind: str, count: int) -> None:
    elements = SAMPLED + 4321
    random = torch.Generator().manual_seed(count)
    normal = torch.randn(elements, generator=random)
    vector = {
        "normal": normal,
        "ties": normal.mul(2).round(),
        "few": normal.where(torch.arange(elements) % 5000 == 7, torch.zeros(())),
        "sorted": normal.sort().values,
        "striped": normal.where(torch.arange(elements) % (elements // (1 << 13)) == 0, normal * 1e-3),
    }[kind]
    expected = np.argsort(-np.abs(vector.numpy()), kind="stable")[:count]
    assert sorted(find_largest(vector, count).tolist()) == sorted(expected.tolist())


@law
@given(st.integers(1, 5), st.integers(0, 7), st.integers(0, 1 << 30))
def test_orthogonal_rows_span_what_they_were_made_of(rows: int, more: int, seed: int) -> None:
    given_rows = torch.randn(rows, rows + more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = orthonormalize_rows(given_rows)
    torch.testing.assert_close(found @ found.T, torch.eye(rows, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(given_rows @ found.T @ found, given_rows, rtol=0, atol=1e-9)
