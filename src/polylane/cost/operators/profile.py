"""Profile: measured seconds of a graph's own nodes at a few batch sizes, and a clock that prices nodes by them."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polylane.cost.cost_table import Clock, OperatorWork

Both = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """Measured seconds of a graph on one device that was otherwise idle.

    Attributes:
        samples: measured batch sizes in ascending order.
        nodes: by node name, seconds of forward and backward pass at each of these sizes.
        steps: seconds of whole forward and backward passes at each of these sizes; they include what single nodes do
            not show: Python between nodes, gradient accumulation, cold caches.
        update_seconds: seconds of one optimizer step over all parameters.
        shared: like ``nodes``, for batch normalizations whose statistics replicas share, without their all-reduces.
        host_contention: number of copies that run at once on the host -> speed of each relative to one alone, cores
            aside (:func:`polylane.profiling.host_contention.measure_model_contention`); empty if not measured.
        disturbance: what made the device busy meanwhile, in words; "" for nothing.
    """

    samples: tuple[int, ...]
    nodes: Mapping[str, tuple[Both, ...]]
    steps: tuple[Both, ...]
    update_seconds: float = 0.0
    shared: Mapping[str, tuple[Both, ...]] = field(default_factory=dict)
    host_contention: Mapping[int, float] = field(default_factory=dict)
    disturbance: str = ""

    def node_seconds(self, name: str, samples: int, shared: bool = False) -> Both:
        """Return the seconds of a node's passes, linearly interpolated and extrapolated over the measured sizes."""
        measured = self.shared.get(name, self.nodes.get(name)) if shared else self.nodes.get(name)
        if measured is None:
            return 0.0, 0.0
        return _interpolate(self.samples, measured, samples)

    def step_seconds(self, samples: int) -> Both:
        """Return the seconds of the whole forward and backward pass."""
        return _interpolate(self.samples, self.steps, samples)

    def step_to_nodes_ratio(self, samples: int) -> Both:
        """Return the seconds of whole passes over the sum of their nodes' seconds."""
        sums = [0.0, 0.0]
        for name in self.nodes:
            for direction, seconds in enumerate(self.node_seconds(name, samples)):
                sums[direction] += seconds
        step_seconds = self.step_seconds(samples)
        forward, backward = (w / s if s > 0 and w > 0 else 1.0 for w, s in zip(step_seconds, sums, strict=True))
        return forward, backward


def _interpolate(samples: Sequence[int], values: Sequence[Both], target: int) -> Both:
    """Return values on the line through the two nearest sizes, at least a tenth of the proportional value."""
    if len(samples) == 1:
        return (values[0][0] * target / samples[0], values[0][1] * target / samples[0])
    # Beyond the measured sizes the outermost pair is extrapolated; the floor keeps noise from giving negative
    # times.
    right = min(max(bisect.bisect_left(samples, target), 1), len(samples) - 1)
    (x0, a), (x1, b) = (samples[right - 1], values[right - 1]), (samples[right], values[right])
    share = (target - x0) / (x1 - x0)
    forward, backward = (
        max(u + share * (v - u), 0.1 * min(u * target / x0, v * target / x1)) for u, v in zip(a, b, strict=True)
    )
    return forward, backward


@dataclass
class ProfileClock:
    """Prices operators by a profile; sharded ones by the modelled fraction of the measured time.

    Attributes:
        profile: measured seconds of the graph's nodes.
        device_clock: model of the device, for the fraction on a rank.
        speed: speed of the priced device relative to the measured one.
    """

    profile: Profile
    device_clock: Clock
    speed: float = 1.0
    _ratios: dict[int, Both] = field(default_factory=dict)

    def __call__(self, work: OperatorWork) -> Both:
        """Return seconds of both passes, scaled so that all nodes add up to a whole pass."""
        if work.samples not in self._ratios:
            self._ratios[work.samples] = self.profile.step_to_nodes_ratio(work.samples)
        forward, backward = self.profile.node_seconds(work.operator.name, work.samples, work.shares_statistics)
        up, down = self._ratios[work.samples]
        part = (1.0, 1.0) if work.is_whole else self._rank_share(work)
        return forward * up * part[0] / self.speed, backward * down * part[1] / self.speed

    def issued(self, work: OperatorWork) -> Both:
        """Return 0: measured seconds include the host's."""
        return 0.0, 0.0

    def _rank_share(self, work: OperatorWork) -> Both:
        """Return the fraction of the operator's time on a rank, by the device model."""
        rank_seconds = self.device_clock(work)
        total = self.device_clock(replace(work, inputs=work.whole_inputs, outputs=work.whole_outputs, work_share=None))
        forward, backward = (a / b if b > 0 else 1.0 for a, b in zip(rank_seconds, total, strict=True))
        return forward, backward
