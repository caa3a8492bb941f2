"""Link: bandwidth and latency between devices of a host, hosts, racks or sites; an extended alpha-beta model."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from polylane.yaml_file import Count, StrictMapping

# "send" is a message from one device to another; the others are collectives.
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

# Far beyond any hardware, and so far from the limits of a float that no product or quotient of figures reaches those.
SMALLEST, LARGEST = 1e-18, 1e24
MOST_UNITS = 2**20  # of anything that is counted: devices of a host, hosts, cores, rows of a tile


def _refuse_tiny(value: float) -> float:
    if 0 < value < SMALLEST:
        raise ValueError(f"must be at least {SMALLEST:g}, not {value:g}")
    return value


def _drop_tiny(value: float) -> float:
    """Return 0 for less than any hardware has: a fit to measurements may find such figures where there is nothing."""
    return 0.0 if value < SMALLEST else value


_Number = {"strict": True, "allow_inf_nan": False}
_Tiny, _Negligible = pydantic.AfterValidator(_refuse_tiny), pydantic.AfterValidator(_drop_tiny)
Positive = Annotated[float, pydantic.Field(gt=0, le=LARGEST, **_Number), _Tiny]
Natural = Annotated[float, pydantic.Field(ge=0, le=LARGEST, **_Number), _Negligible]
Share = Annotated[float, pydantic.Field(gt=0, le=1, **_Number), _Tiny]
Units = Annotated[Count, pydantic.Field(le=MOST_UNITS)]


class Link(StrictMapping):
    """A link of a level of the cluster; all of that level's links are identical.

    ``s`` bytes, of which every device sends ``w`` in ``n`` steps, take

        latency + n · hop + (w + sqrt(w · half)) / (fraction · bandwidth) + s / local

    The first two terms and the bytes are the alpha-beta model (Thakur et al., Optimization of Collective Communication
    Operations in MPICH, IJHPCA 2005). The root is the ramp of a pipeline: the more bytes, the longer the chunks in
    which they are sent, and the less each of them waits for the ones before.

    Attributes:
        kind: name of the link, for reports.
        bandwidth: the most that one device can send over it, in one direction; bytes per second.
        total: what all devices of a host (of a rack, of a site, where it links those) can send over it at once, in
            bytes per second: a network card that they share, or a bus. None: every device has its own.
        latency: seconds from the start of a collective to its first byte.
        hop: seconds that each further step from device to device takes.
        fraction: share of the bandwidth that large messages reach.
        half: bytes sent by a device at which they reach half of that, latency not counted.
        local: bytes per second at which a device copies a collective's values into and out of its buffers. None: the
            copies overlap with the transfer.
        switch: share of the bandwidth that large messages reach where the switch itself sums them (NVLink SHARP); 0:
            it cannot.
        wired: where devices are wired to each other without a switch: the share of its bandwidth that each of 2, 3,
            4... of them can use, the rest of its wires leading elsewhere. Empty: a switch.
        cpu: how many cores its transfers keep busy at each end; 0: a card moves the bytes.
        fractions, latencies: the same as ``fraction`` and ``latency``, of one kind of collective or of "send", where
            they differ.
        sums: number of ranks -> seconds by which a sum of a few kilobytes between two computations delays all of them:
            its messages, waking up whoever sleeps, and the wait for the last one, since equal computations do not end
            at the same time. Other numbers are interpolated; empty: such a sum takes as long as an all-reduce that
            starts everywhere at once.
    """

    kind: str = "link"
    bandwidth: Positive
    total: Positive | None = None
    latency: Natural
    hop: Natural = 0.0
    fraction: Share = 1.0
    half: Natural = 0.0
    local: Positive | None = None
    switch: Annotated[float, pydantic.Field(ge=0, le=1, **_Number), _Negligible] = 0.0
    wired: tuple[Share, ...] = ()
    cpu: Natural = 0.0
    fractions: dict[Kind, Share] = pydantic.Field(default={})
    latencies: dict[Kind, Natural] = pydantic.Field(default={})
    sums: dict[Units, Natural] = pydantic.Field(default={})

    def delay(self, kind: Kind) -> float:
        """Return the seconds from the start of a collective to its first byte."""
        return self.latencies.get(kind, self.latency)

    def sum_delay(self, ranks: int) -> float | None:
        """Return the seconds of a small sum between computations over so many ranks; None: not known.

        Linear between the given numbers of ranks, constant beyond the last.
        """
        if not self.sums:
            return None
        points = sorted(self.sums.items())
        low, start = max((point for point in points if point[0] <= ranks), default=points[0])
        high, end = min((point for point in points if point[0] > ranks), default=(low, start))
        return start if high <= low else start + (end - start) * max(0, ranks - low) / (high - low)

    def solo_bandwidth(self, kind: Kind, devices: int = 2) -> float:
        """Return the bytes per second that each of some devices sends, with large messages; one direction."""
        # wired[0] is for 2 devices; the last entry also for more than it lists.
        wires = self.wired[min(max(devices, 2), len(self.wired) + 1) - 2] if self.wired else 1.0
        return self.fractions.get(kind, self.fraction) * self.bandwidth * wires

    def shared_bandwidth(self, kind: Kind) -> float | None:
        """Return the total bytes per second of all devices on one end, with large messages; None: no limit."""
        return None if self.total is None else self.fractions.get(kind, self.fraction) * self.total
