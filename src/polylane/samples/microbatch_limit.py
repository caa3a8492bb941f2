"""Number of microbatches: as requested by a plan, limited by the samples that the model needs at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from polylane.errors import PolylaneError
from polylane.graph.batch import clone_leaves, count_parts, sample_count, take_first_samples
from polylane.graph.capture.export import Loss
from polylane.graph.graph import Graph
from polylane.plan.plan import Plan, default_microbatches
from polylane.plan.spec import Spec
from polylane.samples.mean_loss import splits_exactly
from polylane.samples.min_samples import MinSamples, min_samples


def requested_microbatches(spec: Spec | Plan, total: int) -> int:
    """Return the number of microbatches that a plan requests for a batch of ``total`` samples.

    Raises:
        PolylaneError: there are more microbatches, or more replicas, than samples.
    """
    microbatches = spec.microbatches if isinstance(spec, Plan) else default_microbatches(spec, total)
    if microbatches > total:
        raise PolylaneError(f"microbatches={microbatches}: a batch of {total} samples cannot be divided into so many")
    if spec.data > total:
        raise PolylaneError(f"data={spec.data}: a batch of {total} samples cannot be divided over so many replicas")
    return microbatches


def min_samples_for(plan: Spec | Plan, graphs: Iterable[Graph]) -> MinSamples:
    """Return the least samples that a microbatch of a plan may have in training."""
    fewest = min_samples(graphs)
    return fewest.for_local_replicas(plan.data) if plan.sync.is_replica_local else fewest


def limit_microbatches(asked: int, total: int, fewest: MinSamples, fewer: bool) -> int:
    """Return the number of microbatches such that each has the samples that the model needs.

    Args:
        asked: requested number of microbatches.
        total: samples of a full batch.
        fewest: least samples that the model needs at once.
        fewer: whether fewer are allowed, since the number is a default.

    Raises:
        PolylaneError: the batch is too small, or too small for the requested number.
    """
    fewest.check(total, "a batch", "take larger batches")
    possible = count_parts(total, asked, fewest.samples)
    if possible < asked and not fewer:
        raise PolylaneError(
            f"microbatches={asked}: of a batch of {total} samples some would have {total // asked}, but {fewest}: use "
            f"microbatches={possible}, or larger batches"
        )
    return possible


def make_split_check(
    graph: Graph, model: nn.Module, loss: Loss, leaves: list[Any], in_float64: bool
) -> Callable[[], str | None]:
    """Return a function that runs an example batch whole and in parts and explains a difference, or returns None."""

    def look() -> str | None:
        try:
            return splits_exactly(
                graph, model, loss, clone_leaves(take_first_samples(leaves, min(sample_count(leaves), 6)))
            )
        except PolylaneError:
            raise
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            if in_float64:
                raise PolylaneError(f"the model does not run in float64, which a proof needs: {why}") from error
            warnings.warn(
                f"whether your own Python treats each sample by itself could not be seen: it does not run in float64 "
                f"({why})",
                stacklevel=2,
            )
            return None

    return look
