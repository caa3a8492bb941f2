"""What the costs of polylane predict for GPT models under 1F1B, interleaved 1F1B and zero-bubble schedules.

The settings are those of Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 4: Megatron-LM
in 16 bits with Adam and without recomputation, hosts of eight A100. The first and the last stage have one block less
than the others, for the embeddings and the head; interleaved 1F1B has one block in every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from benchmarks.published import models
from benchmarks.published.gpipe import first_node
from polylane.cluster.spec import parse
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import CostModel, Prediction, predict
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.planner.problem import CapturedProblem, build_cost_model

LENGTH = 1024
# Not published; the one of the tokenizer that comes with the authors' code, whose head is not tied to the embeddings.
VOCAB = 32_000
PER_HOST = 8
# Our schedules by their published names. ZB-1p and ZB-2p are orders that were searched for with the memory of 1F1B and
# with twice that; ZB-H1 and ZB-H2 are the written ones with about as much.
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
# What tells how fast the devices are: the others are predicted.
TOLD = "1f1b"


@dataclass(frozen=True)
class Gpt:
    """A model of the publication.

    Attributes:
        layers, hidden, heads: sizes.
        samples: of a microbatch.
    """

    layers: int
    hidden: int
    heads: int
    samples: int


MODELS = {
    "1.5B": Gpt(22, 2304, 24, 6),
    "6.2B": Gpt(30, 4096, 32, 3),
    "14.6B": Gpt(46, 5120, 40, 1),
    "28.3B": Gpt(62, 6144, 48, 1),
}


@dataclass(frozen=True)
class PipelineRun:
    """One training of such a model.

    Attributes:
        model: what is trained.
        stages, microbatches: workers of the pipeline, and how a batch is divided.
        schedule: the name of ours.

    Raises:
        PolylaneError: the blocks cannot be divided as the publication has it.
    """

    model: Gpt
    stages: int
    microbatches: int
    schedule: str

    def __post_init__(self) -> None:
        if self.stages < 2 or (self.model.layers + 2) % self.stages:
            raise PolylaneError(
                f"stages must be at least 2 and divide {self.model.layers + 2}, the blocks and two for what is before "
                f"and behind them, not {self.stages}"
            )

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.microbatches * self.model.samples

    @property
    def chunks(self) -> int:
        """Stages of each worker."""
        return (self.model.layers + 2) // self.stages if self.schedule == "interleaved" else 1


@cache
def captured(model: Gpt) -> Graph:
    """The model on the meta device."""
    with torch.device("meta"):
        module = models.Decoder(
            *(VOCAB, LENGTH, model.hidden, 4 * model.hidden, model.heads, model.layers),
            fused=False,
            dropout=0.1,
            tied=False,
        )
    tokens = torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
    return capture(module, models.loss, (tokens, tokens), trainable=[name for name, _ in module.named_parameters()])


@cache
def priced(model: Gpt, stages: int) -> CostModel:
    """What predictions of a model on so many devices rest on."""

    def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([each for _, each in parameters])

    cluster = parse(f"{-(-stages // PER_HOST)}x{PER_HOST}:a100-80g,hosts=roce-200")
    method = TrainingOptions(dtype="float16", overlap=False)
    return build_cost_model(CapturedProblem(captured(model), optimizer), cluster, method)


def divided(graph: Graph, run: PipelineRun) -> tuple[Partition, Plan]:
    """The graph cut between blocks into equal chunks, the first and the last with one block less, and the plan."""
    count = run.stages * run.chunks
    each = (run.model.layers + 2) // count
    # The first block of every chunk but the first one; the last chunk may have none.
    firsts = (each * chunk - 1 for chunk in range(1, count))
    cuts = [first_node(graph, f"blocks.{first}" if first < run.model.layers else "norm") for first in firsts]
    partition = Partition(graph, tuple(cuts))
    spec = Spec(pipeline=run.stages, schedule=run.schedule, microbatches=run.microbatches, chunks=run.chunks)
    return partition, fit.plan_from_partition(partition, spec, run.microbatches)


@cache
def prediction(run: PipelineRun) -> Prediction:
    """Of a step."""
    found = priced(run.model, run.stages)
    return predict(found, *divided(found.stages.graph, run), run.batch)


def memory(run: PipelineRun) -> float:
    """Bytes of the tensors of the worker that has most, at its peak."""
    return max(stage.memory.total - stage.memory.margin for stage in prediction(run).stages)
