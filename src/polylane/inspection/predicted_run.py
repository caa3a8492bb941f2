"""Predicted run: a compiled training -> predicted.json, before its workers start: timelines, memory, stages, changes.

Operators are timed once, on a worker's samples; the rest is the cost model of ``polylane simulate``. What would change
the time of a step is simulated, too: each change is a plan that the model takes, with the seconds of its step.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.profile import Both, Profile
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import CostModel
from polylane.cost.predict import LANES, Prediction, predict
from polylane.errors import PolylaneError
from polylane.graph.batch import clone_leaves, take_samples
from polylane.graph.partition import Partition
from polylane.inspection.graph_report import count_elements
from polylane.inspection.plan_report import price_stages, step_at_best
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump
from polylane.plan.spec import parse
from polylane.planner.problem import CapturedProblem, build_cost_model, fit_plan, fit_to_meshes
from polylane.probe.machine import cpu_name, running_cluster
from polylane.profiling.time_operators import measure_both, nominal_seconds
from polylane.samples.split_dependence import describe_split_dependence

# A graph whose operators would take longer than this to time, by their FLOPs on a slow core, is priced nominally.
LONGEST_SECONDS = 5.0
SLOW_FLOPS = 1e10  # of a slow core, in one second
RUNS_TIMED = 24  # forward passes' worth of work that timing an operator takes
WORTH = 0.03  # part by which a plan must be faster to be worth a sentence


def predict_run(problem: TrainingProblem, compiled: CompiledTraining, command: Sequence[str]) -> dict[str, Any]:
    """Return what predicted.json has of a run, as plain data; what cannot be predicted is null.

    The keys are: ``plan`` (a line), ``plan_yaml``, ``timeline`` and ``theory`` (`Timeline.to_dict`), ``memory`` (peak
    bytes by rank), ``step_seconds``, ``one_device_seconds``, ``stages``, ``changes`` (of `suggest_changes`),
    ``environment``, and ``note``: why something is null.

    Args:
        problem: the training as the user wrote it.
        compiled: the training, compiled for the plan.
        command: the words of the command line.
    """
    plan, data = compiled.plan, dict[str, Any]()
    data |= {"plan": plan.spec, "plan_yaml": dump(plan), "stages": describe_stages(compiled)}
    data |= {"environment": describe_environment(plan.workers, command)}
    parts = ("timeline", "theory", "memory", "step_seconds", "one_device_seconds")
    data |= {**dict.fromkeys(parts), "changes": [], "note": ""}
    try:
        data |= _predict(_RunCosts(problem, compiled))
    # Whatever a graph has that the cost model does not know: a run goes on without its prediction.
    except Exception as error:
        data["note"] = f"not predicted: {type(error).__name__}: {error}"[:300]
    return data


def _predict(costs: _RunCosts) -> dict[str, Any]:
    compiled, plan = costs.compiled, costs.compiled.plan
    priced = price_stages(compiled, costs.seconds, costs.problem.samples)
    theory = None if plan.is_asynchronous else step_at_best(compiled, priced)
    prediction, alone = costs.predict_plan(plan, compiled.main_partition), costs.predict_alone()
    has_lanes = len(prediction.lanes) == prediction.plan.workers
    return {
        "timeline": _add_title(prediction.timeline, "predicted", plan).to_dict() if has_lanes else None,
        "theory": None if theory is None or plan.workers > LANES else _add_title(theory, "theory", plan).to_dict(),
        "memory": [priced[stage].peak_memory(stage).total for stage in _first_stages(plan)],
        "step_seconds": prediction.seconds,
        "one_device_seconds": None if alone is None else alone.seconds,
        "changes": suggest_changes(costs, prediction),
    }


def _add_title(timeline: Timeline, title: str, plan: Plan) -> Timeline:
    return replace(timeline.from_zero(), title=title, notes={**timeline.notes, "plan": plan.spec})


def _first_stages(plan: Plan) -> list[int]:
    """Return the stage of each rank, of several the first."""
    return [plan.first_chunk(plan.stage_and_replica(rank)[0]) for rank in range(plan.workers)]


def describe_stages(compiled: CompiledTraining) -> list[dict[str, Any]]:
    """Return the number, ranks, mesh, modules and parameters of every stage, and what it sends to which."""
    partition, plan = compiled.main_partition, compiled.plan
    stages = []
    for stage, spec in enumerate(plan.stages):
        modules = [
            ".".join(node.module.split(".")[:2])
            for node in partition.graph.nodes
            if partition.stage_of[node.name] == stage and node.module
        ]
        sends = dict[int, int]()
        for crossing in partition.crossings:
            for consumer in crossing.consumers if crossing.producer == stage else ():
                sends[consumer] = sends.get(consumer, 0) + crossing.bytes
        stages.append(
            {
                "stage": stage,
                "ranks": list(spec.devices),
                "mesh": str(plan.degrees(stage)),
                "modules": list(dict.fromkeys(modules)),
                "parameters": count_elements(partition.graph, partition.parameters(stage)),
                "sends": [{"to": consumer, "bytes": size} for consumer, size in sorted(sends.items())],
            }
        )
    return stages


def describe_environment(workers: int, command: Sequence[str]) -> dict[str, Any]:
    """Return versions, host, devices and the command line."""
    has_accelerator = torch.accelerator.is_available()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "host": socket.gethostname(),
        "devices": [device] * (workers if has_accelerator else 1),
        "command": ["polylane", *command[1:]],
    }


# What would change it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RunCosts:
    """The cost model of a run, with its operators as they are timed here.

    Attributes:
        problem: the training as the user wrote it.
        compiled: the training, compiled for the plan.
    """

    problem: TrainingProblem
    compiled: CompiledTraining
    _cost_models: dict[tuple[TrainingOptions, int], CostModel] = field(default_factory=dict)

    @cached_property
    def seconds(self) -> tuple[Both, ...]:
        """(forward, backward) of every node, for as many samples as the graph has."""
        graph, leaves = self.compiled.main_partition.graph, self.problem.flat_example[0]
        flops = sum(node.flops for node in graph.nodes)
        if flops * RUNS_TIMED > LONGEST_SECONDS * SLOW_FLOPS:
            return nominal_seconds(graph)
        with self.problem.python_kept():
            part = clone_leaves(take_samples(leaves, 0, graph.samples))
            return measure_both(graph, self.problem.model, self.problem.objective.loss, part)

    @cached_property
    def _captured(self) -> CapturedProblem:
        graph, seconds = self.compiled.main_partition.graph, self.seconds
        total = (sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds))
        nodes = {node.name: (pair,) for node, pair in zip(graph.nodes, seconds, strict=True)}
        return self.problem.captured(graph, profile=Profile((graph.samples,), nodes, (total,)))

    def find_cost_model(self, plan: Plan, workers: int) -> CostModel:
        """Return the cost model of a plan's options on this machine."""
        key = TrainingOptions.of(plan), workers
        if key not in self._cost_models:
            device = next((parameter.device.type for parameter in self.problem.model.parameters()), "cpu")
            cluster = running_cluster(workers, "cuda" if device == "cuda" else "cpu")
            self._cost_models[key] = build_cost_model(self._captured, cluster, key[0])
        return self._cost_models[key]

    def predict_plan(self, plan: Plan, partition: Partition) -> Prediction:
        """Return the prediction of a plan, with a lane for every worker where these are not too many."""
        cost_model = fit_to_meshes(self.find_cost_model(plan, plan.workers), partition, plan, self.problem.samples)
        return predict(cost_model, partition, plan, self.problem.samples, every=True)

    def predict_line(self, line: str) -> Prediction:
        """Return the prediction of a plan given by a line.

        Raises:
            PolylaneError: the model does not take the plan.
        """
        spec = parse(line)
        cost_model = self.find_cost_model(self.compiled.plan, spec.processes)
        partition, plan = fit_plan(cost_model, spec, self.problem.samples)
        cost_model = fit_to_meshes(self.find_cost_model(plan, plan.workers), partition, plan, self.problem.samples)
        return predict(cost_model, partition, plan, self.problem.samples)

    def predict_alone(self) -> Prediction | None:
        """Return the prediction of one worker that has the whole batch; None where that cannot be told."""
        try:
            return self.predict_line("data=1,microbatches=1")
        except PolylaneError:
            return None


