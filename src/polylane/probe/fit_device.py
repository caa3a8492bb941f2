"""Device fit: the figures of the roofline model, by least squares of relative errors over measured operators."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from polylane.cluster.device import Device
from polylane.cost.operators.roofline import pass_seconds
from polylane.probe.device_speed import TimedCase

Array = NDArray[np.float64]
Tiles = tuple[tuple[int, int], ...]

# Tile sizes to choose from for a device whose own are unknown: the pieces in which a core computes a product.
TILES: tuple[Tiles, ...] = (((1, 1),), ((8, 32),), ((16, 16),), ((32, 32),))

# Relative error beyond which the loss grows only linearly (soft L1): work of an operator besides matmuls and bytes,
# such as random numbers, has no figure of its own.
_TOLERATED = 0.3
_STEPS = 60  # evaluations of the solver from each start


@dataclass(frozen=True)
class FitErrors:
    """Relative errors of a device model against measurements: 0.1 is 10% too much or too little.

    Attributes:
        median: median error over all cases.
        worst: largest error over all cases.
        worst_case: name and dtype of the case with the largest error.
        families: median error by family of cases.
    """

    median: float
    worst: float
    worst_case: str
    families: dict[str, float]


def fit_device(base: Device, timed: Sequence[TimedCase], bandwidth: float, tiles: Sequence[Tiles] = TILES) -> Device:
    """Return the device whose figures fit the measurements best.

    Over all cases in the dtype of the first one, the matmul rate, ``streaming``, ``overhead``, ``depth``, ``attention``
    and ``attention_length`` are fitted; then the matmul rate alone in every further dtype.

    Args:
        base: known figures of the device; those that are fitted are replaced.
        timed: measured cases, with matmuls and bandwidth-bound operators among them.
        bandwidth: measured memory bandwidth in bytes per second, upper limit of what operators stream.
        tiles: tile sizes to choose from; if empty, the base's are kept.
    """
    main = timed[0].dtype
    cases = [case for case in timed if case.dtype == main]
    maxima = {dtype: _max_rate(timed, dtype) for dtype in dict.fromkeys(case.dtype for case in timed) if dtype != main}
    device = base.model_copy(update={"achieved": maxima})
    # One search per tile choice; ties within 1e-9 go to the first, the smallest tiles.
    spaces = _distinguishable_spaces([_Space(device, bandwidth, tile, main) for tile in tiles or (base.tiles,)], cases)
    best = min((_search(space, cases) for space in spaces), key=lambda result: round(result[1], 9))[0]
    rates = {main: best.achieved[main]}
    for dtype in maxima:
        rates[dtype] = _fit_rate(best, [case for case in timed if case.dtype == dtype], dtype)
    # A peak is never below a rate that was measured.
    peaks = {dtype: max(rate, _max_rate(timed, dtype), base.flops.get(dtype, 0.0)) for dtype, rate in rates.items()}
    change = {"flops": {**base.flops, **peaks}, "achieved": {**base.achieved, **rates}}
    return Device.model_validate({**best.model_dump(), **change})


def fit_errors(device: Device, timed: Sequence[TimedCase]) -> FitErrors:
    """Return the errors of the device's figures against the measurements."""
    errors = [(abs(math.expm1(off)), case) for case in timed for off in _log_errors(device, case)]
    worst, case = max(errors, key=lambda pair: pair[0])
    families = {
        family: statistics.median(error for error, case in errors if case.family == family)
        for family in dict.fromkeys(case.family for case in timed)
    }
    return FitErrors(statistics.median(error for error, _ in errors), worst, f"{case.name} {case.dtype}", families)


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Space:
    """Search space of devices, each a point of logarithms of the fitted figures.

    Attributes:
        base: device with the figures that are not searched.
        bandwidth: memory bandwidth in bytes per second.
        tiles: tile sizes of the devices.
        dtype: dtype whose matmul rate is searched.
    """

    base: Device
    bandwidth: float
    tiles: Tiles
    dtype: str

    def device(self, at: Array) -> Device:
        """Return the device at a point."""
        rate, stream, overhead, depth, attention, length = np.exp(at)
        change = {
            "flops": {**self.base.flops, self.dtype: float(rate)},
            "achieved": {**self.base.achieved, self.dtype: float(rate)},
            "sustained": 1.0,
            "bandwidth": self.bandwidth,
            "streaming": float(min(stream / self.bandwidth, 1.0)),
            "tiles": self.tiles,
            "overhead": float(overhead),
            "depth": float(depth),
            "attention": float(min(attention, 1.0)),
            "attention_length": float(length),
        }
        return self.base.model_copy(update=change)

    @property
    def bounds(self) -> tuple[Array, Array]:
        """Bounds of the logarithms: streaming is at most the memory's bandwidth, attention at most the matmul rate."""
        lower = np.log([1e6, self.bandwidth * 1e-3, 1e-9, 1e-3, 1e-3, 1e-2])
        upper = np.log([1e17, self.bandwidth, 1.0, 1e4, 1.0, 1e5])
        return lower, upper

    def starts(self, timed: Sequence[TimedCase]) -> Iterator[Array]:
        """Yield starting points, from the best rates measured."""
        rate = _max_rate(timed, self.dtype)
        overhead = min(case.forward for case in timed)
        for depth, share in ((1.0, 0.9), (30.0, 0.4)):
            point = np.log([rate, self.bandwidth * share, overhead, depth, 0.5, 50.0])
            yield np.clip(point, self.bounds[0] + 1e-9, self.bounds[1] - 1e-9)


