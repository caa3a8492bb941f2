"""Metrics over a test set are those of a plain loop on one device, under every kind of plan, with ragged batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassJaccardIndex,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef
from torchmetrics.text import Perplexity

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.graph.capture.output_request import BadOutputs
from polylane.recipe import Mean
from polylane.runtime.job import Job
from polylane.runtime.workers.team import WorkerContext, fork_workers

SAMPLES, BATCH = 23, 7  # the last batch has two samples: fewer than three replicas
PLANS = [
    "data=2",
    "pipeline=2",
    "tensor=2",
    "data=2,pipeline=2",
    "data=2,shard=parameters",
    "pipeline=2,schedule=interleaved,chunks=2,microbatches=2",
    "data=3",
    "data=2,microbatches=3",
]


class BatchMeans(Metric):
    """A mean of means over batches, which declares sums: no sum over parts of a batch gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("batches", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += values.mean()
        self.batches += 1

    def compute(self) -> Tensor:
        return self.total / self.batches


class RowsInOrder(Metric):
    """The alternating sum of all rows: it depends on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.rows.append(values)

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return (rows * torch.linspace(-1, 1, len(rows), dtype=rows.dtype)).sum()


class Count(Metric):
    """The number of samples that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.samples += len(values)

    def compute(self) -> Tensor:
        return self.samples


@dataclass(frozen=True)
class Evaluated:
    """A model with its test set, its loss and its metrics."""

    model: Callable[[], nn.Module]
    data: Callable[[], list[Any]]
    loss: Callable[[nn.Module, Any], Any]
    metrics: Callable[[nn.Module, Any], dict[str, Any]]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 4)
    ).double()


def labelled() -> list[Any]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, generator=random).double(), torch.randint(0, 4, (), generator=random)) for _ in range(SAMPLES)
    ]


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


F1, AUC = MulticlassF1Score(4, average="macro"), MulticlassAUROC(4)
SEVERAL = MetricCollection({"macro": MulticlassAccuracy(4), "micro": MulticlassAccuracy(4, average="micro")})
PEARSON, RMSE = PearsonCorrCoef().set_dtype(torch.float64), MeanSquaredError().set_dtype(torch.float64)
LARGEST, AVERAGE = MaxMetric().set_dtype(torch.float64), MeanMetric().set_dtype(torch.float64)
UNEVEN, ORDERED, COUNT = BatchMeans(), RowsInOrder(), Count()


def class_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits, labels = model(batch[0]), batch[1]
    choices, probabilities = logits.argmax(-1), logits.softmax(-1)
    hits = choices == labels
    first = labels == 0
    return {
        "accuracy": hits,
        "accuracy_mean": hits.double().mean(),
        "accuracy_of_first": Mean((hits & first).sum(), first.sum()),
        "samples_each": Mean(hits.new_ones(len(hits), dtype=torch.float64).sum(), len(hits)),
        "logits": logits,
        "f1": (F1, choices, labels),
        "auc": (AUC, probabilities, labels),
        "several": (SEVERAL, choices, labels),
        "pearson": (PEARSON, logits[:, 0], logits[:, 1]),
        "error": (RMSE, logits[:, 0], labels.double()),
        "largest": (LARGEST, logits[:, 2]),
        "average": (AVERAGE, logits[:, 3]),
        "uneven": (UNEVEN, logits[:, 1]),
        "ordered": (ORDERED, logits[:, 2]),
        "count": (COUNT, labels),
    }


