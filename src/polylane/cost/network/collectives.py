"""Collective cost on a cluster: latency, steps and bytes through the links of its tree, for NCCL's algorithms.

The algorithms are: ring; tree, which is a chain inside a host and a double binary tree between hosts (Sanders, Speck
and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009); reduction in the switch of a
host. The fastest is taken for each size. The figures of a link are explained in :class:`polylane.cluster.link.Link`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

from polylane.cluster.cluster import Cluster
from polylane.cluster.link import Kind, Link
from polylane.cluster.rank_span import Level, LinkUse, Ranks, RankSpan
from polylane.cost.cost_table import INTERLEAVED_SUM, CollectiveClock

Algorithm = Literal["ring", "tree", "switch"]

# Bandwidth of a tree relative to a ring's: the factor in NCCL's tuning table.
_TREE = 0.92

# Fraction of the full value that a rank copies into and out of its buffers.
_COPIES = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "broadcast": 0.5, "send": 0.5}


@dataclass(frozen=True, slots=True)
class LinkFlow:
    """Cost of one link: ``(per_byte + copies) · s + per_root · sqrt(s)`` seconds for a value of ``s`` bytes.

    The root term is the ramp of pipelined steps (see :class:`polylane.cluster.link.Link`); ``copies`` are those into
    and out of buffers.
    """

    per_byte: float
    per_root: float
    copies: float = 0.0

    def seconds(self, size: float, root: float) -> float:
        """Return the seconds for ``size`` bytes, given their square root."""
        return (self.per_byte + self.copies) * size + self.per_root * root


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Seconds of one algorithm as a function of the size.

    Attributes:
        algorithm: name of the algorithm: "ring", "tree" or "switch".
        delay: seconds before the first byte moves.
        hop_seconds: seconds of all its steps, whatever the size.
        phases: run one after another; the flows of a phase run at the same time, and the slowest counts.
    """

    algorithm: Algorithm
    delay: float
    hop_seconds: float
    phases: tuple[tuple[LinkFlow, ...], ...]

    def seconds(self, size: float) -> float:
        """Return the seconds for a value of ``size`` bytes."""
        root, total = math.sqrt(size), self.delay + self.hop_seconds
        for flows in self.phases:
            total += max([flow.seconds(size, root) for flow in flows])
        return total


def collective_seconds(cluster: Cluster, kind: str, size: float, ranks: Ranks, groups: int | None = 1) -> float:
    """Return the seconds of a collective that starts on all ranks at once, by the fastest algorithm.

    Args:
        cluster: the cluster that has the ranks and links.
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast"; "" for none.
        size: bytes of the full value, unsharded; 0 bytes still take the latency.
        ranks: global ranks of the group.
        groups: how many such groups use the same links at the same time; None: as many as fit, so that every device is
            in one.

    Raises:
        ValueError: ``kind`` is no collective.
    """
    curves = collective_curves(cluster.span(ranks), kind, groups)
    return min([curve.seconds(size) for curve in curves]) if curves else 0.0


def interleaved_sum_seconds(cluster: Cluster, size: float, ranks: Ranks) -> float:
    """Return the seconds by which an all-reduce of a few kilobytes between computations delays every rank.

    Where the link of a host says what such a sum takes (:attr:`polylane.cluster.link.Link.sums`), that and the time of
    the bytes; between hosts, and for other links, an all-reduce that starts on all ranks at once.
    """
    seconds, span = collective_seconds(cluster, "all_reduce", size, ranks, None), cluster.span(ranks)
    delay = span.crossings[0].link.sum_delay(span.ranks) if seconds and span.level == Level.HOST else None
    return seconds if delay is None else delay + seconds - collective_seconds(cluster, "all_reduce", 0.0, ranks, None)


def make_collective_clock(cluster: Cluster, ranks: Ranks) -> CollectiveClock:
    """Return a clock of collectives and messages along an axis, with all parallel groups of the axis active."""

    def seconds(collective: str, size: float) -> float:
        if collective == "message":
            return message_seconds(cluster, size, ranks[0], ranks[1])
        if collective == INTERLEAVED_SUM:
            return interleaved_sum_seconds(cluster, size, ranks)
        return collective_seconds(cluster, collective, size, ranks, None)

    return seconds


