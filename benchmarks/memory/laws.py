"""python -m benchmarks.memory.laws: activations that every schedule keeps, measured, against theory and prediction.

A GPT on a pipeline of four workers, by batches of more and more microbatches of the same size. Bytes do not depend on
how busy the machine is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import untie_parameters
from benchmarks.harness import make_parser
from benchmarks.memory.passes import OneMicrobatch, PassMemory, play_live, watch_passes
from benchmarks.memory.plot import draw
from benchmarks.published.gpipe import first_node
from polylane.cluster.spec import parse as parse_cluster
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import Objective, build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.memory.peak import peak_memory
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import PlanCost
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.spec import Spec
from polylane.plan.spec import parse as parse_plan
from polylane.planner.problem import CapturedProblem, build_cost_model
from polylane.recipe import load
from polylane.runtime.job import Job
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.action import ActionKind
from polylane.schedule.live import peak_live
from polylane.schedule.schedules import ASYNCHRONOUS, DEFAULT_CHUNKS, NAMES, schedule_lanes, splits_backward
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes

SCHEDULES = (*NAMES, *ASYNCHRONOUS)
MICROBATCHES = (4, 8, 16, 32)
WORKERS = 4
SAMPLES = 4  # of a microbatch

Loss = Callable[[nn.Module, Any], Tensor]
Example = Callable[[int], Any]


@dataclass(frozen=True)
class Held:
    """Bytes of activations that the workers of a plan hold, each figure by worker.

    Attributes:
        schedule: name of the schedule.
        microbatches: of a step.
        live: most microbatches alive by the order of the schedule; of several chunks, each counts as its share.
        kept: most bytes between passes, measured.
        theory: the same if every microbatch held what a single one holds alone.
        most: most bytes inside of a pass, measured.
        predicted: the same as ``polylane simulate`` predicts it.
        versions: versions of the weights that were alive at most.
    """

    schedule: str
    microbatches: int
    live: tuple[float, ...]
    kept: tuple[int, ...]
    theory: tuple[int, ...]
    most: tuple[int, ...]
    predicted: tuple[int, ...]
    versions: tuple[int, ...]

    @property
    def theory_error(self) -> float:
        """The largest relative difference of theory to any worker's bytes between passes."""
        return max((b / a - 1 for a, b in zip(self.kept, self.theory, strict=True)), key=abs)

    @property
    def prediction_error(self) -> float:
        """The largest relative difference of the prediction to any worker's bytes inside of a pass."""
        return max((b / a - 1 for a, b in zip(self.most, self.predicted, strict=True)), key=abs)


