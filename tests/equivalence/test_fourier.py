"""Networks that transform to frequencies and back: of features and places (FNet), and with learned modes (FNO)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.verify.verify import verify
from tests.support.workers.training import sgd

SAMPLES = 6


class Mixer(nn.Module):
    """Lee-Thorp et al., FNet, 2021: attention replaced by a transform over places and features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x + torch.fft.fftn(x, dim=(1, 2)).real)
        h = h + self.down(F.gelu(self.up(h)))
        return self.head(h.mean(1))


class Modes(nn.Module):
    """Li et al., Fourier Neural Operator, 2020: each of the lowest frequencies has a matrix of channels."""

    def __init__(self, kept: int = 3) -> None:
        super().__init__()
        self.lift, self.back, self.kept = nn.Linear(2, 4), nn.Linear(4, 3), kept
        self.modes = nn.Parameter(torch.randn(4, 4, kept, kept, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x).permute(0, 3, 1, 2)
        low = torch.fft.rfft2(h, norm="ortho")
        out = torch.zeros_like(low)
        out[:, :, : self.kept, : self.kept] = torch.einsum(
            "bixy,ioxy->boxy", low[:, :, : self.kept, : self.kept], self.modes
        )
        h = F.gelu(torch.fft.irfft2(out, s=h.shape[-2:], norm="ortho") + h)
        return self.back(h.mean((2, 3)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("plan", ["data=2,microbatches=2", "tensor=2"])
@pytest.mark.parametrize(("make", "shape"), [(Mixer, (5, 8)), (Modes, (8, 6, 2))])
def test_transforms_keep_samples_apart(make: Callable[[], nn.Module], shape: tuple[int, ...], plan: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, labels = torch.randn(SAMPLES, *shape, dtype=torch.float64), torch.arange(SAMPLES) % 3
    verdict = verify(model, build_objectives(loss, sgd, None)["loss"], [(x, labels)] * 2, plan)
    assert verdict.passed, verdict
