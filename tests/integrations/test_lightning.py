"""Lightning's Trainer under a plan logs, saves and resumes what it does on one device."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from polylane.errors import PolylaneError
from polylane.integrations.lightning import PlanStrategy
from polylane.runtime.workers.team import WorkerContext, fork_workers

PLANS = ["data=2", "pipeline=2", "tensor=2", "data=2,shard=parameters"]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Means that Lightning logs are of torch's default type."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def digits(start: int, count: int) -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x[start : start + count]) / 16, torch.tensor(y[start : start + count]))


class Classifier(LightningModule):
    """Layers, a metric, a parameter and a buffer of its own, which the steps compute with."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a BatchNorm has a gradient of zero, of which Adam would make its rounding errors' sign.
        self.net = nn.Sequential(nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        self.scale = nn.Parameter(torch.ones(10))
        self.register_buffer("shift", torch.zeros(10))
        self.accuracy = Accuracy("multiclass", num_classes=10)

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * self.scale

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Tensor]:
        x, y = batch
        output = self(x) - self.shift
        loss = F.cross_entropy(output, y) + 0.01 * self.net[0].weight.pow(2).sum()
        self.shift = 0.9 * self.shift + 0.1 * output.detach().mean(0)
        self.accuracy(output, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "best": output.argmax(1)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm())

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x) - self.shift, y))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Adversaries(LightningModule):
    """Two networks, whose optimizers the step calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 64))
        self.critic = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        of_generator, of_critic = self.optimizers()
        self.toggle_optimizer(of_critic)
        made = self.generator(torch.randn(len(batch[0]), 2))
        critic_loss = F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(made.detach())).mean()
        of_critic.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(of_critic, 0.5, "norm")
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.critic(self.generator(torch.randn(len(batch[0]), 2)))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"loss": loss, "critic_loss": critic_loss})

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.critic(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.critic
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]


class Closures(Classifier):
    """An optimizer that evaluates the loss as often as it likes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=2)


class Thawing(Classifier):
    """A part that is trained from a later epoch on, by parameters that the optimizer gets then."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Numbers(Callback):
    """Notes what the Trainer has logged, and the rate of each epoch."""

    def __init__(self) -> None:
        self.numbers = list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.numbers += [float(value.double().mean()) for value in (outputs or {}).values()]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.numbers += [float(value) for _, value in sorted(trainer.callback_metrics.items())]
        self.numbers += [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]


def train(
    folder: Path,
    resume: Path | None = None,
    module_class: Any = Classifier,
    callbacks: Any = (),
    epochs: int = 3,
    **options: Any,
) -> list[float]:
    """Train with validation, checkpoints and logs, then test the best; return what was logged, and weights."""
    seed_everything(0)
    module, numbers = module_class(), Numbers()
    best = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    stopping = EarlyStopping("val_loss", patience=0, min_delta=0.5)  # after two epochs, of three
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[numbers, best, stopping, LearningRateMonitor(), *callbacks],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    validation = DataLoader(digits(100, 12), batch_size=12)
    trainer.fit(module, DataLoader(digits(0, 48), batch_size=12, shuffle=True), validation, ckpt_path=resume)
    results = [*numbers.numbers, float(best.best_model_score), float(stopping.stopped_epoch)]
    results += [float(value.double().abs().sum()) for value in module.state_dict().values()]
    if module_class is Classifier:
        results += [trainer.test(module, validation, ckpt_path="best", verbose=False)[0]["test_loss"]]
        results += [float(Classifier.load_from_checkpoint(best.best_model_path)(digits(100, 4).tensors[0]).sum())]
    return results


def train_under(plan: str, folder: Path, *args: Any, **options: Any) -> list[list[float]]:
    def run(context: WorkerContext) -> list[float]:
        return train(folder, *args, strategy=PlanStrategy(plan), **options)

    return fork_workers(run, 2 if "2" in plan else 1)


def read_log(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "plan", [plan if plan == "tensor=2" else pytest.param(plan, marks=pytest.mark.slow) for plan in ["data=1", *PLANS]]
)
def test_a_plan_trains_as_one_device_does(plan: str, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain, planned = tmp_path / "plain", tmp_path / "planned"
    expected = train(plain, **options)
    for numbers in train_under(plan, planned, **options):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-10)
    assert sorted(p.name for p in planned.iterdir()) == sorted(p.name for p in plain.iterdir())
    rows, expected_rows = read_log(planned), read_log(plain)
    assert len(rows) == len(expected_rows) > 6
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("module_class", "options"),
    [
        (Adversaries, {}),
        (Closures, {}),
        (Classifier, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"}),
        (Classifier, {"precision": "64-true", "val_check_interval": 2, "limit_train_batches": 3}),
    ],
)
def test_optimizers_and_precisions_are_theirs(
    module_class: Any, options: dict[str, Any], plan: str, tmp_path: Path
) -> None:
    expected = train(tmp_path / "plain", module_class=module_class, **options)
    for numbers in train_under(plan, tmp_path / "planned", module_class=module_class, **options):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_averaged(plan: str, tmp_path: Path) -> None:
    def average() -> list[Any]:
        return [WeightAveraging(avg_fn=get_ema_avg_fn(0.9))]

    def run(context: WorkerContext) -> list[float]:
        return train(tmp_path / "planned", callbacks=average(), strategy=PlanStrategy(plan))

    expected = train(tmp_path / "plain", callbacks=average())
    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-10)


@pytest.mark.slow
def test_a_plan_resumes_what_one_device_has_saved_and_the_other_way_round(tmp_path: Path) -> None:
    train(tmp_path / "plain", epochs=1)
    first = tmp_path / "plain" / "last.ckpt"
    expected = train(tmp_path / "further", first)
    for numbers in train_under("data=2,shard=parameters", tmp_path / "planned", first):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-10)
    train_under("pipeline=2", tmp_path / "pipeline", epochs=1)
    assert train(tmp_path / "after", tmp_path / "pipeline" / "last.ckpt") == pytest.approx(
        expected, rel=1e-9, abs=1e-10
    )


class OfAnySize(Classifier):
    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(digits(0, 8), batch_size=self.batch_size)


def test_batch_sizes_are_said(tmp_path: Path) -> None:
    trainer = Trainer(
        strategy=PlanStrategy("data=1"), accelerator="cpu", callbacks=[BatchSizeFinder()], default_root_dir=tmp_path
    )
    with pytest.raises(PolylaneError, match=r"BatchSizeFinder is not for a Trainer under a plan.*: say batch_size"):
        trainer.fit(OfAnySize())


@pytest.mark.slow
def test_parameters_that_come_later_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match="further parameters after the training was prepared"):
        train(tmp_path, module_class=Thawing, callbacks=[BackboneFinetuning(1)], strategy=PlanStrategy("data=1"))


def test_without_a_plan_the_strategy_is_one_device(tmp_path: Path) -> None:
    expected = train(tmp_path / "plain")
    assert train(tmp_path / "strategy", strategy=PlanStrategy()) == expected