def fastest(cluster: Cluster, kind: str, size: float, ranks: Ranks, groups: int | None = 1) -> CollectiveCurve | None:
    """Return the curve that :func:`collective_seconds` uses; None where a collective takes no time."""
    curves = collective_curves(cluster.span(ranks), kind, groups)
    return min(curves, key=lambda curve: curve.seconds(size), default=None)


def message_seconds(cluster: Cluster, size: float, source: int, target: int, streams: int = 1) -> float:
    """Return the seconds of a message of ``size`` bytes, with ``streams`` of them at once over the same links.

    A message is not pipelined in steps, so it has no ramp. A message of 0 bytes still takes the latency.
    """
    if source == target:
        return 0.0
    delay, per_byte = _message_curve(cluster.span((source, target)), streams)
    return delay + per_byte * size


@lru_cache(maxsize=2**14)
def collective_curves(span: RankSpan, kind: str, groups: int | None) -> tuple[CollectiveCurve, ...]:
    """Return NCCL's possible algorithms, ring first; none on a single rank. Arguments as :func:`collective_seconds`."""
    if kind == "" or span.ranks < 2:
        return ()
    if kind == "send" or kind not in get_args(Kind):
        raise ValueError(f"{kind} is no collective")
    name = cast(Kind, kind)
    curves = (_ring_curve(span, name, groups), _tree_curve(span, name, groups), _switch_curve(span, name, groups))
    return tuple(curve for curve in curves if curve is not None)


def _ring_curve(span: RankSpan, kind: Kind, groups: int | None) -> CollectiveCurve:
    """Return a ring's curve: every rank sends to the next; all-to-all sends directly, one message after another."""
    passes = 2 if kind == "all_reduce" else 1
    hops = passes * sum(crossing.ring_edges * crossing.link.hop for crossing in span.crossings)
    flows = tuple(
        _link_flow(span, crossing, kind, groups, _ring_volume(span, crossing, kind)) for crossing in span.crossings
    )
    return CollectiveCurve("ring", _start_latency(span, kind), hops, (flows,))


def _ring_volume(span: RankSpan, crossing: LinkUse, kind: Kind) -> float | None:
    """Return what leaves each unit of a link in a ring, as a fraction of the value; None: all-to-all, by unit.

    2 (n - 1) / n for all-reduce, 1 for broadcast, else (n - 1) / n, of n ranks; of n units where CPU workers share the
    memory of their hosts, and every host receives a byte once (:mod:`polylane.runtime.transport.hierarchical`).
    """
    if kind in ("all_to_all", "broadcast"):
        return None if kind == "all_to_all" else 1.0
    inner = span.crossings[0]
    shares_memory = inner.level == Level.HOST and span.level > Level.HOST and inner.link.cpu > 0
    # With unequal numbers of workers on the hosts only an all-reduce goes through their memory.
    is_even = len({ranks for ranks, _ in inner.units}) == 1
    count = crossing.unit_count if shares_memory and (is_even or kind == "all_reduce") else span.ranks
    return (2.0 if kind == "all_reduce" else 1.0) * (count - 1) / count


def _tree_curve(span: RankSpan, kind: Kind, groups: int | None) -> CollectiveCurve | None:
    """Return a tree's curve: reduce up and broadcast down; between two units each sends the value once."""
    if kind not in ("all_reduce", "broadcast"):
        return None
    passes = 2 if kind == "all_reduce" else 1
    hops = passes * sum(_tree_depth(crossing) * crossing.link.hop for crossing in span.crossings)
    flows = tuple(
        _link_flow(span, crossing, kind, groups, (1 if crossing.unit_count == 2 else passes) / _TREE)
        for crossing in span.crossings
    )
    return CollectiveCurve("tree", _start_latency(span, kind), hops, (flows,))


def _tree_depth(crossing: LinkUse) -> int:
    """Return the steps from the root to the deepest rank: a chain inside a host, a binary tree between hosts."""
    return crossing.max_units - 1 if crossing.level == Level.HOST else math.ceil(math.log2(crossing.max_units))