class Words(nn.Module):
    """A language model over a vocabulary of 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def texts() -> list[Any]:
    random = torch.Generator().manual_seed(2)
    lines = [torch.randint(0, 12, (6,), generator=random) for _ in range(SAMPLES)]
    lengths = torch.randint(2, 7, (SAMPLES,), generator=random)
    # What is behind a text's end is ignored: token 0.
    return [torch.where(torch.arange(6) < length, line, 0) for line, length in zip(lines, lengths, strict=True)]


def next_token(model: nn.Module, batch: Any) -> Mean:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return Mean(losses, (targets != 0).sum())


PERPLEXITY = Perplexity(ignore_index=0).set_dtype(torch.float64)


def text_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    counted = targets != 0
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return {
        "perplexity": (PERPLEXITY, logits, targets),
        "entropy": Mean(entropy, counted.sum()),
        "accuracy": Mean(((logits.argmax(-1) == targets) & counted).sum(), counted.sum()),
    }


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)).double()


def pictures() -> list[Any]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, 5, 5, generator=random).double(), torch.randint(0, 4, (5, 5), generator=random))
        for _ in range(SAMPLES)
    ]


IOU = MulticlassJaccardIndex(4)


def picture_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    with torch.no_grad():
        choices = model(batch[0]).argmax(1)
    return {"iou": (IOU, choices, batch[1]), "pixels": (choices == batch[1]).double()}


class Uncaptured(nn.Module):
    """A layer that export cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        sign = 1.0 if float(x.detach().numpy().shape[1]) > 0 else -1.0
        return torch.tanh(self.linear(x)) * sign


def uncaptured() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Uncaptured(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def leaf_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    choices = model(batch[0]).argmax(-1)
    return {"accuracy": choices == batch[1], "f1": (F1, choices, batch[1])}


CASES = {
    "classes": Evaluated(classifier, labelled, classify, class_metrics),
    "texts": Evaluated(lambda: Words().double(), texts, next_token, text_metrics),
    "pictures": Evaluated(segmenter, pictures, classify, picture_metrics),
}


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def evaluate_plainly(case: Evaluated, merge: Callable[[list[Any]], Any] = collate) -> dict[str, float]:
    """Return loss and metrics of a loop in one process, as its user would write it."""
    model, samples = case.model().eval(), case.data()
    sums, objects, total, count = dict[str, list[float]](), dict[str, Any](), 0.0, 0.0
    with torch.no_grad():
        for start in range(0, len(samples), BATCH):
            batch = merge(samples[start : start + BATCH])
            size = min(BATCH, len(samples) - start)
            loss = case.loss(model, batch)
            total += float(loss.total) if isinstance(loss, Mean) else float(loss) * size
            count += float(loss.count) if isinstance(loss, Mean) else size
            for name, value in case.metrics(model, batch).items():
                if isinstance(value, tuple):
                    value[0].update(*value[1:])
                    objects[name] = value[0]
                    continue
                if isinstance(value, Mean):
                    pair = float(value.total), float(value.count)
                else:
                    pair = (float(value.double().sum()), value.numel()) if value.dim() else (float(value) * size, size)
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0, 0.0]), pair, strict=True)]
    values = {name: a / b for name, (a, b) in sums.items()}
    for name, metric in objects.items():
        computed = metric.compute()
        values |= computed if isinstance(computed, dict) else {name: computed}
        metric.reset()
    return {"loss": total / count, **{name: float(value) for name, value in values.items()}}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1)


def evaluate_under(case: Evaluated, plan: str) -> list[dict[str, float]]:
    example = collate(case.data()[:BATCH])
    problem = TrainingProblem(case.model(), build_objectives(case.loss, sgd, None, case.metrics), example)
    compiled = compile_training(problem, plan, evaluation=True)

    def run(context: WorkerContext) -> dict[str, float]:
        with Job(compiled, context.world, example=example) as job:
            assert job.evaluate(example) > 0
            return job.evaluate_dataset(case.data(), BATCH)

    return fork_workers(run, compiled.plan.processes)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_a_plain_loop(name: str, plan: str) -> None:
    check_metrics(name, CASES[name], plan)


@pytest.mark.parametrize("plan", ["data=2,servers=1", "data=2,servers=1,staleness=1", "pipeline=2,schedule=pipedream"])
def test_metrics_of_other_rules_are_those_of_a_plain_loop(plan: str) -> None:
    check_metrics("classes", CASES["classes"], plan)