def _distinguishable_spaces(spaces: Sequence[_Space], timed: Sequence[TimedCase]) -> list[_Space]:
    """Return one of every set of spaces whose tiles the measurements cannot tell apart."""
    representatives: dict[bytes, _Space] = {}
    for space in spaces:
        start = list(space.starts(timed))[-1]
        representatives.setdefault(_all_log_errors(space.device(start), timed).tobytes(), space)
    return list(representatives.values())


def _search(space: _Space, timed: Sequence[TimedCase]) -> tuple[Device, float]:
    """Return the best device of a space and its cost; figures that do not improve the fit are set to 0."""

    def off(at: Array) -> Array:
        return _all_log_errors(space.device(at), timed)

    best, min_cost = None, math.inf
    for start in space.starts(timed):
        solution = least_squares(
            off, start, bounds=space.bounds, loss="soft_l1", f_scale=_TOLERATED, max_nfev=_STEPS, xtol=1e-12, ftol=1e-12
        )
        if solution.cost < min_cost * (1 - 1e-9):
            best, min_cost = solution.x, float(solution.cost)
    assert best is not None
    device = space.device(best)
    for name in ("depth", "attention_length"):
        without = device.model_copy(update={name: 0.0})
        if _cost(without, timed) <= min_cost * (1 + 1e-6) + 1e-15:
            device = without
    return device, min_cost


def _cost(device: Device, timed: Sequence[TimedCase]) -> float:
    """Return the solver's cost (soft L1): half the sum of 2 (sqrt(1 + z) - 1), z = (error / tolerance)²."""
    squares = (_all_log_errors(device, timed) / _TOLERATED) ** 2
    return float(_TOLERATED**2 * np.sum(np.sqrt(1 + squares) - 1))


def _all_log_errors(device: Device, timed: Sequence[TimedCase]) -> Array:
    return np.array([error for case in timed for error in _log_errors(device, case)])


def _log_errors(device: Device, timed: TimedCase) -> list[float]:
    """Return log(predicted / measured) of the passes that both have."""
    seconds = pass_seconds(timed.operation, device, timed.dtype)
    return [math.log(a / b) for a, b in zip(seconds, (timed.forward, timed.backward), strict=True) if a > 0 and b > 0]


def _fit_rate(device: Device, timed: Sequence[TimedCase], dtype: str) -> float:
    """Fit the matmul rate in a further dtype, with all other figures fixed."""

    def off(at: Array) -> Array:
        rate = float(np.exp(at[0]))
        candidate = device.model_copy(update={"achieved": {**device.achieved, dtype: rate}})
        return _all_log_errors(candidate, timed)

    start = np.log([_max_rate(timed, dtype)])
    return float(np.exp(least_squares(off, start, loss="soft_l1", f_scale=_TOLERATED, xtol=1e-12, ftol=1e-12).x[0]))


def _max_rate(timed: Sequence[TimedCase], dtype: str) -> float:
    """Return the FLOP/s of the fastest matmul or convolution in a dtype."""
    rates = [
        sum(product.flops for product in demand.products) / seconds
        for case in timed
        for demand, seconds in ((case.operation.forward, case.forward), (case.operation.backward, case.backward))
        if case.dtype == dtype and demand.products
    ]
    return max(rates)
