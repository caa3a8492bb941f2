"""Compressed sums of gradients are what their papers say: each against its definition, worked out in one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import ceil, frexp, ldexp

import numpy as np
import pytest
import torch
from torch import Tensor

from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor, saves_bytes
from polylane.runtime.sync.compression.top_k import TopKCompressor, take_largest
from tests.support.workers.compressed_sums import (
    KINDS,
    TOGETHER,
    Tensors,
    assert_alike,
    assert_close,
    by_hand,
    drawn,
    entries,
    matrix_sums,
    trained,
)

STEPS = 5


def plainly(shares: list[Tensors]) -> Tensors:
    return {name: sum(share[name] for share in shares) for name in shares[0]}


class PowerSGDByHand:
    """Algorithms 1 and 2 with matrices that are written out, orthogonalised by Gram and Schmidt's procedure."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.memories: dict[str, list[np.ndarray]] = {}
        self.right: dict[str, np.ndarray] = {}

    def __call__(self, shares: list[Tensors]) -> Tensors:
        found = plainly(shares)
        for name, total in found.items():
            rows, columns = total.shape[0], total[0].numel()
            if self.rank * (rows + columns) < rows * columns:
                parts = [share[name].reshape(rows, columns).numpy() for share in shares]
                found[name] = torch.from_numpy(self.matrix(name, parts)).view(total.shape)
        return found

    def matrix(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        if name not in self.right:
            random = torch.Generator().manual_seed(zlib.crc32(f"0 {name}".encode()))
            drawn = torch.randn(self.rank, parts[0].shape[1], generator=random, dtype=torch.float64)
            self.right[name] = drawn.numpy().T
        owed = self.memories.get(name, [np.zeros_like(part) for part in parts])
        wholes = [part + memory for part, memory in zip(parts, owed, strict=True)]
        left = gram_schmidt(sum(whole @ self.right[name] for whole in wholes))
        rights = [whole.T @ left for whole in wholes]
        self.memories[name] = [whole - left @ right.T for whole, right in zip(wholes, rights, strict=True)]
        self.right[name] = sum(rights)
        return left @ self.right[name].T


def gram_schmidt(matrix: np.ndarray) -> np.ndarray:
    done = list[np.ndarray]()
    for column in matrix.T:
        for _ in range(2):  # twice is enough
            for other in done:
                column = column - (other @ column) * other
        done.append(column / np.linalg.norm(column))
    return np.stack(done, axis=1)


class TopKByHand:
    """Every rank's largest entries by a stable sort of all of them."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.memories: dict[str, list[np.ndarray]] = {}

    def __call__(self, shares: list[Tensors]) -> Tensors:
        found: Tensors = {}
        for name in shares[0]:
            parts = [share[name].flatten().numpy() for share in shares]
            owed = self.memories.get(name, [np.zeros_like(part) for part in parts])
            wholes = [part + memory for part, memory in zip(parts, owed, strict=True)]
            total, self.memories[name] = np.zeros_like(parts[0]), []
            for whole in wholes:
                chosen = np.argsort(-np.abs(whole), kind="stable")[: entries(self.fraction, len(whole))]
                left = whole.copy()
                left[chosen] = 0.0
                self.memories[name].append(left)
                total += whole - left
            found[name] = torch.from_numpy(total).view(shares[0][name].shape)
        return found


def rounded(dtype: torch.dtype) -> Callable[[list[Tensors]], Tensors]:
    """Each share rounded, and sums of more than two; in float16 scaled by a power of two for each message."""
    once = scaled_and_rounded if dtype == torch.float16 else lambda numbers: numbers.to(dtype).to(numbers.dtype)

    def rule(shares: list[Tensors]) -> Tensors:
        found: Tensors = {}
        for names in TOGETHER if "w" not in shares[0] else [("w",)]:
            vectors = [torch.cat([share[name].flatten() for name in names]) for share in shares]
            part = ceil(len(vectors[0]) / len(shares)) if len(shares) > 2 else len(vectors[0])
            sums = [sum(map(once, pieces)) for pieces in zip(*(vector.split(part) for vector in vectors), strict=True)]
            total = torch.cat([once(each) for each in sums] if len(shares) > 2 else sums)
            sizes = [shares[0][name].numel() for name in names]
            for name, piece in zip(names, total.split(sizes), strict=True):
                found[name] = piece.view(shares[0][name].shape)
        return found

    return rule


def scaled_and_rounded(numbers: Tensor) -> Tensor:
    """As IEEE's half precision would round them if it had room: the largest finite one is brought to 2^14 to 2^15."""
    sizes = numbers[numbers.isfinite()].abs().tolist()
    power = 15 - frexp(max(sizes))[1] if sizes else 0
    half = torch.tensor([ldexp(number, power) for number in numbers.tolist()], dtype=numbers.dtype).half()
    return torch.tensor([ldexp(number, -power) for number in half.tolist()], dtype=numbers.dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_is_its_algorithm(rank: int, ranks: int) -> None:
    hand = PowerSGDByHand(rank)
    runs = trained(lambda: PowerSGDCompressor(rank), ranks, STEPS)
    assert_close(runs[0].sums, by_hand(hand, ranks, STEPS))
    assert_alike(runs)
    compressed = {"conv.weight", "first.weight", "second.weight"} | ({"head.weight"} if rank == 1 else set())
    for k, run in enumerate(runs):
        assert run.memories[-1].keys() == compressed
        for name, memory in run.memories[-1].items():
            np.testing.assert_allclose(memory.flatten(1).numpy(), hand.memories[name][k], rtol=0, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_top_k_is_its_algorithm(fraction: float, ranks: int) -> None:
    hand = TopKByHand(fraction)
    runs = trained(lambda: TopKCompressor(fraction), ranks, STEPS)
    assert_close(runs[0].sums, by_hand(hand, ranks, STEPS))
    assert_alike(runs)
    for k, run in enumerate(runs):
        for name, memory in run.memories[-1].items():
            np.testing.assert_allclose(memory.flatten().numpy(), hand.memories[name][k], rtol=0, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wire_rounds_every_share_and_the_sums_of_more_than_two(dtype: torch.dtype, ranks: int) -> None:
    runs = trained(lambda: HalfPrecisionCompressor(dtype), ranks, STEPS)
    assert_close(runs[0].sums, by_hand(rounded(dtype), ranks, STEPS))
    assert_alike(runs)


WIDE = {
    "far beyond the range": lambda x: x * 1e6,
    "far below it": lambda x: x * 1e-8,
    "mixed": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) % 3 == 0, x * 1e6, x * 1e-2),
    "unlike": lambda x: x * 10 ** torch.linspace(-12, 12, x.numel(), dtype=torch.float64).view(x.shape).to(x.dtype),
    "at the end of float32": lambda x: x.clamp(-1, 1) * 1e38,
    "smaller than any normal number": lambda x: x * 1e-42,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", WIDE)
def test_float16_is_scaled_so_that_no_size_of_gradients_is_lost(kind: str, dtype: torch.dtype, ranks: int) -> None:
    shares = [WIDE[kind](drawn(rank, 9, 12).to(dtype)) for rank in range(ranks)]
    expected = rounded(torch.float16)([{"w": share.double()} for share in shares])["w"].to(dtype)
    runs = matrix_sums(lambda: HalfPrecisionCompressor(torch.float16), [shares])
    for run in runs:
        assert torch.equal(run.sums[0]["w"], runs[0].sums[0]["w"])
        found = run.sums[0]["w"]
        assert found.isfinite().all()
        peak = float(expected.double().abs().max())
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-7 * peak)
        total, size = sum(shares).double(), sum(share.double().abs() for share in shares)
        bound = 2**-11 * (1 + 2**-11) * size * (2 if ranks > 2 else 1) + ranks * 2**-39 * float(size.max()) + 1e-44
        assert bool(((found.double() - total).abs() <= bound).all())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("trouble", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_on_a_wire_and_touches_nothing_else(trouble: float, ranks: int) -> None:
    fine = [1e6 * drawn(rank, 9, 12).float() for rank in range(ranks)]
    wrong = [fine[0].clone(), *fine[1:]]
    wrong[0][4, 5] = trouble
    for run in matrix_sums(lambda: HalfPrecisionCompressor(torch.float16), [fine, wrong]):
        before, after = (seen["w"] for seen in run.sums)
        assert torch.equal(after[4, 5].isnan(), torch.tensor(trouble != trouble))
        assert not after[4, 5].isfinite() and (trouble != trouble or after[4, 5] == trouble)
        after[4, 5] = before[4, 5]
        torch.testing.assert_close(after, before, rtol=2**-10, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_nothing_to_send_and_loses_nothing(kind: str) -> None:
    (run,) = trained(KINDS[kind], 1, STEPS)
    assert_close(run.sums, by_hand(plainly, 1, STEPS))
    assert run.given == [0] * STEPS


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "codec",
    [
        GradientCompressor,
        lambda: TopKCompressor(1.0),
        lambda: PowerSGDCompressor(5),
        lambda: PowerSGDCompressor(1, start=STEPS),
    ],
)
def test_what_leaves_nothing_out_is_the_plain_sum(codec: Callable[[], GradientCompressor], ranks: int) -> None:
    runs = trained(codec, ranks, STEPS)
    hand = PowerSGDByHand(5) if isinstance(codec(), PowerSGDCompressor) and codec().rank == 5 else plainly
    assert_close(runs[0].sums, by_hand(hand, ranks, STEPS))
    assert_alike(runs)


def test_powersgd_loses_nothing_of_a_sum_of_low_rank() -> None:
    left, right = drawn(0, 9, 3), drawn(1, 3, 12)
    noise = drawn(2, 9, 12)
    shares = [[left @ right - noise, noise]]  # each of full rank, the sum of rank 3
    for run in matrix_sums(lambda: PowerSGDCompressor(3), shares):
        torch.testing.assert_close(run.sums[0]["w"], left @ right, rtol=0, atol=1e-9)


def test_powersgd_finds_its_directions_again_after_steps_without_gradient() -> None:
    zero, later = torch.zeros(9, 12, dtype=torch.float64), drawn(0, 9, 2) @ drawn(1, 2, 12)
    steps = [[zero, zero], [zero, zero], *([[later, later]] * 4)]
    sums = [seen["w"] for seen in matrix_sums(lambda: PowerSGDCompressor(2), steps)[0].sums]
    assert not sums[0].any() and not sums[1].any()
    owed = 8 * later - sum(sums)
    assert owed.norm() < 1e-9 * later.norm()


def test_powersgd_takes_its_first_steps_plainly() -> None:
    plain, late = trained(GradientCompressor, 2, 5), trained(lambda: PowerSGDCompressor(1, start=3), 2, 5)
    for step in range(3):
        assert all(torch.equal(plain[0].sums[step][name], late[0].sums[step][name]) for name in plain[0].sums[step])
        assert not late[0].memories[step]
    assert late[0].memories[3] and not torch.equal(plain[0].sums[3]["first.weight"], late[0].sums[3]["first.weight"])


@pytest.mark.parametrize("kind", ["powersgd", "top_k"])
@pytest.mark.parametrize("trouble", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_arrives_everywhere_and_is_forgotten(kind: str, trouble: float) -> None:
    fine = [drawn(0, 9, 12), drawn(1, 9, 12)]
    wrong = [fine[0].clone(), fine[1]]
    wrong[0][4, 5] = trouble
    for run in matrix_sums(KINDS[kind], [fine, wrong, fine, fine]):
        sums = [seen["w"] for seen in run.sums]
        assert [bool(total.isfinite().all()) for total in sums] == [True, False, True, True]
        # Before the next step, whose gradients are finite.
        assert all(memory["w"].isfinite().all() for memory in (run.memories[0], *run.memories[2:]) if memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*KINDS, "float16"])
def test_parameters_of_other_types(kind: str, dtype: torch.dtype) -> None:
    runs = trained(KINDS.get(kind, lambda: HalfPrecisionCompressor(torch.float16)), 3, 3, dtype)
    assert_alike(runs)
    assert all(total.dtype == dtype and total.isfinite().all() for total in runs[0].sums[-1].values())
    assert all(memory.dtype == torch.float32 for memory in runs[0].memories[-1].values())
    if dtype != torch.float32 and kind == "float16":
        plain = trained(GradientCompressor, 3, 3, dtype)
        assert all(torch.equal(runs[0].sums[0][n], plain[0].sums[0][n]) for n in plain[0].sums[0])


def test_top_k_in_half_precision_remembers_what_rounding_cuts_off() -> None:
    owed = drawn(0, 40).float()
    before = owed.clone()
    pick = take_largest(owed, 10, torch.bfloat16)
    sent = torch.zeros(40).index_add_(0, pick.positions, pick.values.float())
    assert torch.equal(sent + owed, before) and pick.values.dtype == torch.bfloat16
    assert 0 < float(owed[pick.positions].abs().max()) < 2**-8 * float(before.abs().max())
    pick.restore_residual()
    assert torch.equal(owed, before)


def test_a_wire_narrows_and_never_trades_range() -> None:
    shares = [[torch.full((3, 4), 1e6, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16)]]
    for run in matrix_sums(lambda: HalfPrecisionCompressor(torch.float16), shares):
        assert torch.equal(run.sums[0]["w"], shares[0][0])


@pytest.mark.parametrize(
    "shape, dtype, rank, worth",
    [
        ((4, 4), torch.float64, 2, False),
        ((3, 7), torch.float64, 2, True),
        ((3, 1, 7), torch.float32, 2, True),
        ((3, 7), torch.bfloat16, 1, True),
        ((3, 6), torch.bfloat16, 1, False),
        ((100,), torch.float32, 1, False),
        ((), torch.float32, 1, False),
        ((0, 3), torch.float32, 1, False),
    ],
)
def test_a_matrix_is_compressed_where_that_takes_fewer_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, rank: int, worth: bool
) -> None:
    assert saves_bytes(torch.Size(shape), dtype, rank) == worth
