"""Link fit: the figures of a link, by least squares of relative errors over measured messages and collectives.

With the volumes and steps of :mod:`polylane.cost.network.collectives`, the seconds of a kind of traffic are linear in
its latency, the seconds per byte and the seconds per step, once two figures are fixed that all kinds share: ``half``,
and ``share`` = ``total`` / ``bandwidth``. These two are searched; the others follow by non-negative least squares
(Lawson and Hanson, Solving Least Squares Problems, 1974).

    seconds(kind) = latency[kind] + (v + sqrt(v * half)) / (bandwidth[kind] * min(1, share / senders)) + steps * hop
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, nnls  # type: ignore[import-untyped]

from polylane.cluster.catalogue import device_presets
from polylane.cluster.cluster import Cluster, Hosts
from polylane.cluster.device import Device
from polylane.cluster.link import Kind, Link
from polylane.cost.network import collectives as network
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.probe.link_speed import TimedTraffic

Array = NDArray[np.float64]

_REWEIGHTED = 8  # rounds of iteratively reweighted least squares
_HALVES = (1e3, 3e4, 1e6, 3e7)  # bytes, starting values of ``half``
_REFINED = 5  # number of the best starts that are refined
_FASTER = 4.0  # limit of a fitted rate over the fastest one seen: beyond it rate and latency are indistinguishable


def fit_link(carried: Sequence[TimedTraffic]) -> Link:
    """Return the link whose figures fit the measurements between devices of one host best.

    Args:
        carried: measurements, with "send" and "all_reduce" in groups of two at least. With larger groups the seconds
            of a step can be told from the latency, and the bandwidth that all devices share from that of one.
    """
    several = len({_senders(each) for each in carried if each.kind != "send"}) > 1
    most = max(_senders(each) for each in carried)
    starts = sorted(_start_points(several, most), key=lambda start: _solve_fit(carried, *start).cost)
    found = min((_refine_fit(carried, half, share, most) for half, share in starts[:_REFINED]), key=_cost_of)
    kinds: list[Kind] = list(dict.fromkeys(each.kind for each in carried))
    bandwidth = max(found.rates.values())
    shares = {name: min(found.rates[name] / bandwidth, 1.0) for name in kinds}
    largest = max(each.size for each in carried)
    busy = [each.cpu for each in carried if each.size == largest and each.ranks * each.groups == most]
    return Link(
        kind="measured",
        bandwidth=bandwidth,
        total=found.share * bandwidth if several and found.share < most * (1 - 1e-6) else None,
        latency=found.latencies["all_reduce"],
        hop=found.hop,
        fraction=shares["all_reduce"],
        half=found.half,
        cpu=statistics.median(busy),
        fractions={name: share for name, share in shares.items() if share != shares["all_reduce"]},
        latencies={name: found.latencies[name] for name in kinds if name != "all_reduce"},
    )


def link_errors(link: Link, carried: Sequence[TimedTraffic]) -> list[float]:
    """Return the relative errors of the link's figures: 0.1 is 10% too much or too little."""
    device = Device.model_validate(device_presets()["cpu"])
    most = max(each.ranks * each.groups for each in carried)
    cluster = Cluster((Hosts(devices=most, device=device, link=link),))
    return [abs(_predicted_seconds(cluster, each) / each.seconds - 1) for each in carried]


def _predicted_seconds(cluster: Cluster, each: TimedTraffic) -> float:
    if each.kind == "send":
        return network.message_seconds(cluster, each.size, 0, 1, each.groups)
    return network.collective_seconds(cluster, each.kind, each.size, range(each.ranks), each.groups)


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LinkFit:
    """Figures that follow from ``half`` and ``share``, with their cost.

    Attributes:
        half: bytes of the ramp, at which half the bandwidth is reached.
        share: bandwidth of all devices at once over that of one.
        latencies, rates: seconds, and bytes per second, by kind of traffic.
        hop: seconds of one further step.
        cost: sum of squared logarithmic errors.
    """

    half: float
    share: float
    latencies: dict[Kind, float]
    rates: dict[Kind, float]
    hop: float
    cost: float


def _cost_of(found: _LinkFit) -> float:
    """Return the rounded cost, so that of equal fits the first is taken: without ramp, without sharing."""
    return round(found.cost, 12)


