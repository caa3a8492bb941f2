"""Sums of gradients in a loop of the user's own, bucket by bucket while a backward pass goes on.

DDP (Li et al., VLDB 2020) fixes its buckets once and sums all of them in each pass. A loop with several models, or a
model whose Python chooses, reaches other parameters in each pass, and replicas may differ in which: who sums all of
them pays for those that nobody reached, and who asks first cannot overlap. So what a pass will reach is foreseen from
the passes before it, which all replicas know alike:

    pass          1    2    3    4    5    6
    reached       D    G    D    G    D    G     the discriminator and the generator of a GAN
    expected      -    -    -    G    D    G     what followed when the same passes came before

The buckets of what is expected are launched in one order, each when its last gradient is complete. At the end of the
pass the replicas tell each other what they have reached, host to host: their devices are not waited for. What came
unexpectedly is summed then, and an expectation that fails costs bytes, and no digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.graph import TensorInfo
from polylane.graph.sparse_gradients import densify
from polylane.program.lower import fill_buckets
from polylane.runtime.sync.all_reduce import match_strides
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.flat_packing import flatten_tensors, split_views
from polylane.runtime.transport.protocol import PendingTransfer, Transport

# Passes that are remembered, and the most that are compared: a loop that repeats itself later is not foreseen.
MOST_PASSES, LONGEST_MATCH = 64, 16
FAILED = "failed"  # what a replica says, in place of what it has reached, of a pass that raised


@dataclass(frozen=True, eq=False)
class ReachedParameters:
    """What a backward pass has reached on any replica, with buckets for another one like it.

    Attributes:
        names: the parameters by their names.
        buckets: the same, in the order in which their gradients came.
        launcher: launches the buckets in their order.
    """

    names: frozenset[str]
    buckets: tuple[tuple[str, ...], ...]
    launcher: BucketLauncher


@dataclass(frozen=True)
class SummedGradient:
    """The gradient of a parameter in one backward pass.

    Attributes:
        name: name of the parameter.
        gradient: its sum over all replicas.
        earlier: what earlier passes have accumulated; None if nothing.
    """

    name: str
    gradient: Tensor
    earlier: Tensor | None


class PassSums:
    """Sums the gradients of backward passes over all workers, a pass after the other.

    Args:
        parameters: the parameters by name, the same on every worker.
        transport: connects all workers, with a group of all of them.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], transport: Transport) -> None:
        self._parameters, self._transport = parameters, transport
        self._sizes = {n: TensorInfo(tuple(p.shape), str(p.dtype), p.nbytes, True) for n, p in parameters.items()}
        self._past: list[ReachedParameters] = []
        self._expected: ReachedParameters | None = None
        # Gradients of earlier passes, by the parameters that this pass has reached, in the order of their gradients.
        self._earlier: dict[str, Tensor | None] = {}
        self._launched: list[tuple[tuple[str, ...], PendingTransfer]] = []
        self._has_failed = False  # whether the last pass did, which the others have not been told

    def begin(self) -> None:
        """Prepare a backward pass, before it runs.

        Raises:
            PolylaneError: the last pass failed on this replica, and not on all others.
        """
        self._wait_launched()  # of a pass that failed: its results are nobody's
        if self._has_failed:
            self._has_failed = False
            self._exchange(FAILED)
        self._expected = foresee_next(self._past)
        if self._expected is not None:
            self._expected.launcher.begin(self._launch_expected)

    def set_aside(self, name: str) -> None:
        """Set aside what earlier passes have accumulated, before a gradient of this pass is added to it."""
        if name not in self._earlier:
            self._earlier[name] = self._parameters[name].grad
            self._parameters[name].grad = None

    def end(self) -> list[SummedGradient]:
        """Finish the sums of a pass, after it has run; a collective of all workers.

        Returns:
            The gradients of all parameters that any replica has reached, each in new memory or a bucket's.

        Raises:
            PolylaneError: the pass failed on another replica.
        """
        expected = self._launch_rest()
        # Also what was reached again behind its sum, as by checkpoints that run a backward pass of their own.
        remaining = [name for name in self._earlier if self._parameters[name].grad is not None]
        is_foreseen = expected is not None and not remaining and expected.names == self._earlier.keys()
        reports = self._exchange(None if is_foreseen else [list(self._earlier), remaining])
        foreseen = [[name for bucket in expected.buckets for name in bucket], []] if expected is not None else []
        parts = [foreseen if report is None else report for report in reports]
        # In the order of the gradients on the first replica, then of those that only others have.
        reached = list(dict.fromkeys(name for part in parts for name in part[0]))
        for bucket in fill_buckets(self._sizes, list(dict.fromkeys(name for part in parts for name in part[1]))):
            self._launch(bucket)
        self._note_pass(reached)
        totals, earlier = self._wait_launched(), self._earlier
        self._earlier = {}
        return [
            SummedGradient(
                name,
                match_strides(totals[name], self._parameters[name]),
                earlier[name] if name in earlier else self._parameters[name].grad,
            )
            for name in reached
        ]

    def abandon(self) -> None:
        """Give up a pass that has failed: gradients are as before it, and sums of other replicas are not left waiting.

        That it failed is told when the next pass begins: if it never does, nobody is waited for.
        """
        self._has_failed = True
        self._launch_rest()
        self._restore_earlier()

    def _restore_earlier(self) -> None:
        for name, gradient in self._earlier.items():
            self._parameters[name].grad = gradient
        self._earlier = {}

    def _exchange(self, report: Any) -> list[Any]:
        """Return what every replica says of the pass; a collective of all of them.

        A loop that goes on behind an error that only it had would be a pass ahead from then on: its gradients would be
        added to those of other batches.
        """
        reports = self._transport.all_gather_object(report)
        failed = [rank for rank, message in enumerate(reports) if message == FAILED]
        if failed and len(failed) < len(reports):
            self._restore_earlier()
            raise PolylaneError(
                f"replicas: loss.backward() raised on rank {failed[0]}, and not on all {len(reports)}, so there is "
                "no gradient of the whole batch: let the error end the loop, or raise it on every rank"
            )
        return reports

    def _launch_rest(self) -> ReachedParameters | None:
        if self._expected is not None:
            self._expected.launcher.end(self._launch_expected)
        return self._expected

    def _launch_expected(self, index: int) -> None:
        assert self._expected is not None
        self._launch(self._expected.buckets[index])

    def _launch(self, bucket: tuple[str, ...]) -> None:
        """Start the sum of this worker's gradients, with zeros for those that it has not, and take them off."""
        with torch.no_grad():
            parameters = [self._parameters[name] for name in bucket]
            # Of an embedding with sparse=True, too: ranks have other rows, and buckets one size.
            gradients = [
                torch.zeros_like(parameter)
                if name not in self._earlier or (gradient := parameter.grad) is None
                else densify(gradient)
                for name, parameter in zip(bucket, parameters, strict=True)
            ]
            flat = flatten_tensors(gradients)
            for name, parameter in zip(bucket, parameters, strict=True):
                if name in self._earlier:
                    parameter.grad = None
            self._launched.append((bucket, self._transport.all_reduce(flat, range(self._transport.size))))

    def _wait_launched(self) -> dict[str, Tensor]:
        """Wait for all sums under way, and return them by name."""
        launched, self._launched = self._launched, []
        totals: dict[str, Tensor] = {}
        for bucket, transfer in launched:
            shapes = [self._parameters[name].shape for name in bucket]
            for name, total in zip(bucket, split_views(transfer.wait(), shapes), strict=True):
                totals[name] = totals[name] + total if name in totals else total
        return totals

    def _note_pass(self, reached: Sequence[str]) -> None:
        """Remember a pass; one that reached what an earlier one did has its buckets."""
        names = frozenset(reached)
        entry = next((past for past in reversed(self._past) if past.names == names), None)
        if entry is None:
            buckets = tuple(fill_buckets(self._sizes, reached))
            tensors = [{name: self._parameters[name] for name in bucket} for bucket in buckets]
            entry = ReachedParameters(names, buckets, BucketLauncher(tensors, [True] * len(buckets)))
        self._past = [*self._past, entry][-MOST_PASSES:]


def foresee_next(past: Sequence[ReachedParameters]) -> ReachedParameters | None:
    """Return what followed the longest match of the latest passes among earlier ones, the latest such; None: no match.

    Args:
        past: passes in their order, equal ones the same object.
    """
    followed, longest = None, 0
    for index in range(len(past) - 1, 0, -1):
        length, limit = 0, min(index, LONGEST_MATCH)
        while length < limit and past[index - 1 - length] is past[-1 - length]:
            length += 1
        if length > longest:
            followed, longest = past[index], length
        if longest == LONGEST_MATCH:
            break
    return followed
