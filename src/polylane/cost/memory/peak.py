"""Memory: the most bytes that a worker holds in a step, and what they consist of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.operators.training_options import TrainingOptions
from polylane.schedule.action import Action, ActionKind


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes that a worker holds at the moment of a step at which it holds most.

    Attributes:
        parameters: and buffers and constants.
        gradients: of the parameters.
        optimizer: states, and what the optimizer needs while it steps.
        activations: what forward passes left for backward passes, what the pass under way makes, and the samples.
        communication: values and gradients under way.
        margin: what the allocator loses, and the device itself takes.
        moment: "forward", "backward", "reduction" or "step".
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    margin: int = 0
    moment: str = "backward"

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, each.name) for each in fields(self) if each.name != "moment")

    def as_dict(self) -> dict[str, Any]:
        """Every part, and their total, as plain data."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class MemoryMargin:
    """What is lost beyond the tensors.

    Attributes:
        share: of the tensors' bytes, to fragmentation and rounding.
        fixed_bytes: bytes that a worker takes before it has any tensor (a CUDA context, libraries' work spaces).
    """

    share: float = 0.0
    fixed_bytes: int = 0


# The CPU's is that of a process's resident set: glibc's heap keeps holes between blocks of up to 32 MiB (measured: 12
# to 48%; none where every block is mapped for itself), and libraries' code and work spaces stay once they have run.
# On CUDA: blocks are rounded to 2 MiB and split by torch's caching allocator; the context, and cuBLAS's work space.
MARGINS = {"cpu": MemoryMargin(0.25, 48 << 20), "cuda": MemoryMargin(0.05, 900 << 20)}


@dataclass(frozen=True)
class TrainedBytes:
    """What one rank of a stage trains, in bytes.

    Attributes:
        parameters: that it reads, each once, with buffers and constants.
        trained: of them, those that have gradients.
        states: of the optimizer.
        optimizer_workspace: that the optimizer needs while it steps.
        bucket_copies: gradients that are copied to travel together; 0 where nobody else has a share in them.
        largest_block: trained parameters of its largest block, which are gathered as one where replicas hold parts
            only.
    """

    parameters: float
    trained: float
    states: float
    optimizer_workspace: float = 0.0
    bucket_copies: float = 0.0
    largest_block: float = 0.0


# Receives are posted while so many passes are still to come before the one that needs them.
AHEAD = 2


def peak_memory(
    lane: Sequence[Action],
    needs: Mapping[int, PeakMemory],
    trained: Mapping[int, float],
    load: TrainedBytes,
    method: TrainingOptions | None = None,
    replicas: int = 1,
    margin: MemoryMargin | None = None,
) -> MemoryBreakdown:
    """The most that one worker holds in a step: at each of its passes, what all its stages hold together.

    Args:
        lane: the worker's forward and backward passes over all microbatches that it has samples of, first to last.
        needs: of one microbatch, for every stage of the worker.
        trained: bytes of the parameters that a stage's first backward pass gives gradients, by stage.
        load: what all stages train together.
        method: how training is done; as the runtime does by default.
        replicas: of the stage, over which states may be sharded.
        margin: on top.
    """
    own = shard_trained_bytes(load, method or TrainingOptions(), replicas)
    microbatches = sum(action.kind is ActionKind.FORWARD for action in lane) // len(needs)
    samples = max(need.batch_bytes for need in needs.values()) * microbatches

    def at(moment: str, activations: float, gradients: float, travels: float, work: float = 0.0) -> MemoryBreakdown:
        return MemoryBreakdown(
            parameters=math.ceil(own.parameters + own.gathered),
            gradients=math.ceil(min(gradients, own.gradients + own.scattered)),
            optimizer=math.ceil(own.states + work),
            activations=math.ceil(activations + samples),
            communication=math.ceil(travels),
            moment=moment,
        )

    # A backward pass lets go of the gradients that the microbatch before the one before it sent: they have arrived.
    live, begun, gone = dict.fromkeys(needs, 0), set[int](), [0.0, 0.0]
    moments = list[MemoryBreakdown]()
    for index, action in enumerate(lane):
        stage, need = action.stage, needs[action.stage]
        forward = action.kind is ActionKind.FORWARD
        live[stage] -= not forward
        held = sum(count * needs[other].live_bytes for other, count in live.items())
        made = own.trained_share(sum(trained[other] for other in begun))
        coming = sum(_received_bytes(needs[a.stage], a.kind) for a in lane[index + 1 : index + 1 + AHEAD])
        travels = gone[-1] + coming
        if forward:
            moments.append(at("forward", held + need.forward_peak, made, travels))
            live[stage] += 1
            continue
        if stage not in begun:  # its gradients only come into being
            made += own.trained_share(max(need.first_backward_peak - need.backward_peak, 0.0))
            begun.add(stage)
        moments.append(at("backward", held + need.backward_peak, own.scattering(made), travels))
        gone = [gone[-1], need.gradients_sent]
    moments.append(at("reduction", 0.0, own.gradients, sum(gone) + own.copied))
    moments.append(at("step", 0.0, own.gradients, sum(gone), own.working))
    most = max(moments, key=lambda each: each.total)
    return most if margin is None else replace(most, margin=math.ceil(most.total * margin.share) + margin.fixed_bytes)


