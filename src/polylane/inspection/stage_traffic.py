"""Traffic between stages: bytes of a microbatch's values from one stage to another, and of gradients back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.reshard import Resharder, value_specs
from polylane.graph.batch import split_bounds
from polylane.program.boxes import box_volume


def count_stage_traffic(
    prepared: CompiledTraining, samples: int, dtypes: Mapping[str, torch.dtype]
) -> list[dict[str, Any]]:
    """Return, for each pair of stages between which values cross, the bytes that their ranks send each other.

    Args:
        prepared: the training, compiled for the plan, with placements of all values.
        samples: number of samples of a microbatch.
        dtypes: dtypes by node name, of values whose dtype autocast changed since capture.
    """
    partition, plan = prepared.main_partition, prepared.plan
    travelling = value_specs(partition, dtypes)
    # Rank 0 stands for any: each sender gets its own copy below.
    relays = Resharder(0, plan, partition, prepared.main.layouts, travelling, prepared.main.orders)
    found: dict[tuple[int, int], list[int]] = {}
    for crossing in partition.crossings:
        item = travelling[crossing.value].dtype.itemsize
        for consumer in crossing.consumers:
            both = found.setdefault((crossing.producer, consumer), [0, 0])
            both[0] += item * _sent(relays, crossing.value, crossing.producer, consumer, samples, False)
            if crossing.requires_grad:
                both[1] += item * _sent(relays, crossing.value, consumer, crossing.producer, samples, True)
    return [{"from": a, "to": b, "bytes": there, "back": back} for (a, b), (there, back) in sorted(found.items())]


def _sent(relays: Resharder, value: str, start: int, end: int, samples: int, gradient: bool) -> int:
    """Return the elements of a value, or of its gradient, that all ranks of a stage send to those of another."""
    total = 0
    for rank, times in _senders(relays, start, end, samples):
        own = replace(relays, rank=rank)  # shares the boxes that were computed for other ranks
        pieces = (own.box_to_send(value, peer, samples, gradient) for peer in relays.plan.peers(rank, end))
        total += times * sum(box_volume(piece) for piece in pieces if piece is not None)
    return total


def _senders(relays: Resharder, start: int, end: int, samples: int) -> list[tuple[int, int]]:
    """Return (rank, number of ranks that send as much as it) for a stage.

    Between equal meshes only the numbers of samples differ, so that one replica stands for all of the same size.
    """
    plan, devices = relays.plan, relays.plan.stages[start].devices
    if relays.layouts.batch_is_sharded or not plan.have_same_mesh(start, end):
        return [(rank, 1) for rank in devices]
    replicas = plan.degree("data", start)
    # Local samples of each replica; one without samples computes on a padding sample.
    hand = [max(1, stop - first) for first, stop in split_bounds(samples, replicas)]
    inner, firsts = len(devices) // replicas, {count: hand.index(count) for count in set(hand)}
    return [(r, hand.count(n)) for n, at in firsts.items() for r in devices[at * inner : (at + 1) * inner]]