def suggest_changes(costs: _RunCosts, prediction: Prediction) -> list[dict[str, Any]]:
    """Return changes of the plan that the simulator finds faster: ``change``, ``plan`` (a line), ``faster`` (a ratio).

    Each is a plan of as many workers, with another number of microbatches or another schedule, that the model takes
    and that changes no numbers; the fastest comes first. Memory is not looked at.

    Args:
        costs: the cost model of the run.
        prediction: of the run's own plan.
    """
    changes = list[dict[str, Any]]()
    for change, line in _neighbours(costs, prediction.plan):
        try:
            seconds = costs.predict_line(line).seconds
        except (PolylaneError, ValueError):  # not a plan of this model
            continue
        if seconds and prediction.seconds / seconds > 1 + WORTH:
            changes.append({"change": change, "plan": line, "faster": prediction.seconds / seconds})
    return sorted(changes, key=lambda item: float(item["faster"]), reverse=True)[:3]


def _neighbours(costs: _RunCosts, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (change, line) of plans that differ in one respect from a pipeline's."""
    if plan.pipeline == 1 or not plan.is_uniform or plan.is_asynchronous:
        return
    limit = costs.problem.samples // (plan.data * costs.compiled.min_samples.samples)
    if describe_split_dependence([costs.compiled.main_partition.graph]):
        limit = 0  # more microbatches would have other numbers
    base = {key: value for key, _, value in (text.partition("=") for text in plan.spec.split(",")) if value != "1"}
    for factor, words in ((2, "twice as many microbatches"), (4, "four times as many microbatches")):
        if plan.microbatches * factor <= limit:
            count = plan.microbatches * factor
            yield f"{words} ({count})", _format_line({**base, "microbatches": str(count)})
    for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        if schedule != base.get("schedule", "1f1b"):
            yield f"schedule={schedule}", _format_line({**base, "schedule": schedule})


def _format_line(keys: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in keys.items())
