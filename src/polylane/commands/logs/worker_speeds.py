"""Worker speeds: which workers compute more slowly than others with the same work, and the plan that allows for it.

Replicas of a stage have the same work for each sample. What they compute in is compared by the median of observed
steps, so that a pause in one of them counts for nothing. A plan gives replicas shares of a microbatch by their speeds:

    speeds 1, 0.98, 0.52, 0.5   ->   shares=2:2:1:1
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from polylane.compile.sample_shares import count_replica_samples
from polylane.diagnosis.call_order import format_ranks
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.spec import shorten_plan
from polylane.runtime.telemetry.worker_facts import WorkerFacts

LEAST_STEPS, LEAST_SECONDS = 5, 10.0  # observed steps, and the time that they stand for, before anybody is called slow
SLOW = 0.7  # of the speed of the fastest worker with the same work
WORTH = 1.1  # times as fast, from which on other shares are worth a word
WHOLE_SHARE = 8  # of the fastest replica: shares are small whole numbers


class WorkerSpeeds:
    """How fast every worker has computed in observed steps.

    Args:
        plan: the plan that is run.
        hosts: by rank, the name of its host; empty where all are on one.
    """

    def __init__(self, plan: Plan, hosts: Sequence[str] = ()) -> None:
        self._plan, self._hosts = plan, hosts
        self._places = [plan.stage_and_replica(rank) for rank in range(plan.workers)]
        self._sample_seconds, self._seconds = defaultdict[int, list[float]](list), 0.0

    def add(self, samples: int, facts: Sequence[WorkerFacts]) -> None:
        """Add an observed step.

        Args:
            samples: number of samples of its batch.
            facts: what the workers say of it, by rank.
        """
        if self._plan.takes_turns or self._plan.has_uneven_replicas:
            return
        counts = count_replica_samples(samples, self._plan.microbatches, self._plan.shares or self._plan.data)
        for rank, ((_, replica), fact) in enumerate(zip(self._places, facts, strict=True)):
            if counts[replica] and fact.computing:
                self._sample_seconds[rank].append(fact.computing / counts[replica])
        self._seconds += facts[0].steps * max(fact.seconds for fact in facts)

    def measure(self) -> dict[int, float]:
        """Return the speed of every worker, relative to the fastest of its stage; none before enough is known."""
        if self._seconds < LEAST_SECONDS:
            return {}
        typical = {n: statistics.median(s) for n, s in self._sample_seconds.items() if len(s) >= LEAST_STEPS}
        fastest = dict[int, float]()
        for rank, seconds in typical.items():
            stage = self._places[rank][0]
            fastest[stage] = min(seconds, fastest.get(stage, math.inf))
        return {rank: fastest[self._places[rank][0]] / seconds for rank, seconds in typical.items()}

    def describe(self) -> dict[str, Any]:
        """Return a ``sentence`` on slow workers, and the ``gain`` if they had less to do; empty where none is slow."""
        speeds = self.measure()
        slow = [rank for rank, speed in speeds.items() if speed < SLOW]
        if not slow:
            return {}
        names = dict[str, list[int]]()
        for rank in slow:
            names.setdefault(self._hosts[rank] if self._hosts else f"rank {rank}", []).append(rank)
        words = []
        for name, ranks in names.items():
            of_host = f" ({format_ranks(ranks)})" if self._hosts else ""
            speed = statistics.mean(speeds[rank] for rank in ranks)
            words.append(f"{name}{of_host} computes at {speed:.2f} times the speed of the others")
        # The ranks of a replica wait for each other.
        of_replicas = [1.0] * self._plan.data
        for rank, speed in speeds.items():
            replica = self._places[rank][1]
            of_replicas[replica] = min(of_replicas[replica], speed)
        line, shares = self._give_shares(of_replicas), self._plan.shares or (1,) * self._plan.data
        # A microbatch takes as long as the replica that is last; at best all end at once.
        longest = max(share / speed for share, speed in zip(shares, of_replicas, strict=True))
        gain = longest * sum(of_replicas) / sum(shares) if line else 1.0
        if gain > WORTH:
            words.append(f"--plan {line} gives it fewer samples: up to {gain:.2g} times as fast")
        elif self._plan.shares:
            words.append("the plan's shares allow for that")
        return {"sentence": "; ".join(words), "gain": gain}

    def _give_shares(self, speeds: Sequence[float]) -> str:
        """Return the plan's line with shares by the speeds of the replicas; "" where it cannot have any."""
        shares = [max(1, round(WHOLE_SHARE * speed / max(speeds))) for speed in speeds]
        divisor = math.gcd(*shares)
        try:
            return shorten_plan(self._plan.changed(shares=tuple(n // divisor for n in shares)).spec)
        except PolylaneError:  # replicas that train by themselves
            return ""
