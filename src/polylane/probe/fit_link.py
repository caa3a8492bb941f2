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
            of a step can be separated from the latency, and the bandwidth that all devices share from that of one.
    """
    several = len({_senders(case) for case in carried if case.kind != "send"}) > 1
    max_senders = max(_senders(case) for case in carried)
    starts = sorted(_start_points(several, max_senders), key=lambda start: _solve_fit(carried, *start).cost)
    fit = min((_refine_fit(carried, half, share, max_senders) for half, share in starts[:_REFINED]), key=_cost_of)
    kinds: list[Kind] = list(dict.fromkeys(case.kind for case in carried))
    bandwidth = max(fit.rates.values())
    shares = {name: min(fit.rates[name] / bandwidth, 1.0) for name in kinds}
    largest = max(case.size for case in carried)
    busy = [case.cpu for case in carried if case.size == largest and case.ranks * case.groups == max_senders]
    return Link(
        kind="measured",
        bandwidth=bandwidth,
        total=fit.share * bandwidth if several and fit.share < max_senders * (1 - 1e-6) else None,
        latency=fit.latencies["all_reduce"],
        hop=fit.hop,
        fraction=shares["all_reduce"],
        half=fit.half,
        cpu=statistics.median(busy),
        fractions={name: share for name, share in shares.items() if share != shares["all_reduce"]},
        latencies={name: fit.latencies[name] for name in kinds if name != "all_reduce"},
    )


def link_errors(link: Link, carried: Sequence[TimedTraffic]) -> list[float]:
    """Return the relative errors of the link's figures: 0.1 is 10% too much or too little."""
    device = Device.model_validate(device_presets()["cpu"])
    devices = max(case.ranks * case.groups for case in carried)
    cluster = Cluster((Hosts(devices=devices, device=device, link=link),))
    return [abs(_predicted_seconds(cluster, case) / case.seconds - 1) for case in carried]


def _predicted_seconds(cluster: Cluster, case: TimedTraffic) -> float:
    if case.kind == "send":
        return network.message_seconds(cluster, case.size, 0, 1, case.groups)
    return network.collective_seconds(cluster, case.kind, case.size, range(case.ranks), case.groups)


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


def _cost_of(fit: _LinkFit) -> float:
    """Return the rounded cost, so that of equal fits the first is taken: without ramp, without sharing."""
    return round(fit.cost, 12)


def _start_points(several: bool, max_senders: int) -> list[tuple[float, float]]:
    """Return the starting points (half, share) of the searches."""
    shares = [float(max_senders), max_senders / 1.5, 2.0] if several else [float(max_senders)]
    return [(half, share) for half in (0.0, *_HALVES) for share in shares]


def _refine_fit(carried: Sequence[TimedTraffic], half: float, share: float, max_senders: int) -> _LinkFit:
    """Refine a start by Nelder-Mead; a half of 0 stays fixed, and so does a share that limits no device."""

    def at(point: Sequence[float]) -> _LinkFit:
        named = dict(zip(free, point, strict=True))
        # Unconstrained search: half by its logarithm, share by the logit of its place between 2 and ``max_senders``.
        fitted_share = 2 + (max_senders - 2) / (1 + math.exp(-named["share"])) if "share" in named else share
        return _solve_fit(carried, math.exp(min(named["half"], 25.0)) if "half" in named else half, fitted_share)

    free = [name for name, moves in (("half", half > 0), ("share", share < max_senders)) if moves]
    if not free:
        return at(())
    position = min(max((share - 2) / max(max_senders - 2, 1e-9), 0.1), 0.9)
    start = {"half": math.log(half) if half else 0.0, "share": math.log(position / (1 - position))}
    options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 250}
    solution = minimize(lambda x: at(x).cost, [start[name] for name in free], method="Nelder-Mead", options=options)
    return at(solution.x)


def _solve_fit(carried: Sequence[TimedTraffic], half: float, share: float) -> _LinkFit:
    """Solve for latencies, rates and hop; errors count by their logarithms, so that twice and half weigh the same."""
    kinds: list[Kind] = list(dict.fromkeys(case.kind for case in carried))
    several = len({case.ranks for case in carried}) > 1
    rows = np.array([_row(case, kinds, half, share, several) for case in carried])
    measured = np.array([case.seconds for case in carried])
    count, weights, predictions = len(kinds), 1 / measured, measured
    # Columns are scaled to 1, since latencies and seconds per byte differ by many orders of magnitude.
    scale = np.maximum((rows / measured[:, None]).max(axis=0), 1e-300)
    lower_bounds = np.zeros(rows.shape[1])
    lower_bounds[count : 2 * count] = [_fastest(carried, kind) / _FASTER for kind in kinds]
    solution = lower_bounds
    for _ in range(_REWEIGHTED):
        residual = (measured - rows @ lower_bounds) * weights
        solution = lower_bounds + nnls(rows / scale * weights[:, None], residual)[0] / scale
        predictions = np.maximum(rows @ solution, measured * 1e-6)
        weights = 1 / np.sqrt(predictions * measured)  # errors then approximate differences of logarithms
    cost = float(np.sum(np.log(predictions / measured) ** 2))
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
    cases = (case for case in carried if case.kind == kind)
    return min(
        case.seconds / (case.size if kind == "send" else bytes_per_rank(kind, case.size, case.ranks)) for case in cases
    )


def _row(case: TimedTraffic, kinds: Sequence[Kind], half: float, share: float, several: bool) -> list[float]:
    """Return the coefficients of each kind's latency, each kind's seconds per byte, and the seconds per step."""
    alone = min(1.0, share / _senders(case))
    if case.kind == "send":
        steps, bytes_ = 1, float(case.size)
    else:
        volume = bytes_per_rank(case.kind, case.size, case.ranks)
        steps = (2 if case.kind == "all_reduce" else 1) * (case.ranks - 1)
        bytes_ = volume + math.sqrt(volume * half)
    flags = [float(kind == case.kind) for kind in kinds]
    return [*flags, *(flag * bytes_ / alone for flag in flags), *([float(steps)] if several else [])]


def _senders(case: TimedTraffic) -> int:
    """Return how many devices send at the same time."""
    return case.groups if case.kind == "send" else case.ranks * case.groups
