"""What the costs of polylane predict for AmoebaNet-D under torchgpipe: its stages priced, its schedule played.

The settings are those of torchgpipe 0.0.5, benchmarks/amoebanetd-speed: images of 224x224, plain SGD, float32, eight
Tesla P40 of one host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from benchmarks.published import amoebanet
from polylane.cluster.spec import parse
from polylane.cost.network import collectives as network
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import CostModel, Prediction, predict
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.planner.problem import CapturedProblem, build_cost_model, fit_plan
from polylane.schedule.action import Action, ActionKind

DEVICES = 8
CLUSTER = f"1x{DEVICES}:p40,link=pcie-3"
PIXELS = 224


@dataclass(frozen=True)
class Experiment:
    """One training of AmoebaNet-D.

    Attributes:
        stages, microbatches: how the pipeline is divided.
        batch: samples of a step.
        balance: blocks of every stage; none: as polylane balances the predicted times.
        layers, filters: sizes of the model.
    """

    stages: int
    microbatches: int
    batch: int
    balance: tuple[int, ...] = ()
    layers: int = 18
    filters: int = 256


# How each speed was measured: batch and balance are what torchgpipe's authors found fastest, as far as memory allows.
PUBLISHED = (
    Experiment(2, 1, 96, (7, 17)),
    Experiment(2, 4, 256, (9, 15)),
    Experiment(2, 32, 1280, (9, 15)),
    Experiment(4, 1, 160, (3, 4, 5, 12)),
    Experiment(4, 4, 360, (3, 6, 7, 8)),
    Experiment(4, 32, 1152, (3, 6, 7, 8)),
    Experiment(8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7)),
    Experiment(8, 4, 480, (2, 2, 2, 3, 3, 4, 4, 4)),
    Experiment(8, 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4)),
)
# What all speed-ups are relative to.
BASE = PUBLISHED[0]


def experiment(stages: int, microbatches: int) -> Experiment:
    """The published one; else one with as many samples in a microbatch, and the balance, of the most similar one.

    Similar are those that have as well more than one microbatch, or only one; balances are those of as many stages.

    Raises:
        PolylaneError: more stages than there are devices.
    """
    if stages > DEVICES:
        raise PolylaneError(f"stages must be at most {DEVICES}, one for each device, not {stages}")

    def unlike(other: Experiment) -> float:
        return abs(math.log(other.stages / stages)) + abs(math.log(other.microbatches / microbatches))

    similar = min((e for e in PUBLISHED if (e.microbatches > 1) == (microbatches > 1)), key=unlike)
    samples = similar.batch // similar.microbatches
    return Experiment(stages, microbatches, samples * microbatches, similar.balance if similar.stages == stages else ())


def speedup(run: Experiment) -> float:
    """Predicted samples per second over those of the published experiment that is the base."""
    return (run.batch / seconds(run)) / (BASE.batch / seconds(BASE))


@cache
def seconds(run: Experiment) -> float:
    """Of a step."""
    found = priced(run.layers, run.filters)
    partition, plan = divided(found, run)
    prediction = predict(found, partition, plan, run.batch, exact=False)
    messages = travels(found, partition, prediction.stages[0].samples)
    return simulate_tasks(
        [tasks(prediction, messages, stage, found.host_overhead) for stage in range(run.stages)]
    ).makespan()


@cache
def priced(layers: int, filters: int) -> CostModel:
    """What predictions of a size of the model rest on."""
    with torch.device("meta"):
        model = amoebanet.AmoebaNet(layers, filters)
    batch = (
        torch.zeros(2, 3, PIXELS, PIXELS, device="meta"),
        torch.zeros(2, dtype=torch.long, device="meta"),
    )
    graph = capture(model, amoebanet.loss, batch, trainable=[name for name, _ in model.named_parameters()])

    def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for _, each in parameters], lr=0.1)

    return build_cost_model(CapturedProblem(graph, optimizer), parse(CLUSTER), TrainingOptions())


def divided(found: CostModel, run: Experiment) -> tuple[Partition, Plan]:
    """The graph cut between blocks as the experiment has it, and the plan."""
    spec = Spec(pipeline=run.stages, schedule="afab", microbatches=run.microbatches)
    if not run.balance:
        return fit_plan(found, spec, run.batch)
    graph = found.stages.graph
    firsts = itertools.accumulate(run.balance[:-1])
    partition = Partition(graph, tuple(first_node(graph, f"blocks.{block}") for block in firsts))
    return partition, fit.plan_from_partition(partition, spec, run.microbatches)


def first_node(graph: Graph, module: str) -> int:
    """Position of the first node of a module."""
    return next(i for i, n in enumerate(graph.nodes) if n.module == module or n.module.startswith(f"{module}."))


def travels(found: CostModel, partition: Partition, samples: int) -> list[TransferTime]:
    """Of one microbatch from each stage to the next: values that skip stages are handed on from one to the other."""
    sheet = found.stages.sharded_graph(Degrees())
    sizes = [0.0] * (partition.stages - 1)
    for crossing in partition.crossings:
        for stage in range(crossing.producer, max(crossing.consumers)):
            sizes[stage] += sheet.busiest_value_bytes(crossing.value, samples)
    given = []
    for stage, size in enumerate(sizes):
        empty = network.message_seconds(found.cluster, 0.0, stage, stage + 1)
        given.append(TransferTime(network.message_seconds(found.cluster, size, stage, stage + 1) - empty, empty))
    return given


def tasks(prediction: Prediction, messages: Sequence[TransferTime], stage: int, overhead: float) -> list[Task]:
    """What a stage does in a step as torchgpipe has it: all forward passes, then the backward passes the other way.

    What was not kept is computed again before its gradient has arrived (torchgpipe/checkpoint.py: "preceding
    recomputation"), so that it costs nothing where the stage would wait. The last of several microbatches is kept
    (checkpoint="except_last"), a single one is not ("always").
    """
    own, count = prediction.stages[stage], prediction.plan.microbatches

    def message(kind: ActionKind, microbatch: int, way: int) -> list[Task]:
        """To or from the stage before (-1) or behind (1), if there is one; gradients come from behind."""
        peer = stage + way
        if not 0 <= peer < len(prediction.stages):
            return []
        action = Action(kind, stage, microbatch, "states", peer, gradient=(kind is ActionKind.SEND) == (way < 0))
        return [Task(action, transfer=messages[min(stage, peer)]) if kind is ActionKind.SEND else Task(action)]

    def computes(kind: ActionKind, microbatch: int, took: float) -> Task:
        return Task(Action(kind, stage, microbatch), took + overhead)

    found: list[Task] = []
    for i in range(count):
        found += message(ActionKind.RECEIVE, i, -1)
        found.append(computes(ActionKind.FORWARD, i, own.passes.forward))
        found += message(ActionKind.SEND, i, 1)
    for i in reversed(range(count)):
        if i < count - 1 or count == 1:
            found.append(computes(ActionKind.FORWARD, i, own.passes.forward))
        found += message(ActionKind.RECEIVE, i, 1)
        found.append(computes(ActionKind.BACKWARD, i, own.passes.backward))
        found += message(ActionKind.SEND, i, -1)
    return [*found, Task(Action(ActionKind.STEP, stage), own.update_seconds)]
