"""A profile: the times of a recipe's own nodes, measured on the machine at a few batch sizes, as a clock."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polylane.cost.cost_table import Clock, OperatorWork

Both = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """What was measured of a graph on one device that was otherwise idle.

    Attributes:
        samples: the batch sizes that were measured, ascending.
        nodes: of every node, by name, seconds of its forward and backward pass at each of these sizes.
        steps: seconds of whole forward passes and backward passes at each of these sizes, which hold what no node has:
            the walk from node to node, gradients that are added up, caches that grow cold.
        update_seconds: seconds of one step of the optimizer on all parameters.
        shared: of the nodes that normalize over a batch, the same among replicas that share its statistics, without
            the sums that they wait for.
        host_contention: how fast each of so many copies runs its passes at once on this machine, in parts of the speed
            of one
            alone, cores aside (:func:`polylane.profiling.host_contention.together`); empty where that was not measured.
    """

    samples: tuple[int, ...]
    nodes: Mapping[str, tuple[Both, ...]]
    steps: tuple[Both, ...]
    update_seconds: float = 0.0
    shared: Mapping[str, tuple[Both, ...]] = field(default_factory=dict)
    host_contention: Mapping[int, float] = field(default_factory=dict)

    def node_seconds(self, name: str, samples: int, shared: bool = False) -> Both:
        """Seconds of a node's passes, between the measured sizes and beyond them along straight lines."""
        measured = self.shared.get(name, self.nodes.get(name)) if shared else self.nodes.get(name)
        if measured is None:
            return 0.0, 0.0
        return _interpolate(self.samples, measured, samples)

    def step_seconds(self, samples: int) -> Both:
        """Seconds of whole passes."""
        return _interpolate(self.samples, self.steps, samples)

    def step_to_nodes_ratio(self, samples: int) -> Both:
        """Whole passes over the sum of their nodes."""
        sums = [0.0, 0.0]
        for name in self.nodes:
            for way, seconds in enumerate(self.node_seconds(name, samples)):
                sums[way] += seconds
        whole = self.step_seconds(samples)
        forward, backward = (w / s if s > 0 and w > 0 else 1.0 for w, s in zip(whole, sums, strict=True))
        return forward, backward


def _interpolate(samples: Sequence[int], values: Sequence[Both], wanted: int) -> Both:
    """Through the two measured sizes around ``wanted``; never below a tenth of what is in proportion."""
    if len(samples) == 1:
        return (values[0][0] * wanted / samples[0], values[0][1] * wanted / samples[0])
    right = min(max(bisect.bisect_left(samples, wanted), 1), len(samples) - 1)
    (x0, a), (x1, b) = (samples[right - 1], values[right - 1]), (samples[right], values[right])
    share = (wanted - x0) / (x1 - x0)
    forward, backward = (
        max(u + share * (v - u), 0.1 * min(u * wanted / x0, v * wanted / x1)) for u, v in zip(a, b, strict=True)
    )
    return forward, backward


@dataclass
class ProfileClock:
    """Measured nodes; where a rank has only a part of one, the modelled share of the measured time.

    Attributes:
        profile: of the graph.
        device_clock: the clock of the device.
        speed: of the device in question, 1 where it is as fast as the measured one.
    """

    profile: Profile
    device_clock: Clock
    speed: float = 1.0
    _ratios: dict[int, Both] = field(default_factory=dict)

    def __call__(self, work: OperatorWork) -> Both:
        """As :class:`polylane.cost.cost_table.Clock` says."""
        if work.samples not in self._ratios:
            self._ratios[work.samples] = self.profile.step_to_nodes_ratio(work.samples)
        forward, backward = self.profile.node_seconds(work.operator.name, work.samples, work.shares_statistics)
        up, down = self._ratios[work.samples]
        part = (1.0, 1.0) if work.is_whole else self._rank_share(work)
        return forward * up * part[0] / self.speed, backward * down * part[1] / self.speed

    def issued(self, work: OperatorWork) -> Both:
        """Nothing on top: what was measured has it."""
        return 0.0, 0.0

    def _rank_share(self, work: OperatorWork) -> Both:
        """The rank's share of the operator's time, by the model."""
        own = self.device_clock(work)
        all_ = self.device_clock(replace(work, inputs=work.whole_inputs, outputs=work.whole_outputs, work_share=None))
        forward, backward = (a / b if b > 0 else 1.0 for a, b in zip(own, all_, strict=True))
        return forward, backward
