"""Detection: batches of images of several sizes, with their boxes in dicts, train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.errors import PolylaneError
from tests.support.workers.training import assert_same, plainly, trained


class Detector(nn.Module):
    """Finds the mean box of each image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.box = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)
        self.double()

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.box(F.relu(self.features(image[None])).mean((2, 3)))
        return found


def by_image(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    losses = [F.l1_loss(model(i).expand_as(t["boxes"]), t["boxes"]) for i, t in zip(images, targets, strict=True)]
    return torch.stack(losses).mean()


def by_box(model: nn.Module, batch: Any) -> Tensor:
    """A mean over all boxes of the batch, however they are shared out over images."""
    images, targets = batch
    errors = [(model(i) - t["boxes"]).abs().flatten() for i, t in zip(images, targets, strict=True)]
    return torch.cat(errors).mean()


def by_counted_box(model: nn.Module, batch: Any) -> polylane.Mean:
    pairs = zip(batch["images"], batch["targets"], strict=True)
    errors = [(model(i) - t["boxes"]).abs().mean(1) for i, t in pairs]
    return polylane.Mean(torch.cat(errors).sum(), sum(len(each) for each in errors))


def make_batch(samples: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    images = [torch.randn(3, 6 + i % 3, 7, generator=g).double() for i in range(samples)]
    return images, [{"boxes": torch.rand(1 + i % 3, 4, generator=g).double(), "id": i} for i in range(samples)]


LOSSES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "image": (by_image, lambda batch: batch),
    "tuples": (by_image, lambda batch: tuple(map(tuple, batch))),
    "box": (by_box, lambda batch: (batch[0], batch[1])),
    "counted": (by_counted_box, lambda batch: dict(zip(("images", "targets"), batch, strict=True))),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("loss", "plan"),
    [
        ("image", "data=2"),
        ("tuples", "data=2,shard=parameters"),
        ("box", "data=2"),
        ("image", "data=2,per_sample=model,microbatches=2"),
        ("counted", "data=3,per_sample=model"),
        pytest.param("box", "data=3,shard=optimizer", marks=SLOW),
        pytest.param("counted", "data=2", marks=SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_replicas_train_as_one_device(loss: str, plan: str) -> None:
    function, form = LOSSES[loss]
    batches = [form(make_batch(samples, seed)) for seed, samples in enumerate((5, 6, 5))]
    model = Detector()
    expected = plainly(model, batches, loss=function)
    for found in trained(model, plan, batches, loss=function):
        assert_same(found, expected)


def test_what_couples_images_is_not_divided() -> None:
    function, form = LOSSES["box"]
    batches = [form(make_batch(6, 0))]
    with pytest.raises(PolylaneError, match="per_sample=model does not hold: the loss is not a mean over samples"):
        trained(Detector(), "data=2,per_sample=model", batches, loss=function)