def _received_bytes(need: PeakMemory, kind: ActionKind) -> float:
    """Bytes that a pass receives."""
    return need.values_received if kind is ActionKind.FORWARD else need.gradients_received


@dataclass(frozen=True)
class ShardedLoad:
    """A load as the method has it on one replica.

    Attributes:
        gathered: of whole parameters, where replicas hold parts.
        scattered: of a block's whole gradients, until they are scattered.
        share: of the gradients that a replica holds.
    """

    parameters: float
    trained: float
    gradients: float
    states: float
    working: float
    copied: float
    gathered: float
    scattered: float
    share: float

    def trained_share(self, trained: float) -> float:
        """Bytes of gradients that come to stay of so many bytes of trained parameters."""
        return self.gradients * (trained / self.trained) if self.trained else 0.0

    def scattering(self, gradients: float) -> float:
        """Bytes of gradients in a backward pass: those that have come to stay, and those still to be scattered."""
        return min(gradients + self.scattered, gradients / self.share)


def shard_trained_bytes(load: TrainedBytes, method: TrainingOptions, replicas: int) -> ShardedLoad:
    """What one replica holds (ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations", 2020, sections 3 and 5).

    In 16 bits with masters a rank has parameters and gradients in 16 bits, and a float32 copy of the parameters with
    the optimizer's states: 2 + 2 + (4 + 8) bytes for each of Adam's. Sharded over N replicas, the states (ZeRO-1), the
    gradients as well (2), the parameters as well (3) are 1/N; what is computed with is gathered block by block, the
    next one while one is computed with.
    """
    fixed = load.parameters - load.trained
    parameters, gradients, states, working = load.trained, load.trained, load.states, load.optimizer_workspace
    narrow = method.float_itemsize / 4
    if method.is_half_precision and method.masters:
        parameters, gradients, states = parameters * narrow, gradients * narrow, states + load.trained
        fixed *= narrow
    elif method.is_half_precision:
        parameters, gradients, states, working = (x * narrow for x in (parameters, gradients, states, working))
        fixed *= narrow
    own, gathered, scattered, share = 1.0 / replicas, 0.0, 0.0, 1.0
    block = load.largest_block * (narrow if method.is_half_precision else 1.0)
    if method.shard != "none":
        states, working = states * own, working * own
    if method.shard in ("gradients", "parameters") and replicas > 1:
        gradients, scattered, share = gradients * own, block, own
    if method.shard == "parameters" and replicas > 1:
        parameters, gathered = parameters * own, min(2 * block, parameters * (1 - own))
    copied = load.bucket_copies * (narrow if method.is_half_precision else 1.0)
    return ShardedLoad(parameters + fixed, load.trained, gradients, states, working, copied, gathered, scattered, share)


def recompute_blocks(whole: PeakMemory, blocks: Sequence[PeakMemory]) -> PeakMemory:
    """A stage's need where every block keeps only what enters it and runs forward once more before its backward pass.

    Args:
        whole: of the stage without recomputation.
        blocks: of each of its blocks, in order, as if they were stages of their own.
    """
    kept = [block.values_received for block in blocks[1:]]  # what enters the first block is the stage's own
    last = len(blocks) - 1

    def most(alive: Callable[[PeakMemory], float], asked: float) -> float:
        """Over all blocks: what entered it and those before, what is alive inside, what stays to the stage's end."""
        return max(
            sum(kept[:i]) + alive(block) - block.values_received - block.values_sent + asked * (i < last)
            for i, block in enumerate(blocks)
        )

    outside = whole.values_received + whole.values_sent
    return replace(
        whole,
        saved=float(sum(kept)),
        forward_peak=most(lambda block: block.forward_peak, 0.0) + outside,
        backward_peak=most(lambda block: block.backward_peak, whole.gradients_received) + outside,
        first_backward_peak=most(lambda block: block.first_backward_peak, whole.gradients_received) + outside,
    )
