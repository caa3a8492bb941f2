"""Metrics proof: a recipe's metrics by the plan, against a plain loop over the same batches in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from polylane.errors import PolylaneError, describe_error
from polylane.graph.batch import clone_leaves, flatten, sample_count, take_first_samples
from polylane.graph.capture.output_request import MetricForm, OutputRequest
from polylane.graph.precision import Promoted
from polylane.runtime.evaluation.object_states import copy_metric, list_numbers
from polylane.verify.record import ComparedTraining
from polylane.verify.worker_runs import run_on_workers


@dataclass(frozen=True)
class ComparedMetric:
    """One metric on both sides.

    Attributes:
        name: name of the metric.
        reference: its value in a plain loop in one process.
        plan: its value by the plan.
        error: difference, relative to the reference where that is larger than 1; infinite where one is missing.
    """

    name: str
    reference: float
    plan: float
    error: float


def compare_metrics(training: ComparedTraining, run_alone: Callable[[Callable[[], Any]], Any]) -> list[ComparedMetric]:
    """Evaluate the first objective's metrics on both sides, with the weights that the model has at first.

    The batches are those of the proof, and a last one with fewer samples than there are replicas.

    Args:
        training: the training that is compared; its model is not changed.
        run_alone: runs a function in one process, and returns its result.

    Raises:
        PolylaneError: the metrics fail in float64, or are refused by the plan.
    """
    objective = next(iter(training.prepared.objectives.values()))
    if objective.metrics is None:
        return []
    request, whole_batches = OutputRequest("metrics", objective.metrics), list(training.batches)
    ragged = _take_ragged(whole_batches[0], training.prepared.plan.data - 1)
    batches, expected = run_alone(lambda: _evaluate_alone(training, request, whole_batches, ragged))
    (workers,) = run_on_workers(training, lambda job: job.evaluate_batches([*whole_batches, *([ragged] * batches)]))
    planned = {name: value for name, value in workers[0].items() if name != "loss"}
    names = dict.fromkeys([*expected, *planned])
    return [_compare(name, expected.get(name, math.nan), planned.get(name, math.nan)) for name in names]


def _take_ragged(batch: Any, count: int) -> Any:
    """Return a copy of a batch's first samples: at least one."""
    leaves, rebuild = flatten(batch)
    return rebuild(clone_leaves(take_first_samples(leaves, min(max(count, 1), sample_count(leaves)))))


def _evaluate_alone(
    training: ComparedTraining, request: OutputRequest, batches: Sequence[Any], ragged: Any
) -> tuple[int, dict[str, float]]:
    """Return how often the ragged batch was evaluated, once or never, and the metrics by name, of a plain loop.

    A model may not take a batch of so few samples: then it is left out.
    """
    model, sums = training.prepared.model, _PlainSums()
    model.eval()
    with torch.no_grad(), Promoted() if training.prepared.in_float64 else nullcontext():
        try:
            request.compute(model, copy.deepcopy(ragged))
            count = 1
        except Exception:  # of the user's own code, on few samples
            count = 0
        for batch in [*batches, *([ragged] * count)]:
            try:
                sums.add(*request.compute(model, copy.deepcopy(batch)), sample_count(flatten(batch)[0]))
            except PolylaneError:
                raise
            except Exception as error:  # of the user's own code, or a kernel without float64
                raise PolylaneError(f"metrics(model, batch) fails in float64: {describe_error(error)}") from error
    return count, sums.compute()


class _PlainSums:
    """Metrics of a plain loop over whole batches."""

    def __init__(self) -> None:
        self._sums = dict[str, list[float]]()
        self._objects = dict[str, Any]()

    def add(self, tensors: Sequence[torch.Tensor], forms: Sequence[MetricForm], samples: int) -> None:
        """Add a batch.

        Args:
            tensors: what the user's function asks for, flat.
            forms: what these are, metric by metric.
            samples: number of samples of the batch.
        """
        for form in forms:
            values = [tensors[i] for i in form.positions]
            if form.kind == "object":
                if form.name not in self._objects:
                    self._objects[form.name] = copy_metric(form.metric, torch.device("cpu"), in_float64=True)
                self._objects[form.name].update(*form.nest(values))
                continue
            if form.kind == "mean":
                pair = float(values[0]), float(values[1])
            elif form.kind == "scalar":
                pair = float(values[0]) * samples, float(samples)
            else:
                pair = float(values[0].double().sum()), float(values[0].numel())
            total, count = self._sums.get(form.name, [0.0, 0.0])
            self._sums[form.name] = [total + pair[0], count + pair[1]]

    def compute(self) -> dict[str, float]:
        """Return all metrics by name."""
        values = {name: total / count if count else math.nan for name, (total, count) in self._sums.items()}
        for name, metric in self._objects.items():
            values |= list_numbers(name, metric.compute())
        return values


def _compare(name: str, reference: float, planned: float) -> ComparedMetric:
    both_missing = math.isnan(reference) and math.isnan(planned)
    error = 0.0 if both_missing or reference == planned else abs(reference - planned) / max(abs(reference), 1.0)
    return ComparedMetric(name, reference, planned, math.inf if math.isnan(error) else error)
