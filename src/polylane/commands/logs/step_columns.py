"""Step columns: what is logged of an observed step beside its loss, from what each worker says of it.

The names are those of docs/reference/metrics.md. A column that is not known is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from polylane.commands.logs.kept_steps import LoggedStep
from polylane.commands.logs.worker_speeds import WorkerSpeeds
from polylane.graph.graph import Graph
from polylane.observe.stretches import TimeState
from polylane.observe.time_account import account_time
from polylane.plan.options import PRECISIONS
from polylane.plan.plan import Plan
from polylane.runtime.telemetry.worker_facts import WorkerFacts

# Shares of the time of all workers in a step; what each means is told in polylane.observe.time_account.
SHARES = tuple(map(str, TimeState))


class StepColumns:
    """Columns of observed steps, and their means over the run.

    Args:
        plan: the plan that is run.
        find_graph: returns model and loss, for the operations of a step; None where steps are of several graphs.
        device_rate: floating-point operations that one device has been measured to do in a second.
        timing: context manager around what is done for the sake of observing.
        hosts: by rank, the name of its host; empty where all are on one.

    Attributes:
        stall_seconds: returns the time that checkpoints have cost so far.
    """

    def __init__(
        self,
        plan: Plan,
        find_graph: Callable[[], Graph | None],
        device_rate: float,
        timing: Callable[[], AbstractContextManager[None]],
        hosts: Sequence[str] = (),
    ) -> None:
        self._speeds = WorkerSpeeds(plan, hosts)
        self._replicas = [plan.stage_and_replica(rank)[1] for rank in range(plan.workers)]
        self._find_graph, self._rate, self._timing = find_graph, device_rate, timing
        self._stall = 0.0
        self.stall_seconds: Callable[[], float] = lambda: 0.0
        self._sums, self._waits, self._count = defaultdict[str, float](float), defaultdict[int, float](float), 0.0

    def add(self, result: LoggedStep) -> dict[str, Any]:
        """Add an observed step to the means, and return its columns; none where it was not observed."""
        if not (facts := result.facts):
            return {}
        with self._timing():
            return self._describe(result, facts)

    def _describe(self, result: LoggedStep, facts: Sequence[WorkerFacts]) -> dict[str, Any]:
        seconds = max(fact.seconds for fact in facts)
        columns: dict[str, Any] = {
            "loss_max": _largest_loss(facts, self._replicas),
            "gradient_norm": sum(fact.squared_norm for fact in facts) ** 0.5,
            **({"loss_scale": facts[0].loss_scale} if facts[0].loss_scale else {}),
            **self._describe_time(result, facts, seconds),
            "memory": [round(fact.memory) for fact in facts],
            "computing_seconds": [round(fact.computing, 6) for fact in facts],
        }
        if (graph := self._find_graph()) is not None:
            speed = step_flops(graph) * result.samples / max(graph.samples, 1) / seconds
            columns |= {"flops_per_second": speed, "device_share": speed / (self._rate * len(facts))}
        if result.step:  # what the first step takes is no measure of the others
            self._add_up(columns | {"seconds": seconds}, facts[0].steps)
            self._speeds.add(result.samples, facts)
        return {name: value for name, value in columns.items() if not (isinstance(value, float) and math.isnan(value))}

    def _describe_time(self, result: LoggedStep, facts: Sequence[WorkerFacts], seconds: float) -> dict[str, Any]:
        """Return the shares of the step's time, and what was sent in it."""
        stall, self._stall = (total := self.stall_seconds()) - self._stall, total
        since = seconds * facts[0].steps + stall
        columns: dict[str, Any] = {
            "loading": min(1.0, max(fact.loading for fact in facts) / seconds),
            "checkpoint_stall": stall / since if since else 0.0,
        }
        timeline = result.timeline
        if len({span.rank for span in timeline.spans}) == len(facts):
            account = account_time(timeline)
            waits = {str(rank): share for rank, share in account.waiting_for().items()}
            return columns | account.shares() | {"waiting_for": waits, "bytes_sent": sum(timeline.sent())}
        # On accelerators nobody waits for the spans of all workers: each has added up its own.
        area = sum(fact.extent for fact in facts)
        if not area:
            return columns
        computing, communicating = (
            sum(getattr(fact, name) for fact in facts) / area for name in ("computing", "communicating")
        )
        bubble = max(0.0, 1 - computing - communicating)
        return columns | {"computing": computing, "communicating": communicating, "bubble": bubble}

    def _add_up(self, columns: dict[str, Any], steps: float) -> None:
        """Add what an observed step says, which stands for the steps since the last observed one."""
        self._count += steps
        for name in (*SHARES, "communicating", "loading", "seconds"):
            self._sums[name] += steps * columns.get(name, 0.0)
        for rank, share in columns.get("waiting_for", {}).items():
            self._waits[int(rank)] += steps * share

    def means(self) -> dict[str, Any]:
        """Return mean shares and mean duration of all steps but the first, by the observed ones; empty without any.

        ``slow`` is what is known of slow workers, see :meth:`.WorkerSpeeds.describe`.
        """
        if not self._count:
            return {}
        shares = {name: total / self._count for name, total in self._sums.items() if total}
        waits = {rank: total / self._count for rank, total in self._waits.items()}
        return shares | {"slow": self._speeds.describe(), "waiting_for": waits}


def step_flops(graph: Graph) -> int:
    """Return the floating-point operations of a forward and a backward pass of the example batch, by the model alone.

    The backward pass of an operator does twice the work of its forward pass: one product for each of its two factors.
    What a plan recomputes, or computes on several workers, counts once.
    """
    return sum(node.flops * (3 if node.requires_grad else 1) for node in graph.nodes)


def find_product_dtype(plan: Plan, model: nn.Module) -> torch.dtype:
    """Return the dtype of a plan's products: that of autocast, or that of most elements of the model's parameters.

    Args:
        plan: the plan, with its precision.
        model: the user's model, of which a worker may hold a part.
    """
    if plan.precision != PRECISIONS[0]:
        return getattr(torch, plan.precision)  # type: ignore[no-any-return]
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _largest_loss(facts: Sequence[WorkerFacts], replicas: Sequence[int]) -> float:
    """Return the largest mean loss of a replica; NaN where none has counted anything."""
    sums = defaultdict[int, list[float]](lambda: [0.0, 0.0])
    for fact, replica in zip(facts, replicas, strict=True):
        sums[replica][0] += fact.loss_total
        sums[replica][1] += fact.loss_count
    return max((total / count for total, count in sums.values() if count), default=math.nan)
