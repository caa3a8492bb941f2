"""Peak memory: the most bytes that a worker holds in a step, and what they consist of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from polylane.cost.memory.held_messages import HeldMessage, sum_held
from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.state_sharding import UNSHARDED, StateSharding
from polylane.schedule.action import Action, ActionKind


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes that a worker holds at the peak of a step.

    Attributes:
        parameters: bytes of parameters, buffers and constants.
        gradients: bytes of the parameters' gradients.
        optimizer: optimizer states, and the temporaries of its step.
        activations: tensors saved for backward, those of the running pass, and the input samples.
        communication: values and gradients in flight between stages, and bucket copies.
        margin: bytes lost by the allocator and taken by the device itself.
        moment: when the peak is reached: "forward", "backward", "reduction" or "step".
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
        """Sum of all parts in bytes."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "moment")

    def as_dict(self) -> dict[str, Any]:
        """Return every part and their total as plain data."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class MemoryMargin:
    """Memory that a worker takes beyond its tensors.

    Attributes:
        share: fraction of the tensors' bytes that fragmentation and rounding add.
        fixed_bytes: bytes that a worker takes before it has any tensor (CUDA context, libraries' workspaces).
    """

    share: float = 0.0
    fixed_bytes: int = 0


# The CPU's is that of a process's resident set: glibc's heap keeps holes between blocks of up to 32 MiB (measured: 12
# to 48%; none where every block is mapped for itself), and libraries' code and work spaces stay once they have run.
# On CUDA: blocks are rounded to 2 MiB and split by torch's caching allocator; the context, and cuBLAS's work space.
MARGINS = {"cpu": MemoryMargin(0.25, 48 << 20), "cuda": MemoryMargin(0.05, 900 << 20)}


@dataclass(frozen=True)
class TrainedBytes:
    """Bytes of one rank's parameters, gradients and optimizer state, before sharding over replicas.

    Attributes:
        parameters: bytes of parameters, buffers and constants, each counted once.
        trained: bytes of the parameters that have gradients.
        states: bytes of the optimizer's states.
        optimizer_workspace: temporary bytes of the optimizer's step.
        bucket_copies: bytes of gradients copied into flat buckets; 0 without replicas.
        largest_block: bytes of the trained parameters of the largest block, which ZeRO-3 gathers at once.
        sparse_savings: bytes that sparse gradients have less than their parameters.
    """

    parameters: float
    trained: float
    states: float
    optimizer_workspace: float = 0.0
    bucket_copies: float = 0.0
    largest_block: float = 0.0
    sparse_savings: float = 0.0


def peak_memory(
    lane: Sequence[Action],
    needs: Mapping[int, PeakMemory],
    trained: Mapping[int, float],
    load: TrainedBytes,
    method: TrainingOptions | None = None,
    sharding: StateSharding = UNSHARDED,
    margin: MemoryMargin | None = None,
    messages: Sequence[HeldMessage] = (),
) -> MemoryBreakdown:
    """Return the peak memory of one worker in a step, with the microbatches that all its stages hold at each pass.

    Args:
        lane: the worker's forward and backward passes over its microbatches, in order.
        needs: memory of one microbatch for every stage of the worker.
        trained: by stage, bytes of the parameters whose gradients its first backward pass creates.
        load: parameters, gradients and states of all the worker's stages.
        method: precision and recomputation of the passes; default: the runtime's.
        sharding: what is sharded over replicas, and over how many.
        margin: memory beyond the tensors, added to the peak.
        messages: values and gradients between stages that the worker holds beside what its passes count.
    """
    sharded_load = shard_trained_bytes(load, method or TrainingOptions(), sharding)
    microbatches = sum(action.kind is ActionKind.FORWARD for action in lane) // len(needs)
    samples = max(need.batch_bytes for need in needs.values()) * microbatches

    def at(moment: str, activations: float, gradients: float, travels: float, scratch: float = 0.0) -> MemoryBreakdown:
        return MemoryBreakdown(
            parameters=math.ceil(sharded_load.parameters + sharded_load.gathered),
            gradients=math.ceil(min(gradients, sharded_load.gradients + sharded_load.scattered)),
            optimizer=math.ceil(sharded_load.states + scratch),
            activations=math.ceil(activations + samples),
            communication=math.ceil(travels),
            moment=moment,
        )

    travels = sum_held(messages, len(lane))
    passes = _play_passes(lane, needs, trained, sharded_load)
    most_gradients = sharded_load.gradients + sharded_load.scattered

    def moving_bytes(moment: tuple[tuple[str, float, float], float]) -> int:
        """Return the bytes of a pass that differ from pass to pass, in the parts that are rounded up."""
        (_, activations, gradients), sent = moment
        return math.ceil(min(gradients, most_gradients)) + math.ceil(activations + samples) + math.ceil(sent)

    pass_moments = list(zip(passes, travels, strict=False))
    moments = [at(*figures, sent) for figures, sent in [max(pass_moments, key=moving_bytes)] if pass_moments]
    last_travel = travels[-1]
    # After the last pass: reductions with their bucket copies, then the step with its temporaries.
    moments.append(at("reduction", 0.0, sharded_load.gradients, last_travel + sharded_load.copied))
    moments.append(at("step", 0.0, sharded_load.gradients, last_travel, sharded_load.working))
    peak = max(moments, key=lambda moment: moment.total)
    return peak if margin is None else replace(peak, margin=math.ceil(peak.total * margin.share) + margin.fixed_bytes)


def _play_passes(
    lane: Sequence[Action], needs: Mapping[int, PeakMemory], trained: Mapping[int, float], sharded_load: ShardedLoad
) -> list[tuple[str, float, float]]:
    """Return the name of every pass, with its bytes of activations and gradients.

    Args:
        lane, needs, trained: passes, memory of a microbatch and trained bytes, as :func:`peak_memory` is given them.
        sharded_load: the worker's load in the precision and sharding of its training.
    """
    # live: microbatches in flight by stage; waiting: those between the halves of a backward pass in two.
    # begun: stages that have run a backward pass, so that their gradients exist.
    live, waiting, begun = dict.fromkeys(needs, 0), dict.fromkeys(needs, 0), set[int]()
    moments = list[tuple[str, float, float]]()
    for action in lane:
        stage, need = action.stage, needs[action.stage]
        kind = action.kind
        live[stage] -= kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        waiting[stage] -= kind is ActionKind.BACKWARD_WEIGHT
        held_bytes = sum(
            live[chunk] * memory.live_bytes + waiting[chunk] * memory.between_halves for chunk, memory in needs.items()
        )
        gradients = sharded_load.trained_share(sum(trained[chunk] for chunk in begun))
        if kind is ActionKind.FORWARD:
            moments.append(("forward", held_bytes + need.forward_peak, gradients))
            live[stage] += 1
            continue
        if kind is ActionKind.BACKWARD_INPUT:  # the gradients of weights are made in the second half
            moments.append(("backward", held_bytes + need.input_half_peak, gradients))
            waiting[stage] += 1
            continue
        if stage not in begun:  # its gradients are being created in this pass
            gradients += sharded_load.trained_share(max(need.first_backward_peak - need.backward_peak, 0.0))
            begun.add(stage)
        peak = need.backward_peak if kind is ActionKind.BACKWARD else need.weight_half_peak
        moments.append(("backward", held_bytes + peak, sharded_load.scattering(gradients)))
    return moments


@dataclass(frozen=True)
class ShardedLoad:
    """Bytes of one replica, in the precision and sharding of the training options.

    Attributes:
        parameters, trained: bytes held of all parameters, buffers and constants; unsharded bytes of the trained ones.
        gradients, states: bytes held of gradients and of optimizer states (float32 masters included).
        working, copied: temporary bytes of the optimizer's step, and of flat gradient buckets.
        gathered: bytes of full parameters that are gathered at a time (ZeRO-3).
        scattered: bytes of a block's full gradients until they are reduce-scattered.
        share: fraction of the gradients that a replica holds.
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
        """Return the bytes of gradients that stay on the replica, given bytes of trained parameters."""
        return self.gradients * (trained / self.trained) if self.trained else 0.0

    def scattering(self, gradients: float) -> float:
        """Return the bytes of gradients in a backward pass: those that stay, and those still to be scattered."""
        return min(gradients + self.scattered, gradients / self.share)


def shard_trained_bytes(load: TrainedBytes, method: TrainingOptions, sharding: StateSharding) -> ShardedLoad:
    """Return the bytes of one replica (ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations", 2020, sections 3 and 5).

    In 16 bits with masters a rank has parameters and gradients in 16 bits, and a float32 copy of the parameters with
    the optimizer's states: 2 + 2 + (4 + 8) bytes per element for Adam. Over N replicas ZeRO-1 shards the states to 1/N,
    ZeRO-2 the gradients as well, ZeRO-3 the parameters as well; ZeRO-3 gathers parameters block by block, the next
    block while the current one is computed with.
    """
    fixed = load.parameters - load.trained
    parameters, states, working = load.trained, load.states, load.optimizer_workspace
    gradients = load.trained - load.sparse_savings
    # All sizes come in the model's own dtype, taken to be float32.
    narrow = method.float_itemsize / 4
    if method.is_half_precision and method.masters:
        parameters, gradients, states = parameters * narrow, gradients * narrow, states + load.trained
        fixed *= narrow
    elif method.is_half_precision:
        parameters, gradients, states, working = (x * narrow for x in (parameters, gradients, states, working))
        fixed *= narrow
    fraction, gathered, scattered, share = 1.0 / sharding.degree, 0.0, 0.0, 1.0
    block = load.largest_block * (narrow if method.is_half_precision else 1.0)
    states, working = states * fraction, working * fraction
    if sharding.kind in ("gradients", "parameters"):
        gradients, scattered, share = gradients * fraction, block, fraction
    if sharding.gathers_parameters:
        parameters, gathered = parameters * fraction, min(2 * block, parameters * (1 - fraction))
    copied = load.bucket_copies * (narrow if method.is_half_precision else 1.0)
    return ShardedLoad(parameters + fixed, load.trained, gradients, states, working, copied, gathered, scattered, share)


def recompute_blocks(need: PeakMemory, blocks: Sequence[PeakMemory]) -> PeakMemory:
    """Return a stage's memory under full recomputation: blocks save only their inputs and run forward again.

    Args:
        need: memory of the stage without recomputation.
        blocks: memory of each block, in order, as if each were a stage.
    """
    inputs = [block.values_received for block in blocks[1:]]  # the first block's inputs count as received by the stage
    end = len(blocks) - 1

    def most(alive: Callable[[PeakMemory], float], gradients: float) -> float:
        """Return the peak over all blocks: saved inputs up to the block, what is alive inside, received gradients."""
        return max(
            sum(inputs[:i]) + alive(block) - block.values_received - block.values_sent + gradients * (i < end)
            for i, block in enumerate(blocks)
        )

    boundary = need.values_received + need.values_sent
    return replace(
        need,
        saved=float(sum(inputs)),
        forward_peak=most(lambda block: block.forward_peak, 0.0) + boundary,
        backward_peak=most(lambda block: block.backward_peak, need.gradients_received) + boundary,
        first_backward_peak=most(lambda block: block.first_backward_peak, need.gradients_received) + boundary,
    )
