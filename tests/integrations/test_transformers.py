"""``transformers.Trainer`` under a plan logs, saves and resumes what it does on one device."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from polylane.errors import PolylaneError
from polylane.integrations.transformers import REFUSED, PlanTrainer, PlanTrainingArguments
from polylane.runtime.workers.team import WorkerContext, fork_workers

LENGTH = 8
Numbers = list[dict[str, float]]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Sums of losses that the Trainer makes are of torch's default type."""
    transformers.logging.set_verbosity_error()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of the standard library's text, a character a token."""

    def __init__(self, start: int, count: int) -> None:
        text = inspect.getsource(inspect)[start : start + count * LENGTH]
        self.rows = torch.tensor([min(ord(letter), 127) for letter in text]).view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends: Any = {"bos_token_id": 0, "eos_token_id": 0}
    dropouts: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=4, n_layer=1, n_head=2, **dropouts, **ends)
    return GPT2LMHeadModel(config).double()


def cross_entropy(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """The model's own loss, but in float64: that computes in float32."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def count_right(prediction: Any) -> dict[str, float]:
    letters = prediction.predictions.argmax(-1)[:, :-1]
    return {"right": float((letters == prediction.label_ids[:, 1:]).mean())}


def train(trainer_class: Any, arguments_class: Any, folder: Path, **options: Any) -> tuple[Numbers, dict[str, Tensor]]:
    """Train with evaluation, checkpoints, accumulation, clipping and a schedule; return the log and the weights."""
    resume = options.pop("resume", None)
    arguments = arguments_class(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.01,
        warmup_steps=1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = trainer_class(
        model=build_model(),
        args=arguments,
        train_dataset=Text(0, 16),
        eval_dataset=Text(1000, 4),
        compute_loss_func=cross_entropy,
        compute_metrics=count_right,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    log = [
        {k: v for k, v in line.items() if "time" not in k and "second" not in k} for line in trainer.state.log_history
    ]
    return log, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def train_under(plan: str, folder: Path, **options: Any) -> list[tuple[Numbers, dict[str, Tensor]]]:
    def run(context: WorkerContext) -> tuple[Numbers, dict[str, Tensor]]:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "error", message=".*runs your own Python.*"
            )  # the model is captured, operator by operator
            return train(PlanTrainer, PlanTrainingArguments, folder, plan=plan, **options)

    return fork_workers(run, 2 if "2" in plan else 1)


def assert_equal(result: tuple[Numbers, dict[str, Tensor]], expected: tuple[Numbers, dict[str, Tensor]]) -> None:
    for line, expected_line in zip(result[0], expected[0], strict=True):
        assert line == pytest.approx(expected_line, rel=1e-9, abs=1e-11)
    for name, weight in expected[1].items():
        torch.testing.assert_close(result[1][name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("data=2", "tensor=2", "data=2,shard=parameters")),
    ],
)
def test_a_plan_trains_as_one_device_does(plan: str, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, transformers.TrainingArguments, tmp_path / "plain")
    for result in train_under(plan, tmp_path / "planned"):
        assert_equal(result, expected)
    files = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in tmp_path.iterdir()]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_plan_resumes_what_one_device_has_saved_and_the_other_way_round(tmp_path: Path) -> None:
    expected = train(transformers.Trainer, transformers.TrainingArguments, tmp_path / "plain")
    first = str(tmp_path / "plain" / "checkpoint-1")
    resumed = train(transformers.Trainer, transformers.TrainingArguments, tmp_path / "further", resume=first)
    for name, weight in expected[1].items():
        torch.testing.assert_close(resumed[1][name], weight, rtol=1e-12, atol=1e-13)
    for result in train_under("pipeline=2", tmp_path / "planned", resume=first):
        assert_equal(result, resumed)
    train_under("data=2,shard=parameters", tmp_path / "sharded")
    first = str(tmp_path / "sharded" / "checkpoint-1")
    result = train(transformers.Trainer, transformers.TrainingArguments, tmp_path / "after", resume=first)
    assert_equal(result, resumed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_says_is_no_argument(name: str, tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match=rf"{name}=1 is not for a Trainer under a plan: {re.escape(REFUSED[name])}"):
        PlanTrainingArguments(output_dir=str(tmp_path), plan="data=1", **{name: 1})


def test_a_trainer_takes_the_arguments_that_leave_workers_to_the_plan(tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match="PlanTrainer takes PlanTrainingArguments"):
        PlanTrainer(model=build_model(), args=transformers.TrainingArguments(output_dir=str(tmp_path)))
    trainer = PlanTrainer(model=build_model(), args=PlanTrainingArguments(output_dir=str(tmp_path), plan="data=1"))
    with pytest.raises(PolylaneError, match="each worker would draw trials of its own"):
        trainer.hyperparameter_search()
