"""Traffic between stages: bytes of a microbatch that go from one to another, and of gradients that come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.reshard import Resharder
from polylane.compile.value_spec import value_specs
from polylane.graph.batch import split_bounds
from polylane.program.boxes import box_volume


def count_stage_traffic(
    prepared: CompiledTraining, samples: int, dtypes: Mapping[str, torch.dtype]
) -> list[dict[str, Any]]:
    """Of every two stages of which one reads the other's values, the bytes that their ranks send each other.

    Args:
        prepared: the plan, and how everything lies.
        samples: of a microbatch.
        dtypes: of values, by node name, as far as they are others than capture saw.
    """
    partition, plan = prepared.main_partition, prepared.plan
    travelling = value_specs(partition, dtypes)
    sizes = {name: wire.sizes for name, wire in travelling.items()}
    layouts, orders = prepared.layouts_of(partition), prepared.batch_layouts_of(partition)
    relays = Resharder(0, plan, partition, layouts, sizes, orders)
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
    """Elements of a value, or of its gradient, that all ranks of a stage send to those of another."""
    total = 0
    for rank, times in _senders(relays, start, end, samples):
        own = replace(relays, rank=rank)  # it keeps what is known of the others
        pieces = (own.box_to_send(value, peer, samples, gradient) for peer in relays.plan.peers(rank, end))
        total += times * sum(box_volume(piece) for piece in pieces if piece is not None)
    return total


def _senders(relays: Resharder, start: int, end: int, samples: int) -> list[tuple[int, int]]:
    """Ranks of a stage, and how many send as much as each: between equal meshes only the samples of replicas differ."""
    plan, devices = relays.plan, relays.plan.stages[start].devices
    if relays.layouts.batch_is_sharded or not plan.have_same_mesh(start, end):
        return [(rank, 1) for rank in devices]
    replicas = plan.degree("data", start)
    # Who has no sample of its own computes on another one's.
    hand = [max(1, stop - first) for first, stop in split_bounds(samples, replicas)]
    inner, firsts = len(devices) // replicas, {count: hand.index(count) for count in set(hand)}
    return [(r, hand.count(n)) for n, at in firsts.items() for r in devices[at * inner : (at + 1) * inner]]