def _switch_curve(span: RankSpan, kind: Kind, groups: int | None) -> CollectiveCurve | None:
    """Return the curve of in-network reduction (NVLink SHARP): (1 + 1/n) of the value leaves each device.

    The switch of a host reduces in the network: a device sends all of its value, then the sum of its own n-th (for the
    principle: Graham et al., Scalable Hierarchical Aggregation Protocol (SHArP), COMHPC 2016).
    """
    link = span.crossings[0].link
    if kind != "all_reduce" or span.level != Level.HOST or not link.switch:
        return None
    rate, volume = link.switch * link.bandwidth, 1 + 1 / span.ranks
    copies = _copy_seconds_per_byte(span, span.crossings[0], kind)
    flow = LinkFlow(volume / rate, math.sqrt(volume * link.half) / rate, copies)
    return CollectiveCurve("switch", link.delay(kind), 2 * link.hop, ((flow,),))


def _start_latency(span: RankSpan, kind: Kind) -> float:
    return max(crossing.link.delay(kind) for crossing in span.crossings)


def _copy_seconds_per_byte(span: RankSpan, crossing: LinkUse, kind: Kind) -> float:
    """Return the seconds per byte of the value for copies into and out of buffers; 0 beyond a host's own links."""
    local = crossing.link.local
    return 0.0 if local is None or crossing.level > Level.HOST else _COPIES.get(kind, 1 / span.ranks) / local


def _link_flow(span: RankSpan, crossing: LinkUse, kind: Kind, groups: int | None, volume: float | None) -> LinkFlow:
    """Return the flow through one link of a collective.

    Args:
        span: the units and links that the group spans.
        crossing: the link, with the units of the group that use it.
        kind: the collective, which decides the link's rates.
        groups: number of groups that share the link; None: as many as fit.
        volume: bytes that leave each unit, as a fraction of the value; None: all-to-all.
    """
    per_byte = per_root = 0.0
    # Units may have different numbers of ranks: the slowest counts. Inside a host every rank sends on its own, and
    # (ranks, devices) are those of the host; between hosts all ranks of a unit send at the same time.
    for ranks, devices in crossing.units:
        is_inside = crossing.level == Level.HOST
        leaves = _all_to_all_volume(span.ranks, ranks, is_inside) if volume is None else volume
        senders = 1 if is_inside else ranks
        rate = _bytes_per_second(crossing.link, kind, ranks, is_inside, devices // ranks if groups is None else groups)
        per_byte = max(per_byte, leaves / rate)
        per_root = max(per_root, math.sqrt(leaves * crossing.link.half * senders) / rate)
    return LinkFlow(per_byte, per_root, _copy_seconds_per_byte(span, crossing, kind))


def _all_to_all_volume(ranks: int, unit_ranks: int, is_inside: bool) -> float:
    """Return the fraction that leaves a unit in an all-to-all: every rank sends 1/n² of the value to each other."""
    return (unit_ranks - 1 if is_inside else unit_ranks * (ranks - unit_ranks)) / ranks**2


def _bytes_per_second(link: Link, kind: Kind, ranks: int, is_inside: bool, groups: int) -> float:
    """Return the bytes per second that leave a unit with ``ranks`` of a group, ``groups`` sharing the link."""
    shared = link.shared_bandwidth(kind)
    if is_inside:
        alone = link.solo_bandwidth(kind, ranks)
        return alone if shared is None else min(alone, shared / (ranks * groups))
    alone = ranks * link.solo_bandwidth(kind)
    return alone if shared is None else min(alone, shared / groups)


@lru_cache(maxsize=2**14)
def _message_curve(span: RankSpan, streams: int) -> tuple[float, float]:
    """Return the seconds before the first byte of a message, and the seconds per byte."""
    widest = span.crossings[-1].link
    slowest = min(_bytes_per_second(crossing.link, "send", 1, False, streams) for crossing in span.crossings)
    return widest.delay("send") + widest.hop, 1 / slowest + _copy_seconds_per_byte(span, span.crossings[0], "send")
