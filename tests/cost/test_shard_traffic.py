"""Steps in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published.closed_form import block_seconds, pipelined, scattered, sharded
from polylane.cluster.spec import parse
from polylane.cost.cost_table import CostTable
from polylane.cost.network import collectives as network
from polylane.cost.shard_traffic import EXPOSED, ShardTrafficSeconds


def table(**given: list[float]) -> CostTable:
    """With these seconds for two nodes, and none of the rest."""
    names = (
        "forward",
        "backward",
        "waits",
        "backward_waits",
        "sent",
        "issued",
        "backward_issued",
        "stalled",
        "backward_stalled",
        "backward_weight",
        "halving",
    )
    arrays = {name: np.concatenate([[0.0], np.cumsum(given.get(name, [0.0, 0.0]))]) for name in names}
    return CostTable(1, **arrays)


def test_a_block_takes_what_the_slower_of_device_and_host_takes() -> None:
    busy = table(forward=[1, 2], backward=[2, 4], waits=[0, 1], backward_waits=[0, 1], issued=[1, 1])
    assert block_seconds(busy, (0, 2)) == 11
    assert block_seconds(busy, (1, 2)) == 8
    slow_host = table(forward=[1, 2], backward=[2, 4], issued=[6, 1], backward_issued=[1, 4])
    assert block_seconds(slow_host, (0, 2)) == 12


def test_full_recomputation_runs_forward_twice_collectives_and_all() -> None:
    busy = table(forward=[1, 2], backward=[2, 4], waits=[0, 1], backward_waits=[0, 1])
    assert block_seconds(busy, (0, 2), "full") == 15
    with pytest.raises(ValueError, match="full"):
        block_seconds(busy, (0, 2), "selective")


def test_a_pipeline_fills_drains_and_waits_for_the_slowest() -> None:
    assert pipelined([3.0], 5) == 15
    assert pipelined([3.0, 3.0], 4) == pytest.approx((4 + 2 - 1) * 3)
    assert pipelined([1.0, 3.0, 2.0], 4) == pytest.approx(1 + 3 + 2 + 3 * 3)


def test_interleaving_shortens_the_bubble_and_sends_more() -> None:
    bubble = pipelined([2.0] * 4, 8) - 16
    assert pipelined([2.0] * 4, 8, chunks=2) == pytest.approx(16 + bubble / 2)
    assert pipelined([2.0] * 4, 8, 0.1) == pytest.approx(16 + bubble + 2 * 0.1 * (8 + 2))
    assert pipelined([2.0] * 4, 8, 0.1, chunks=2) == pytest.approx(16 + bubble / 2 + 2 * 0.1 * (2 * 8 + 2))


def test_parts_of_a_message_travel_side_by_side() -> None:
    cluster, size = parse("2x8:a100-80g,hosts=infiniband-hdr-200"), 1e9
    alone = scattered(cluster, size, range(1), 8, 8)
    assert alone == network.message_seconds(cluster, size, 0, 8, 8)
    gathered = network.collective_seconds(cluster, "all_gather", size, range(8))
    parts = scattered(cluster, size, range(8), 8, 8)
    assert parts == pytest.approx(network.message_seconds(cluster, size / 8, 0, 8, 8) + gathered)
    assert parts < alone / 4


def test_sharded_replicas_wait_for_what_is_not_hidden() -> None:
    assert sharded(1.0, ShardTrafficSeconds(0.0, 0.0), 3) == 3
    assert sharded(1.0, ShardTrafficSeconds(0.2, 0.1), 2) == pytest.approx(2 * (1 + EXPOSED * 0.3))
    assert sharded(0.0, ShardTrafficSeconds(2.0, 1.0), 2) == 6  # never less than what travels takes
