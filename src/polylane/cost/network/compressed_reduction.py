"""Compressed gradient reduction: seconds of its messages, and of the rank that compresses and decompresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cost.network.collectives import collective_seconds
from polylane.cost.network.sync_volume import TrainedTensor, compute_sync_bytes, count_top_k_entries
from polylane.plan.sync import PowerSGDOptions, SyncOptions, TopKOptions

# The codecs that a device may have a measured rate of, with two figures for a device without: the time of both
# directions in passes over the gradient's own bytes (as measured on a CPU, in units of its memory's bandwidth), and the
# share of it before the messages are sent.
PASSES = {"bfloat16": (5.0, 0.5), "float16": (20.0, 0.7), "powersgd": (6.0, 0.5), "top_k": (14.0, 0.8)}
# Rank of PowerSGD at which its rate is measured; larger ones cost their further products.
MEASURED_RANK = 4
# Of each matrix element PowerSGD makes four products with every direction: to left and right, residual, gradient.
PRODUCTS = 4
# Fraction of entries at which top-k's rate is measured, between two ranks, and what an entry that is sent costs, in
# elements that are looked at (as measured on a CPU, from a thousandth to a third of the entries): half of it where it
# is taken out, half of it where those of two ranks are added.
MEASURED_FRACTION, ENTRY = 0.01, 35.0
# A step behind all warm-up and all first steps that are not compressed.
STEADY = 1 << 62


@dataclass(frozen=True)
class CompressedReduction:
    """Cost of the reduction of one bucket.

    Attributes:
        seconds: time that its messages take.
        bytes: that each rank sends.
        packing: seconds in which the rank compresses, before the messages.
        unpacking: seconds in which it decompresses and adds up, after them.
    """

    seconds: float
    bytes: float
    packing: float
    unpacking: float


def codec_of(sync: SyncOptions) -> str:
    """Return the name of the codec that gradients go through; "" where they are sent as they are."""
    if sync.compress is not None:
        return sync.compress.kind
    return "" if sync.wire == "same" else sync.wire


def price_compressed(
    sync: SyncOptions, tensors: Sequence[TrainedTensor], ranks: Sequence[int], cluster: Cluster, device: Device
) -> CompressedReduction:
    """Price the reduction of a bucket of gradients over replicas, once all of it is compressed.

    Args:
        sync: the plan's synchronization, which has ``wire`` or ``compress``.
        tensors: the bucket's gradients on a rank.
        ranks: the replicas that sum them.
        cluster: the links between them.
        device: the one that compresses.
    """
    seconds = sum(
        collective_seconds(cluster, kind, size, ranks, None) for kind, size in _messages(sync, tensors, len(ranks))
    )
    bytes_ = compute_sync_bytes(sync, tensors, STEADY)
    work_seconds, (_, packing_share) = codec_seconds(sync, tensors, device), PASSES[codec_of(sync)]
    return CompressedReduction(seconds, bytes_, packing_share * work_seconds, (1 - packing_share) * work_seconds)


def codec_seconds(sync: SyncOptions, tensors: Sequence[TrainedTensor], device: Device) -> float:
    """Return the seconds in which a device compresses these gradients and decompresses their sum.

    Args:
        sync: the plan's synchronization, which names the codec.
        tensors: the gradients, in the dtype of the parameters.
        device: its rate of the codec is the measured one, or follows from its memory's bandwidth.
    """
    name, size = codec_of(sync), float(sum(tensor.nbytes for tensor in tensors))
    if not name or not size:
        return 0.0
    rate = device.codecs[name] * device.speed if name in device.codecs else device.stream / PASSES[name][0]
    extra_seconds = 0.0
    if isinstance(sync.compress, TopKOptions):
        ranks, fraction = max(tensor.ranks for tensor in tensors), sync.compress.fraction
        size *= (1 + ENTRY * fraction * (0.5 + ranks / 4)) / (1 + ENTRY * MEASURED_FRACTION)
    if isinstance(sync.compress, PowerSGDOptions):
        directions = max(0, sync.compress.rank - MEASURED_RANK)
        elements = sum(tensor.elements for tensor in tensors)
        extra_seconds = 2.0 * PRODUCTS * directions * elements / device.rate("float32")
    return size / rate + extra_seconds


def _messages(sync: SyncOptions, tensors: Sequence[TrainedTensor], ranks: int) -> list[tuple[str, float]]:
    """Return the collectives of a bucket, with the bytes of the full value of each."""
    elements = sum(tensor.elements for tensor in tensors)
    if isinstance(sync.compress, TopKOptions):
        fraction = sync.compress.fraction
        entries = [count_top_k_entries(fraction, tensor.elements) * (tensor.itemsize + 4) for tensor in tensors]
        return [("all_gather", float(ranks * sum(entries)))]
    if isinstance(sync.compress, PowerSGDOptions):
        # Two rounds: the left factors with all that is not compressed, then the right factors.
        left, right = 0.0, 0.0
        for tensor in tensors:
            rows = tensor.shape[0] if tensor.shape else 1
            item, columns = max(tensor.itemsize, 4), tensor.elements // max(rows, 1)
            thin = sync.compress.rank * (rows + columns) * item
            left += sync.compress.rank * rows * item if thin < tensor.nbytes else tensor.nbytes
            right += sync.compress.rank * columns * item if thin < tensor.nbytes else 0.0
        return [("all_reduce", size) for size in (left, right) if size]
    if all(tensor.itemsize <= 2 for tensor in tensors):
        return [("all_reduce", float(sum(tensor.nbytes for tensor in tensors)))]
    # Two ranks exchange whole vectors; more of them each sum a part, and send that to all.
    if ranks == 2:
        return [("all_gather", 2.0 * ranks * elements)]
    part = math.ceil(elements / ranks)
    return [("all_to_all", 2.0 * part * ranks * ranks), ("all_gather", 2.0 * part * ranks)]
