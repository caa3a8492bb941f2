"""Memory: the most bytes that a worker holds in a step, and what they consist of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from polylane.cost.method import Method
from polylane.cost.residence import Need


@dataclass(frozen=True)
class Memory:
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


@dataclass(frozen=True)
class Margin:
    """What is lost beyond the tensors.

    Attributes:
        share: of the tensors' bytes, to fragmentation and rounding.
        fixed: bytes that a worker takes before it has any tensor (a CUDA context, libraries' work spaces).
    """

    share: float = 0.0
    fixed: int = 0


# The CPU's is that of a process's resident set: glibc's heap keeps holes between blocks of up to 32 MiB (measured: 12
# to 48%; none where every block is mapped for itself), and libraries' code and work spaces stay once they have run.
# On CUDA: blocks are rounded to 2 MiB and split by torch's caching allocator; the context, and cuBLAS's work space.
MARGINS = {"cpu": Margin(0.25, 48 << 20), "cuda": Margin(0.05, 900 << 20)}


@dataclass(frozen=True)
class Load:
    """What one rank of a stage trains, in bytes.

    Attributes:
        parameters: that it reads, each once, with buffers and constants.
        trained: of them, those that have gradients.
        states: of the optimizer.
        working: that the optimizer needs while it steps.
        copied: gradients that are copied to travel together; 0 where nobody else has a share in them.
        block: trained parameters of its largest block, which are gathered as one where replicas hold parts only.
    """

    parameters: float
    trained: float
    states: float
    working: float = 0.0
    copied: float = 0.0
    block: float = 0.0


def memory(
    need: Need,
    load: Load,
    live: int,
    microbatches: int,
    method: Method | None = None,
    replicas: int = 1,
    margin: Margin | None = None,
) -> Memory:
    """The most that one worker holds in a step.

    A step has few moments that can be the worst: the last forward pass before the first backward pass, the first
    backward pass (whose gradients are only coming into being), any later one, the reduction, and the optimizer's step.

    Args:
        need: of one microbatch.
        load: what is trained.
        live: microbatches between their passes, at most (:func:`polylane.schedule.synchronous.live_bound`).
        microbatches: of a step, of which this worker has samples.
        method: how training is done; as the runtime does by default.
        replicas: of the stage, over which states may be sharded.
        margin: on top.
    """
    own = sharded(load, method or Method(), replicas)
    worst = max(_moments(need, own, min(live, microbatches), microbatches), key=lambda each: each.total)
    return with_margin(worst, margin)


def with_margin(most: Memory, margin: Margin | None) -> Memory:
    """With what is lost beyond the tensors."""
    return most if margin is None else replace(most, margin=math.ceil(most.total * margin.share) + margin.fixed)


# A backward pass lets go of the gradients that the microbatch before the one before it sent: they have arrived.
_LATE = 1


def _moments(need: Need, load: _Sharded, live: int, microbatches: int) -> list[Memory]:
    full = load.gradients

    def at(moment: str, activations: float, gradients: float, done: int, under_way: float, work: float = 0.0) -> Memory:
        """A moment at which the gradients that so many microbatches have sent back are still held."""
        return Memory(
            parameters=math.ceil(load.parameters + load.gathered),
            gradients=math.ceil(gradients),
            optimizer=math.ceil(load.states + work),
            activations=math.ceil(activations + need.batch * microbatches),
            communication=math.ceil(done * need.returned + under_way),
            moment=moment,
        )

    def ahead(forwards: int, backwards: int) -> float:
        """Of receives that are posted while the next two passes are still to come: one of each, or two of a kind."""
        both = min(forwards, 1) * need.received + min(backwards, 1) * need.asked
        return both if forwards else min(backwards, 2) * need.asked

    def backward(held: int, done: int, first: bool) -> Memory:
        """The backward pass after so many others, with so many microbatches live."""
        ends = need.first - need.backward if first else 0.0
        made = max(ends, 0.0) * (full / load.trained if load.trained else 0.0) if first else full
        made = load.scattering(made)
        coming = ahead(microbatches - done - held, microbatches - done - 1)
        return at("backward", (held - 1) * need.live + need.backward, made, min(done, _LATE), coming)

    steady = microbatches - live  # backward passes after each of which a forward pass follows
    waits = ahead(0, live)
    moments = [
        at("forward", (live - 1) * need.live + need.forward, full * (steady > 0), min(steady, _LATE), waits),
        backward(live, 0, True),
        at("reduction", 0.0, full, min(microbatches, _LATE + 1), load.copied),
        at("step", 0.0, full, min(microbatches, _LATE + 1), 0.0, load.working),
    ]
    if steady:
        moments += [backward(live, done, False) for done in {1, max(steady - 1, 1), steady}]
    elif live > 1:
        moments.append(backward(live - 1, 1, False))
    return moments


@dataclass(frozen=True)
class _Sharded:
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

    def scattering(self, gradients: float) -> float:
        """Bytes of gradients in a backward pass: those that have come to stay, and those still to be scattered."""
        return min(gradients + self.scattered, gradients / self.share)


def sharded(load: Load, method: Method, replicas: int) -> _Sharded:
    """What one replica holds (ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations", 2020, sections 3 and 5).

    In 16 bits with masters a rank has parameters and gradients in 16 bits, and a float32 copy of the parameters with
    the optimizer's states: 2 + 2 + (4 + 8) bytes for each of Adam's. Sharded over N replicas, the states (ZeRO-1), the
    gradients as well (2), the parameters as well (3) are 1/N; what is computed with is gathered block by block, the
    next one while one is computed with.
    """
    fixed = load.parameters - load.trained
    parameters, gradients, states, working = load.trained, load.trained, load.states, load.working
    narrow = method.item / 4
    if method.low and method.masters:
        parameters, gradients, states = parameters * narrow, gradients * narrow, states + load.trained
        fixed *= narrow
    elif method.low:
        parameters, gradients, states, working = (x * narrow for x in (parameters, gradients, states, working))
        fixed *= narrow
    own, gathered, scattered, share = 1.0 / replicas, 0.0, 0.0, 1.0
    block = load.block * (narrow if method.low else 1.0)
    if method.shard != "none":
        states, working = states * own, working * own
    if method.shard in ("gradients", "parameters") and replicas > 1:
        gradients, scattered, share = gradients * own, block, own
    if method.shard == "parameters" and replicas > 1:
        parameters, gathered = parameters * own, min(2 * block, parameters * (1 - own))
    copied = load.copied * (narrow if method.low else 1.0)
    return _Sharded(parameters + fixed, load.trained, gradients, states, working, copied, gathered, scattered, share)


def recomputed(whole: Need, blocks: Sequence[Need]) -> Need:
    """A stage's need where every block keeps only what enters it and runs forward once more before its backward pass.

    Args:
        whole: of the stage without recomputation.
        blocks: of each of its blocks, in order, as if they were stages of their own.
    """
    kept = [block.received for block in blocks[1:]]  # what enters the first block is the stage's own
    last = len(blocks) - 1

    def most(alive: Callable[[Need], float], asked: float) -> float:
        """Over all blocks: what entered it and those before, what is alive inside, what stays to the stage's end."""
        return max(
            sum(kept[:i]) + alive(block) - block.received - block.sent + asked * (i < last)
            for i, block in enumerate(blocks)
        )

    outside = whole.received + whole.sent
    return replace(
        whole,
        kept=float(sum(kept)),
        forward=most(lambda block: block.forward, 0.0) + outside,
        backward=most(lambda block: block.backward, whole.asked) + outside,
        first=most(lambda block: block.first, whole.asked) + outside,
    )
