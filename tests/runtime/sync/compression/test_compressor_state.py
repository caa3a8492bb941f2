"""What codecs remember between steps, and what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.plan.spec import parse
from polylane.plan.sync import SUM
from polylane.runtime.job import Job
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor
from polylane.runtime.sync.compression.top_k import TopKCompressor
from polylane.runtime.sync.objective_update import choose_compressor
from tests.support.workers.compressed_sums import Tensors, copied, residuals_of
from tests.support.workers.training import plainly, workers


def test_a_plans_sync_makes_a_codec() -> None:
    weight = {"w": torch.zeros(1)}
    assert type(choose_compressor(SUM, weight)) is GradientCompressor
    half = [choose_compressor(parse(f"data=2,wire={name}").sync, weight) for name in ("bfloat16", "float16")]
    assert [own.dtype for own in half if isinstance(own, HalfPrecisionCompressor)] == [torch.bfloat16, torch.float16]
    power, top = (
        choose_compressor(parse(f"data=2,compress={words}").sync, weight) for words in ("powersgd:3:7", "top_k:1")
    )
    assert isinstance(power, PowerSGDCompressor) and (power.rank, power.start) == (3, 7)
    assert isinstance(top, TopKCompressor) and top.fraction == 1
    assert type(choose_compressor(SUM, {"w": torch.zeros(1, dtype=torch.complex64)})) is GradientCompressor


@pytest.mark.parametrize(
    ("words", "dtype", "said"),
    [
        ("wire=bfloat16", torch.complex64, "sync.wire takes gradients of real.* of w is torch.complex64: leave"),
        ("compress=top_k:0.1", torch.int32, "sync.compress takes gradients of real.* of w is torch.int32: leave"),
        ("compress=powersgd:2", torch.complex128, "sync.compress takes gradients of real.* of w is torch.complex128"),
    ],
)
def test_gradients_that_are_no_real_numbers_are_refused(words: str, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(PolylaneError, match=said):
        choose_compressor(parse(f"data=2,{words}").sync, {"w": torch.zeros(2, dtype=dtype)})


LENGTHS = [(8, 3), (8, 5), (3, 3), (7, 5), (3, 4), (8, 3)]  # samples, and rows of each
PARTS = [2, 2, 1, 2, 1, 2]  # microbatches: of one sample the model has no variance


class Sequences(nn.Module):
    """Takes sequences of any length, and no single one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.norm(torch.tanh(self.inner(x)).mean(1)))
        return y


def sequences() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, length, 6, generator=random, dtype=torch.float64), torch.randint(0, 10, (n,), generator=random))
        for n, length in LENGTHS
    ]


def still(parameters: Any) -> torch.optim.Optimizer:
    """Leaves the weights as they are, so that what every batch's gradient is does not hang on what was sent."""
    return torch.optim.SGD([p for _, p in parameters], lr=0.0)


@pytest.mark.parametrize("words", ["top_k:0.1", "powersgd:1:2"])
def test_what_one_form_of_batches_leaves_out_travels_with_another(words: str) -> None:
    """Of every form, and of batches of fewer microbatches: sums that came back + memories = sum of the gradients."""

    def work(job: Job) -> tuple[list[Tensors], Any, int]:
        sums = list[Tensors]()
        for batch in sequences():
            job.step(batch)
            sums.append(copied({name: g for name, g in job.gradients().items() if g is not None}))
        update = job._role._updates["loss"]
        return sums, update.compressor, len(job._role._cache)

    torch.manual_seed(0)
    model = Sequences().double()
    plan, example = f"data=2,microbatches=2,compress={words}", sequences()[0]
    runs = workers(work, model, plan, optimizer=still, example=example)
    steps = [
        plainly(model, [batch], optimizer=still, microbatches=parts).gradients
        for batch, parts in zip(sequences(), PARTS, strict=True)
    ]
    assert runs[0][2] == 2  # the example's graph and one of any length, whatever the number of microbatches
    for name in steps[0]:
        entered = sum(step[name] for step in steps)
        came = sum(step[name] for step in runs[0][0])
        owed = sum(residuals_of(codec).get(name, torch.zeros(())) for _, codec, _ in runs)
        torch.testing.assert_close(came + owed, entered, rtol=0, atol=1e-9)
        compressed = words.startswith("top_k") or entered.dim() == 2
        assert torch.allclose(came, entered, rtol=0, atol=1e-9) != compressed
    if "powersgd" in words:  # the first two steps, of whatever form, are plain
        pairs = zip(runs[0][0], steps, strict=True)
        plain = [all(torch.allclose(seen[name], step[name]) for name in step) for seen, step in pairs]
        assert plain == [True, True, False, False, False, False] and runs[0][1]._steps == len(steps)