@pytest.mark.parametrize("plan", ["data=1", "pipeline=2,microbatches=1", "data=3,per_sample=0"])
def test_metrics_behind_a_module_that_is_kept_whole(plan: str) -> None:
    check_metrics("leaf", Evaluated(uncaptured, labelled, classify, leaf_metrics), plan)


def check_metrics(name: str, case: Evaluated, plan: str) -> None:
    expected, results = evaluate_plainly(case), evaluate_under(case, plan)
    assert all(result == results[0] for result in results)  # to the last bit, or a decision would differ
    assert results[0].keys() == expected.keys()
    for key, value in expected.items():
        assert math.isclose(results[0][key], value, rel_tol=1e-12, abs_tol=1e-12), key
    if name == "classes":
        assert results[0]["count"] == SAMPLES


@pytest.mark.parametrize("name", CASES)
def test_loss_and_metrics_share_one_forward_pass(name: str) -> None:
    case = CASES[name]
    objectives = build_objectives(case.loss, sgd, None, case.metrics)
    problem = TrainingProblem(case.model(), objectives, collate(case.data()[:BATCH]))
    graph = compile_training(problem, "data=1", evaluation=True).evaluations["loss"].partition.graph
    alone = compile_training(replace_metrics(problem), "data=1", evaluation=True).evaluations["loss"].partition.graph
    weighted = [node.name for node in graph.nodes if node.parameters]
    assert weighted == [node.name for node in alone.nodes if node.parameters]


def replace_metrics(problem: TrainingProblem) -> TrainingProblem:
    objectives = {name: replace(objective, metrics=None) for name, objective in problem.objectives.items()}
    return replace(problem, objectives=objectives)


def mean_of_first(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"of_first": model(batch[0])[batch[1] == 0].mean()}


def total_that_is_a_mean(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"mean": Mean(model(batch[0]).square().mean(), len(batch[0]))}


def per_class(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"per_class": model(batch[0]).cumsum(0)}


def wrong_targets(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"f1": (F1, model(batch[0]).argmax(-1), batch[1] + 3)}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (mean_of_first, "of_first is a scalar that is not known to be a mean over the samples"),
        (total_that_is_a_mean, "total and count of mean must be sums over the samples"),
        (per_class, "it is not known that each element of per_class belongs to one sample"),
        (wrong_targets, r"metrics: f1.update\(...\) raised"),
    ],
)
def test_what_is_no_metric_over_samples_is_refused_on_all_workers(metrics: Any, words: str) -> None:
    case = CASES["classes"]
    example = collate(case.data()[:BATCH])
    problem = TrainingProblem(case.model(), build_objectives(case.loss, sgd, None, metrics), example)
    compiled = compile_training(problem, "data=2")

    def run(context: WorkerContext) -> str:
        with Job(compiled, context.world, example=example) as job:
            with pytest.raises(PolylaneError, match=words) as raised:
                job.evaluate_dataset(case.data(), BATCH)
            return str(raised.value)

    first, second = fork_workers(run, 2)
    assert first == second


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, "x is of type float"),
        (F1, "x is a metric without what it is updated with"),
        ((F1, 3), "x has a metric that is updated with no tensor"),
        (Mean(torch.ones(3), 3), "the total of x must be a real scalar tensor"),
        (Mean(torch.ones(()), torch.ones(3)), "the count of x must be a scalar"),
    ],
)
def test_values_of_another_kind_are_refused(value: Any, words: str) -> None:
    case = CASES["classes"]
    objectives = build_objectives(case.loss, sgd, None, lambda model, batch: {"x": value})
    problem = TrainingProblem(case.model(), objectives, collate(case.data()[:BATCH]))
    with pytest.raises(BadOutputs, match=words):
        compile_training(problem, "data=1", evaluation=True)


