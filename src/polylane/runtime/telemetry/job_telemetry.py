"""Telemetry of a job: values of all workers, the bytes that they sent, and the timeline of their last steps."""

from __future__ import annotations

from typing import Any

from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.step_result import merge_timelines
from polylane.runtime.workers.world import World


class JobTelemetry:
    """What a :class:`polylane.Job` tells of all workers."""

    plan: Plan
    world: World
    _role: Any

    @property
    def apart(self) -> bool:
        """Whether replicas are asynchronous (parameter servers): a worker knows only the losses of its replica.

        Examples:
            >>> job.apart
            False
        """
        return self.plan.sync.has_servers and self.plan.sync.is_replica_local

    @collective("job.gathered")
    def gathered(self, value: Any) -> list[Any]:
        """Gather a value of every worker, by rank: numbers, strings, tensors or containers of these; collective.

        Args:
            value: this worker's own value, which may differ between workers.

        Returns:
            The values of all workers, by rank, on every worker.

        Examples:
            >>> job.gathered({"rank": job.world.rank})
            [{'rank': 0}]
        """
        values: list[Any] = self._role.gather(lambda: value)
        return values

    @collective("job.traffic")
    def traffic(self) -> list[dict[str, float]]:
        """Return the bytes that each worker sent per step, averaged over all steps, by rank; collective.

        ``"agreement"`` of replicas (gradients, weights), ``"stages"``, ``"operators"`` (of sharded ones) and
        ``"statistics"`` (of batches, and norms); ``"theory"`` is the expected ``"agreement"``. Without headers.

        Returns:
            For each worker, by rank, bytes per step by kind.

        Examples:
            >>> job.traffic()[0]["agreement"]
            0.0
        """
        sent: list[dict[str, float]] = self._role.gather(self._role.sent_bytes)
        return sent

    @collective("job.timeline")
    def timeline(self, steps: int = 1) -> Timeline:
        """Return the timeline of the last steps of all workers, on one clock; collective.

        Unlike ``StepResult.timeline``, includes asynchronous replicas and dedicated servers.

        Args:
            steps: number of steps, at most ``polylane.runtime.step_result.STEPS_KEPT``.

        Returns:
            The spans of all workers, in seconds from the first one's start.

        Examples:
            >>> job.timeline(steps=2).ranks
            1
        """
        return merge_timelines(self._role.gather(lambda: self._role.lane(steps)), self.plan.workers)
