"""Evaluations of a job: losses, metrics and predictions of a batch or of a whole dataset, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError
from polylane.graph.capture.output_request import OutputRequest
from polylane.runtime.data import loader as data
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World


class JobEvaluations:
    """What a :class:`polylane.Job` computes without training."""

    world: World
    _role: Any
    _resolve_objective: Callable[[str | None], str]
    batches: Callable[..., Iterator[Batch]]

    @collective("job.evaluate")
    def evaluate(self, batch: Any, objective: str | None = None) -> float:
        """Return the loss of a batch in evaluation mode, computed by a forward pass under the plan; collective.

        Args:
            batch: a batch of ``batches``, or the same whole batch on every worker.
            objective: name of the loss, if there are several. Default: the first.

        Returns:
            The loss, a mean over the batch; the same on every worker.

        Raises:
            PolylaneError: there is no loss of this name.

        Examples:
            >>> loss_of_batch = job.evaluate(batch)
            >>> loss_of_batch < 0.5
            True
        """
        total, count = self.evaluate_sums(batch, objective)
        return total / count if count else math.nan

    @collective("job.evaluate_sums")
    def evaluate_sums(self, batch: Any, objective: str | None = None) -> tuple[float, float]:
        """Return the loss of ``evaluate`` as (total, count), to be summed over a dataset; collective.

        Args:
            batch: a batch of ``batches``, or the same whole batch on every worker.
            objective: name of the loss, if there are several. Default: the first.

        Returns:
            The summed loss, and the number of samples that it is of, or what a ``polylane.Mean`` counts.

        Raises:
            PolylaneError: there is no loss of this name.

        Examples:
            >>> total, count = job.evaluate_sums(batch)
            >>> count
            16.0
        """
        result: tuple[float, float] = self._role.evaluate_sums(batch, self._resolve_objective(objective))
        return result

    def evaluate_dataset(
        self,
        dataset: Any,
        batch_size: int,
        *,
        objective: str | None = None,
        collate: data.Collate | None = None,
        workers: int = 0,
    ) -> dict[str, float]:
        """Return loss and metrics over all samples of a dataset, in evaluation mode; collective.

        They are those of one device, whatever the plan: every sample counts once, also in a last batch that is smaller
        than the others. The loss is a mean over all samples, or over what a ``polylane.Mean`` counts.

        Args:
            dataset: map-style or iterable dataset, or a list of samples.
            batch_size: number of samples in a batch, over all workers.
            objective: name of the loss, if there are several; metrics belong to the first. Default: the first.
            collate: merges a list of samples into a batch. Default: torch's ``default_collate``.
            workers: number of processes that load ahead.

        Returns:
            ``{"loss": ..., **metrics}``, the same on every worker; metrics are those that were given to
            ``polylane.parallelize``, by name.

        Raises:
            PolylaneError: a metric is not known to be one over samples; the message says which.

        Examples:
            >>> results = job.evaluate_dataset(dataset, batch_size=16)
            >>> list(results)
            ['loss', 'accuracy']
        """
        batches = self.batches(dataset, batch_size, shuffle=False, collate=collate, workers=workers)
        return self.evaluate_batches(batches, objective)

    def evaluate_batches(self, batches: Iterable[Any], objective: str | None = None) -> dict[str, float]:
        """Return loss and metrics over some batches, as ``evaluate_dataset`` does; collective.

        Args:
            batches: batches of ``batches``, or whole batches, the same on every worker.
            objective: name of the loss, if there are several. Default: the first.

        Returns:
            ``{"loss": ..., **metrics}``, the same on every worker.

        Raises:
            PolylaneError: a metric is not known to be one over samples; the message says which.

        Examples:
            >>> batches = job.batches(dataset, batch_size=16, shuffle=False)
            >>> job.evaluate_batches(batches) == results
            True
        """
        name, metrics = self._resolve_objective(objective), self._role.begin_metrics()
        total = count = 0.0
        for batch in batches:
            sums = self._evaluate_next(batch, name, metrics)
            total, count = total + sums[0], count + sums[1]
        return {"loss": total / count if count else math.nan, **self._complete(metrics)}

    @collective("job.evaluate_batches")
    def _evaluate_next(self, batch: Any, name: str, metrics: Any) -> tuple[float, float]:
        sums: tuple[float, float] = self._role.evaluate_sums(batch, name, metrics)
        return sums

    @collective("job.evaluate_batches")
    def _complete(self, metrics: Any) -> dict[str, float]:
        values: dict[str, float] = self._role.complete_metrics(metrics)
        return values

    def predict(
        self,
        dataset: Any,
        batch_size: int,
        function: Callable[[nn.Module, Any], Any] | None = None,
        *,
        collate: data.Collate | None = None,
        workers: int = 0,
    ) -> Iterator[Any]:
        """Yield what a function returns for each sample of a dataset, in its order, in evaluation mode; collective.

        The function is computed under the plan, on the workers that have its values, and what it returns is sent to
        every worker: of a large model's outputs return what is needed, ``logits.argmax(-1)`` rather than logits.

        Args:
            dataset: map-style or iterable dataset, or a list of samples.
            batch_size: number of samples in a batch, over all workers.
            function: ``function(model, batch)``, which returns a tensor with a row for each sample, or a tuple, list
                or dict of such tensors. Default: the model's output for the batch, or for its first element where it
                is a tuple or list.
            collate: merges a list of samples into a batch. Default: torch's ``default_collate``.
            workers: number of processes that load ahead.

        Yields:
            For each sample the row of each tensor, on the CPU, nested as the function's result. On a dedicated
            parameter server nothing.

        Raises:
            PolylaneError: it is not known which elements of a tensor belong to which sample.

        Examples:
            >>> classes = job.predict(dataset, 16, lambda model, batch: model(batch[0]).argmax(1))
            >>> len(list(classes))
            64
        """
        request, name = OutputRequest("predict", function or call_model), self._resolve_objective(None)
        for batch in self.batches(dataset, batch_size, shuffle=False, collate=collate, workers=workers):
            yield from self._predict_next(batch, name, request)

    @collective("job.predict")
    def _predict_next(self, batch: Any, name: str, request: OutputRequest) -> list[Any]:
        rows: list[Any] = self._role.predict(batch, name, request)
        return rows


def call_model(model: nn.Module, batch: Any) -> Any:
    """Return the model's output for a batch, or for its first element where it is a tuple or list.

    Raises:
        PolylaneError: it is a mapping, of which nobody says what the model takes.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, tuple | list) and batch:
        return model(batch[0])
    raise PolylaneError(
        f"predict: batches are of type {type(batch).__name__}, and it is not known what the model takes of them: give "
        "a function, as in job.predict(dataset, batch_size, lambda model, batch: model(batch['input']))"
    )
