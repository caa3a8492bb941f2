"""Running statistics of replicas in turn move as on one device, in the order of the microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.runtime.pipeline.running_statistics import Kept, RunningStatistics
from polylane.samples.running_norms import RunningNorm


def test_two_replicas_move_as_one_device_does() -> None:
    """Five microbatches over three replicas; a batch of two leaves the third without any, and it moves all the same."""
    for count in (5, 2):
        torch.manual_seed(0)
        one, parts = nn.BatchNorm1d(4).double(), [torch.randn(3, 4, dtype=torch.float64) for _ in range(count)]
        norm = RunningNorm("mean", "variance", 0.1)
        outputs = [one(part) for part in parts]
        tensors = [state() for _ in range(3)]
        kept = [{i: Kept() for i in range(replica, count, 3)} for replica in range(3)]
        for i, part in enumerate(parts):
            own = tensors[i % 3]
            run = SampleSlice(3, keep_statistics=kept[i % 3][i].keep)
            running = own["buffer", "mean"], own["buffer", "variance"]
            result = batch_norm(run, part, one.weight, one.bias, *running, True, 0.1, one.eps)
            torch.testing.assert_close(result, outputs[i], rtol=1e-14, atol=0)
            assert running[0].eq(0).all() and running[1].eq(1).all()  # not yet
            own["buffer", "passes"].add_(1)
        sums = sum_of(norm, tensors, kept, count)
        for own, found in zip(tensors, kept, strict=True):
            RunningStatistics([norm], {"passes": 1}).move(own, found, count, always(sums))
            torch.testing.assert_close(own["buffer", "mean"], one.running_mean, rtol=1e-14, atol=1e-16)
            torch.testing.assert_close(own["buffer", "variance"], one.running_var, rtol=1e-14, atol=0)
            assert own["buffer", "passes"] == one.num_batches_tracked == count


def always(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: value.clone()


def state() -> dict[tuple[str, Any], Tensor]:
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    return {("buffer", "mean"): mean, ("buffer", "variance"): variance, ("buffer", "passes"): torch.tensor(0)}


def sum_of(norm: RunningNorm, tensors: Any, kept: Any, count: int) -> Tensor:
    """What all replicas hand to the sum, added up."""
    summands = list[Tensor]()

    def collect(summand: Tensor) -> Tensor:
        summands.append(summand.clone())
        return summand

    for own, found in zip(tensors, kept, strict=True):
        RunningStatistics([norm], {}).move({key: t.clone() for key, t in own.items()}, found, count, collect)
    return torch.stack(summands).sum(0)