def test_metrics_that_fail_are_named() -> None:
    case = CASES["classes"]
    objectives = build_objectives(case.loss, sgd, None, lambda model, batch: {"x": model(batch[0]) @ batch[0]})
    problem = TrainingProblem(case.model(), objectives, collate(case.data()[:BATCH]))
    with pytest.raises(PolylaneError, match=r"^metrics\(model, batch\) fails .*test_metrics.py:\d+"):
        compile_training(problem, "data=1", evaluation=True)


def test_a_metric_object_is_not_changed_by_an_evaluation() -> None:
    COUNT.reset()
    COUNT.update(torch.ones(5))
    evaluate_under(CASES["classes"], "data=2")
    assert COUNT.compute() == 5
    COUNT.reset()


@pytest.mark.parametrize("plan", ["data=3,microbatches=1", "data=2,pipeline=2,microbatches=1"])
def test_every_sample_counts_once_whatever_the_sizes(plan: str) -> None:
    samples = labelled()
    example = collate(samples[:BATCH])

    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"count": (COUNT, batch[1]), "mean": batch[0][:, 0], "ordered": (ORDERED, batch[0][:, 1])}

    problem = TrainingProblem(classifier(), build_objectives(classify, sgd, None, metrics), example)
    compiled = compile_training(problem, plan, evaluation=True)
    sizes = [(size, batch) for size in range(1, 12) for batch in (1, 2, 3, 5)]

    def run(context: WorkerContext) -> list[dict[str, float]]:
        with Job(compiled, context.world, example=example) as job:
            return [job.evaluate_dataset(samples[:size], batch) for size, batch in sizes]

    for results in fork_workers(run, compiled.plan.processes):
        for (size, _), values in zip(sizes, results, strict=True):
            rows = torch.stack([x for x, _ in samples[:size]])
            assert values["count"] == size
            assert math.isclose(values["mean"], float(rows[:, 0].mean()), rel_tol=1e-12)
            ordered = RowsInOrder()
            ordered.update(rows[:, 1])
            assert math.isclose(values["ordered"], float(ordered.compute()), rel_tol=1e-12, abs_tol=1e-12)


def pad(lines: list[Tensor]) -> Tensor:
    """A batch of texts as long as the longest of them: 0 is ignored."""
    return nn.utils.rnn.pad_sequence(lines, batch_first=True)


@pytest.mark.parametrize("plan", ["data=1", "data=2", "pipeline=2,microbatches=1"])
def test_texts_of_many_lengths_count_as_in_a_plain_loop(plan: str) -> None:
    case, lines = CASES["texts"], [line[line != 0] if (line != 0).sum() > 2 else line[:3] for line in texts()]
    expected = evaluate_plainly(replace(case, data=lambda: lines), pad)
    example = pad(lines[:BATCH])
    problem = TrainingProblem(case.model(), build_objectives(case.loss, sgd, None, case.metrics), example)
    compiled = compile_training(problem, plan)

    def run(context: WorkerContext) -> dict[str, float]:
        with Job(compiled, context.world, example=example) as job:
            return job.evaluate_dataset(lines, BATCH, collate=pad)

    for values in fork_workers(run, compiled.plan.processes):
        for key, value in expected.items():
            assert math.isclose(values[key], value, rel_tol=1e-12, abs_tol=1e-12), key


def test_what_draws_runs_for_each_call() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(F.dropout(torch.tanh(x), 0.5, training=True))

    objectives = build_objectives(
        classify, sgd, None, lambda model, batch: {"hits": model(batch[0]).argmax(1) == batch[1]}
    )
    problem = TrainingProblem(Noisy().double(), objectives, collate(labelled()[:BATCH]))
    graph = compile_training(problem, "data=1", evaluation=True).evaluations["loss"].partition.graph
    operators = [node.op for node in graph.nodes]
    assert operators.count("aten.tanh.default") == 1
    assert sum("dropout" in operator for operator in operators) == 2
    assert operators.count("aten.linear.default") == 2