@dataclass(frozen=True)
class Subject:
    """A model whose blocks are dealt to stages in equal numbers, by hand: balanced times would differ by the run.

    Attributes:
        model, loss: what is trained; no weight on two stages, since asynchronous schedules refuse that.
        blocks: the modules at which stages may begin.
        example: microbatches -> a batch of so many of them, always of the same size.
    """

    model: nn.Module
    loss: Loss
    blocks: tuple[str, ...]
    example: Example

    @cached_property
    def problem(self) -> CapturedTraining:
        """The training with its graph, captured once for all plans."""
        example = self.example(2)
        problem = TrainingProblem(self.model, build_objectives(self.loss, sgd, None), example)
        return CapturedTraining(self.model, problem.objectives, example, graph=problem.capture())

    def compiled(self, schedule: str, workers: int, microbatches: int) -> CompiledTraining:
        """Compile the training for a pipeline."""
        spec = parse_plan(f"pipeline={workers},schedule={schedule},microbatches={microbatches}")
        assert isinstance(spec, Spec)
        graph, stages = self.problem.graph, len(spec.meshes)
        firsts = [self.blocks[len(self.blocks) * stage // stages] for stage in range(1, stages)]
        partition = Partition(graph, tuple(first_node(graph, name) for name in firsts))
        problem = dataclasses.replace(self.problem, example=self.example(microbatches))
        return compile_training(problem, fit.plan_from_partition(partition, spec, microbatches))


@dataclass(frozen=True)
class CapturedTraining(TrainingProblem):
    """A training whose graph is there already: it holds for batches of any size.

    Attributes:
        graph: of the first objective.
    """

    graph: Graph = field(kw_only=True)

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        return self.graph


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer without state."""
    return torch.optim.SGD([p for _, p in parameters], lr=1e-3)


def measure(subject: Subject, workers: int, cases: Sequence[tuple[str, int]]) -> list[Held]:
    """Train a few steps by every schedule, and return what its workers held.

    Args:
        subject: what is trained.
        workers: of the pipeline.
        cases: schedules, and the microbatches of a step; of ``pipedream``, whose batches are one microbatch each, the
            number of steps.
    """
    trainings = [subject.compiled(schedule, workers, 1 if schedule == "pipedream" else m) for schedule, m in cases]
    alone = {name: subject.compiled(name, workers, 1) for name in {alike(schedule) for schedule, _ in cases}}
    steps = [m + 2 * workers if schedule == "pipedream" else 4 for schedule, m in cases]

    counted = list(zip(trainings, steps, strict=True))

    def work(_: Any) -> tuple[list[WorkerPasses], dict[str, WorkerPasses]]:
        many = [passes_of(each, subject.example(each.plan.microbatches), n) for each, n in counted]
        return many, {name: passes_of(each, subject.example(1), 1) for name, each in alone.items()}

    measured = fork_workers(work, workers)
    found = list[Held]()
    for index, (schedule, m) in enumerate(cases):
        prepared, own = trainings[index], [many[index] for many, _ in measured]
        lanes = lanes_of(prepared)
        ones = [OneMicrobatch.of(single[alike(schedule)].passes) for _, single in measured]
        chunks = len(prepared.plan.stages) // workers
        found.append(
            Held(
                schedule=schedule,
                microbatches=m,
                live=tuple(count / chunks for count in peak_live(lanes)),
                kept=tuple(max(each.after for each in worker.passes) for worker in own),
                theory=tuple(play_live(lane, one) for lane, one in zip(lanes, ones, strict=True)),
                most=tuple(max(each.most for each in worker.passes) for worker in own),
                predicted=predicted_activations(prepared, subject.example(prepared.plan.microbatches)),
                versions=tuple(worker.versions for worker in own),
            )
        )
    return found


def alike(schedule: str) -> str:
    """A synchronous schedule under which one microbatch holds on every stage what it holds under this one."""
    if schedule in DEFAULT_CHUNKS:
        return schedule
    return "zb-h1" if splits_backward(schedule) else "1f1b"


@dataclass(frozen=True)
class WorkerPasses:
    """What one worker has measured.

    Attributes:
        passes: of all steps.
        versions: of its weights, alive at most.
    """

    passes: tuple[PassMemory, ...]
    versions: int


def passes_of(prepared: CompiledTraining, batch: Any, steps: int) -> WorkerPasses:
    """Train some steps on this worker and measure its passes."""
    with watch_passes() as meter, Job(prepared, World.join(), example=batch) as job:
        for _ in range(steps):
            _ = job.step(batch).loss
        assert isinstance(job._role, TrainingRole)
        pipeline = job._role._binder.pipeline
        return WorkerPasses(tuple(meter.passes), 1 if pipeline is None else pipeline.versions.most)


def lanes_of(prepared: CompiledTraining) -> Lanes:
    """The passes of every worker, by the schedule's name alone."""
    (partition,) = prepared.partitions.values()
    plan = prepared.plan
    graph = StageGraph.of_partition(partition)
    return schedule_lanes(plan.schedule, graph, plan.microbatches, workers=plan.stage_groups)


def predicted_activations(prepared: CompiledTraining, batch: Any) -> tuple[int, ...]:
    """Bytes of activations of every worker at their peak, as ``polylane simulate`` predicts them, without the batch.

    Messages between stages are left out, as they are of what is measured inside of a pass.
    """
    (partition,) = prepared.partitions.values()
    plan, samples = prepared.plan, len(batch[0])
    model = build_cost_model(
        CapturedProblem(partition.graph, sgd), parse_cluster(f"1x{plan.workers}:cpu"), TrainingOptions()
    )
    cost, found = PlanCost(model, partition, plan, samples), list[int]()
    for stage, lane in zip(plan.first_chunks, lanes_of(prepared), strict=True):
        needs = {chunk: cost.microbatch_memory(chunk) for chunk in plan.chunks(stage)}
        trained = {chunk: cost.trained_bytes(chunk).trained for chunk in needs}
        read = max(need.batch_bytes for need in needs.values())
        count = sum(action.kind is ActionKind.FORWARD for action in lane) // len(plan.chunks(stage))
        predicted = peak_memory(lane, needs, trained, cost.trained_bytes(*needs))
        found.append(round(predicted.activations - read * count))
    return tuple(found)


def gpt(layers: int) -> Subject:
    """A small GPT on the text model's data, its head untied from the embedding."""
    recipe = load("examples/gpt.py", {"layers": str(layers), "hidden": "64", "seq_len": "128", "dropout": "0.0"})
    torch.manual_seed(0)
    model = untie_parameters(recipe.model())
    data = recipe.data("train")

    def example(microbatches: int) -> Any:
        return torch.utils.data.default_collate([data[i] for i in range(SAMPLES * microbatches)])

    return Subject(model, recipe.loss, tuple(f"blocks.{i}" for i in range(layers)), example)


def table(found: Sequence[Held]) -> str:
    """One line for every schedule: bytes of the worker that holds most, and the largest errors of any worker."""
    counts = sorted({held.microbatches for held in found})
    mib = " | ".join(f"{m} microbatches" for m in counts)
    lines = [
        f"| schedule | live, by worker | {mib} | to theory | to prediction | versions of weights |",
        f"|---|---|{'---:|' * len(counts)}---:|---:|---|",
    ]
    for schedule, own in by_schedule(found).items():
        last = own[-1]
        sizes = " | ".join(f"{max(held.kept) / 2**20:.2f} MiB" for held in own)
        live = ", ".join(f"{count:g}" for count in last.live)
        versions = ", ".join(map(str, last.versions))
        theory, predicted = (
            max((getattr(held, name) for held in own), key=abs) for name in ("theory_error", "prediction_error")
        )
        lines.append(f"| {schedule} | {live} | {sizes} | {theory:+.1%} | {predicted:+.1%} | {versions} |")
    return "\n".join(lines)


def by_schedule(found: Sequence[Held]) -> dict[str, list[Held]]:
    """Return the measurements of each schedule, by ascending numbers of microbatches."""
    schedules = dict.fromkeys(held.schedule for held in found)
    return {
        name: sorted((held for held in found if held.schedule == name), key=lambda held: held.microbatches)
        for name in schedules
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and draw the picture."""
    parser = make_parser("benchmarks.memory.laws", __doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of it as an SVG file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    workers, counts, schedules = (2, (2, 4), ("afab", "1f1b")) if options.quick else (WORKERS, MICROBATCHES, SCHEDULES)
    found = measure(gpt(2 * workers), workers, [(schedule, m) for schedule in schedules for m in counts])
    print(table(found))
    if options.plot is not None:
        points = {
            name: [(held.microbatches, max(held.kept) / 2**20) for held in own]
            for name, own in by_schedule(found).items()
        }
        options.plot.write_text(draw(f"Activations kept between passes, GPT on {workers} workers", points))
        print(f"\n{options.plot}")


if __name__ == "__main__":
    main()