def _start_points(several: bool, most: int) -> list[tuple[float, float]]:
    """Return the starting points (half, share) of the searches."""
    shares = [float(most), most / 1.5, 2.0] if several else [float(most)]
    return [(half, share) for half in (0.0, *_HALVES) for share in shares]


def _refine_fit(carried: Sequence[TimedTraffic], half: float, share: float, most: int) -> _LinkFit:
    """Refine a start by Nelder-Mead; a half of 0 stays fixed, and so does a share that limits no device."""

    def at(point: Sequence[float]) -> _LinkFit:
        named = dict(zip(free, point, strict=True))
        # Unconstrained search: half by its logarithm, share by the logit of its place between 2 and ``most``.
        own = 2 + (most - 2) / (1 + math.exp(-named["share"])) if "share" in named else share
        return _solve_fit(carried, math.exp(min(named["half"], 25.0)) if "half" in named else half, own)

    free = [name for name, moves in (("half", half > 0), ("share", share < most)) if moves]
    if not free:
        return at(())
    place = min(max((share - 2) / max(most - 2, 1e-9), 0.1), 0.9)
    first = {"half": math.log(half) if half else 0.0, "share": math.log(place / (1 - place))}
    options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 250}
    found = minimize(lambda x: at(x).cost, [first[name] for name in free], method="Nelder-Mead", options=options)
    return at(found.x)


def _solve_fit(carried: Sequence[TimedTraffic], half: float, share: float) -> _LinkFit:
    """Solve for latencies, rates and hop; errors count by their logarithms, so that twice and half weigh the same."""
    kinds: list[Kind] = list(dict.fromkeys(each.kind for each in carried))
    several = len({each.ranks for each in carried}) > 1
    rows = np.array([_row(each, kinds, half, share, several) for each in carried])
    measured = np.array([each.seconds for each in carried])
    count, weights, said = len(kinds), 1 / measured, measured
    # Columns are scaled to 1, since latencies and seconds per byte differ by many orders of magnitude.
    scale = np.maximum((rows / measured[:, None]).max(axis=0), 1e-300)
    least = np.zeros(rows.shape[1])
    least[count : 2 * count] = [_fastest(carried, kind) / _FASTER for kind in kinds]
    solution = least
    for _ in range(_REWEIGHTED):
        left = (measured - rows @ least) * weights
        solution = least + nnls(rows / scale * weights[:, None], left)[0] / scale
        said = np.maximum(rows @ solution, measured * 1e-6)
        weights = 1 / np.sqrt(said * measured)  # errors then approximate differences of logarithms
    cost = float(np.sum(np.log(said / measured) ** 2))
    return _LinkFit(
        half,
        share,
        dict(zip(kinds, map(float, solution[:count]), strict=True)),
        dict(zip(kinds, map(float, 1 / solution[count : 2 * count]), strict=True)),
        float(solution[-1]) if several else 0.0,
        cost,
    )


def _fastest(carried: Sequence[TimedTraffic], kind: Kind) -> float:
    """Return the least seconds per byte of a kind, latency included."""
    own = (each for each in carried if each.kind == kind)
    return min(
        each.seconds / (each.size if kind == "send" else bytes_per_rank(kind, each.size, each.ranks)) for each in own
    )


def _row(each: TimedTraffic, kinds: Sequence[Kind], half: float, share: float, several: bool) -> list[float]:
    """Return the coefficients of each kind's latency, each kind's seconds per byte, and the seconds per step."""
    alone = min(1.0, share / _senders(each))
    if each.kind == "send":
        steps, bytes_ = 1, float(each.size)
    else:
        volume = bytes_per_rank(each.kind, each.size, each.ranks)
        steps = (2 if each.kind == "all_reduce" else 1) * (each.ranks - 1)
        bytes_ = volume + math.sqrt(volume * half)
    own = [float(kind == each.kind) for kind in kinds]
    return [*own, *(mine * bytes_ / alone for mine in own), *([float(steps)] if several else [])]


def _senders(each: TimedTraffic) -> int:
    """Return how many devices send at the same time."""
    return each.groups if each.kind == "send" else each.ranks * each.groups
