"""Noise meter: one worker's part in measuring the gradient noise, in as many steps as a part of their time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.step_result import StepState
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.observed_steps import LONGEST_PERIOD, ObservedSteps
from polylane.runtime.telemetry.part_layout import couples_replicas, find_partial_sums, lay_out_parts, why_not_measured
from polylane.runtime.telemetry.part_squares import PartSquares, divide, norm
from polylane.runtime.telemetry.preconditioner import AdamPreconditioner, divides_gradients

# Part of all steps' time that measuring may cost.
BUDGET = 0.02
# Least part of what measuring costs that its own clock sees: neither the calls of autograd around hooks, nor workers
# that wait for one that measures. It was 40 to 100% where steps with and without it took turns (docs/results).
SEEN_SHARE = 0.4


class NoiseMeter:
    """Measures the parts that one worker computes in some steps.

    Args:
        local_model: what this worker holds of the model.

    Attributes:
        is_on: whether some steps are measured; the same on every worker.
    """

    def __init__(self, local_model: LocalModel) -> None:
        self._local_model, self._plan = local_model, local_model.prepared.plan
        self._rank, self._device = local_model.world.rank, local_model.world.device
        self._replica = self._plan.stage_and_replica(self._rank)[1]
        prepared = local_model.prepared
        self._couples_replicas = couples_replicas(self._plan, prepared.main_partition.graph, prepared.batch_is_sharded)
        self.is_on = False
        self._steps = ObservedSteps(BUDGET)
        self._squares: PartSquares | None = None  # of the step that is measured
        self._totals = torch.zeros(0)
        self._cost, self._seconds, self._began = 0.0, 0.0, 0.0

    @property
    def period(self) -> int:
        """Number of steps from a measured one to the next."""
        return self._steps.period

    def turn_on(self, every_step: bool = False) -> None:
        """Measure the noise of some steps from the next one on; all workers call it between the same two steps.

        Args:
            every_step: measure all steps, and not only as many as 2% of their time allows.

        Raises:
            PolylaneError: it cannot be measured under this plan; the sentence says why.
        """
        if (reason := why_not_measured(self._plan, self._couples_replicas)) is not None:
            raise PolylaneError(f"the gradient noise cannot be measured here: {reason}")
        self.is_on, self._steps = True, ObservedSteps(BUDGET, 1 if every_step else LONGEST_PERIOD)

    def set_mode(self, mode: str) -> None:
        """Do as ``--noise`` says; all workers call it between the same two steps.

        Args:
            mode: "on" measures every step, "auto" some where the plan allows it, "off" none.

        Raises:
            PolylaneError: "on", and it cannot be measured under this plan.
        """
        if mode == "on" or (mode == "auto" and why_not_measured(self._plan, self._couples_replicas) is None):
            self.turn_on(every_step=mode == "on")

    @contextmanager
    def measuring(self, executor: Executor, update: ObjectiveUpdate, step: int) -> Iterator[None]:
        """Context manager around the program of a step: if the step is measured, its backward passes are.

        Args:
            executor: runs the program of the step.
            update: of the step's objective.
            step: number of the step, from 0.
        """
        began, self._squares = time.perf_counter(), None
        self._seconds, self._began = began - self._began if self._began else 0.0, began
        if not self.is_on or not self._steps.begin_step(step):
            yield
            return
        self._squares = squares = self._build_squares(executor, update)
        with squares.measuring():
            executor.measure_pass = squares.measuring_pass
            self._cost = time.perf_counter() - began
            try:
                yield
            finally:
                executor.measure_pass = None

    def _build_squares(self, executor: Executor, update: ObjectiveUpdate) -> PartSquares:
        program = executor.program
        couples = couples_replicas(self._plan, program.partition.graph, executor.is_batch_sharded)
        layout = lay_out_parts(self._plan, program.microbatches, couples, executor.is_replica_local)
        own_python = (node for node in program.partition.graph.nodes if node.is_own_python)
        sums = find_partial_sums(
            self._plan, program, layout.is_joint, {name for node in own_python for name in node.parameters}
        )
        speaks_for, is_first = self._local_model.shard_spec.speaks_for, self._replica == 0 or not layout.is_joint
        counted = frozenset(name for name in update.full_parameters if is_first and speaks_for(name))
        preconditioner: AdamPreconditioner | None = None
        if divides_gradients(update.optimizer):
            preconditioner = AdamPreconditioner(update, self._local_model.transport)
            preconditioner.begin_step()
        return PartSquares(
            layout,
            self._replica,
            update.full_parameters,
            counted,
            sums,
            self._local_model.transport,
            self._device,
            preconditioner,
        )

    def note_sums(self, update: ObjectiveUpdate, state: StepState) -> None:
        """Note the summed gradients of a measured step: complete, but not yet scaled, clipped or changed by hooks.

        Args:
            update: of the step's objective.
            state: of this worker in the step.
        """
        if (squares := self._squares) is None:
            return
        began = time.perf_counter()
        layout, tables = squares.layout, state.tables
        whole_batch = range(min(layout.microbatches, tables.samples))
        squares.end_step(whole_batch if layout.is_joint else sorted(tables.shares))
        self._totals = torch.zeros(2, layout.pools, dtype=torch.float64, device=self._device)
        names = update.counted_names
        gradients = {n: g for n in names if (g := update.local_parameters[n].grad) is not None}
        # Replicas count the same where all sum their gradients.
        pool, copies = (self._replica, 1) if layout.has_pools else (0, update.copies)
        kinds = [list(gradients.values())]
        if (precondition := squares.precondition) is not None:
            kinds.append([divide(g, precondition.divide_local(n)) for n, g in gradients.items()])
        for row, values in enumerate(kinds if gradients else []):
            self._totals[row, pool] = torch.stack([norm(value) for value in values]).double().square().sum() / copies
        self._cost += squares.seconds + time.perf_counter() - began

    def collect(self, executor: Executor, state: StepState) -> tuple[Tensor, NoiseReading] | None:
        """Return this worker's numbers of a measured step, and the reading that their sum over all workers makes.

        Returns None where the step is not measured.

        Args:
            executor: has run the step's program.
            state: of this worker in the step.
        """
        if (squares := self._squares) is None:
            return None
        began, layout, device = time.perf_counter(), squares.layout, self._device
        counts = torch.zeros(layout.parts, dtype=torch.float64, device=device)
        # Counted where the loss is: by microbatch in the order of its passes, as its outputs are.
        for microbatch, count in zip(state.outputs, state.loss_counts, strict=True):
            counts[layout.part_of(self._replica, microbatch)] += count
        plain, scaled = squares.squares()
        cost = self._cost + time.perf_counter() - began
        tail = torch.tensor([1.0, cost, self._seconds], dtype=torch.float64).to(device, non_blocking=True)
        squares_of_all = torch.cat([plain, self._totals[0], scaled, self._totals[1]])
        if executor.loss_scale is not None:  # they are of gradients that were not divided by it yet
            squares_of_all = squares_of_all / executor.loss_scale.double().square()
        numbers = torch.cat([counts, squares_of_all, tail])
        pools = layout.pool_samples(state.tables.samples)
        return numbers, NoiseReading(layout, (), pools, executor.is_replica_local, squares.precondition is not None)

    def follow(self, reading: NoiseReading | None) -> None:
        """Learn what measuring a step has cost; all workers do so before the same step."""
        if reading is not None:
            cost, seconds = reading.costs
            self._steps.follow_cost(cost / SEEN_SHARE, seconds)
