"""Steps in closed form: what a pipeline or sharded replicas take by formula, from what their blocks take.

For runs of which only a few figures are known, so that no program can be played: recomputed blocks, interleaved stages,
gradients that are summed after the last backward pass, parameters that are gathered when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from polylane.cluster.cluster import Cluster
from polylane.cluster.rank_span import Ranks
from polylane.cost.cost_table import CostTable
from polylane.cost.network import collectives as network
from polylane.cost.shard_traffic import ShardTrafficSeconds, exposed_seconds
from polylane.cost.stage_cost import Range
from polylane.plan.recompute import Mode


def block_seconds(table: CostTable, block: Range, recompute: Mode = "none") -> float:
    """Seconds of both passes of a block, where the host runs ahead of the device within the block only.

    The host issues all operators of the block while the device computes and waits for collectives: the slower of the
    two counts.

    Args:
        table: of the stage that the block is part of.
        block: its first node, and the one behind its last.
        recompute: "full": the forward pass runs once more before the backward pass (Chen et al., Training Deep Nets
            with Sublinear Memory Cost, 2016).

    Raises:
        ValueError: selective recomputation, which no single factor describes.
    """
    if recompute == "selective":
        raise ValueError("a block's seconds are known with full recomputation and with none")
    runs = 2 if recompute == "full" else 1

    def both(forward: str, backward: str) -> float:
        return runs * table.between(forward, *block) + table.between(backward, *block)

    return max(both("forward", "backward") + both("waits", "backward_waits"), both("issued", "backward_issued"))


def pipelined(stages: Sequence[float], microbatches: int, message: float = 0.0, chunks: int = 1) -> float:
    """Seconds of one forward, one backward over all microbatches: m times the slowest stage, and the others once.

    Huang et al., GPipe, 2019, section 2.3, with unequal stages; with ``chunks`` virtual stages for each worker what
    fills and drains the pipeline is shorter by that factor, and every microbatch sends as many messages more
    (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2).

    Args:
        stages: seconds of both passes of one microbatch, by stage.
        microbatches: of a step.
        message: seconds of one message from stage to stage; 1F1B waits for it both ways.
        chunks: virtual stages of every worker.
    """
    slowest = max(stages)
    if len(stages) == 1:
        return microbatches * slowest
    steady = slowest + 2 * chunks * message
    return microbatches * steady + (sum(stages) - slowest) / chunks + 2 * (len(stages) - 2) * message


def scattered(cluster: Cluster, size: float, ranks: Ranks, target: int, streams: int) -> float:
    """Seconds of a message from a stage to the next one that all ranks of both stages need whole.

    Every rank sends a part of its own; behind it, the parts are gathered (Narayanan et al., 2021, section 4.1).

    Args:
        cluster: where.
        size: of the whole value in bytes.
        ranks: of the first stage, each of which has the whole value.
        target: the rank that the first of them sends to.
        streams: messages at once over the same links.
    """
    sent = network.message_seconds(cluster, size / len(ranks), ranks[0], target, streams)
    return sent + network.collective_seconds(cluster, "all_gather", size, ranks, None)


def sharded(compute: float, traffic: ShardTrafficSeconds, microbatches: int) -> float:
    """Seconds of a step of replicas that gather parameters block by block (ZeRO-3; FSDP: Zhao et al., 2023).

    Args:
        compute: seconds of both passes of one microbatch.
        traffic: for one microbatch.
        microbatches: of a step.
    """
    return microbatches * (compute + exposed_seconds(compute, traffic.seconds))
