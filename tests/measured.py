"""Measurements that are what known figures say, to the last digit: what a fit must find again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polylane.cluster.catalogue import device_presets
from polylane.cluster.cluster import Cluster, Hosts
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cost import network
from polylane.cost.roofline import seconds
from polylane.probe import sweep
from polylane.probe.effort import Effort
from polylane.probe.rates import Timed
from polylane.probe.sweep import Case, _attention, _bmm, _convolution, _linear, _moving
from polylane.probe.traffic import Carried, arrangements, kinds_of

SIZES = tuple(1 << power for power in range(10, 25, 2))
OPERATIONS = [(case, case.operation(torch.float32)) for case in sweep.on_cpu()]


def operators(device: Device, dtype: str = "float32", families: Sequence[str] = ()) -> list[Timed]:
    """The sweep as a device would run it."""
    return [
        Timed(case.name, case.family, operation, dtype, *seconds(operation, device, dtype))
        for case, operation in OPERATIONS
        if not families or case.family in families
    ]


def cluster(link: Link, workers: int) -> Cluster:
    """One host."""
    device = Device.model_validate(device_presets()["cpu"])
    return Cluster((Hosts(devices=workers, device=device, link=link),))


def messages(link: Link, workers: int) -> list[Carried]:
    """All traffic of so many workers as a link would carry it."""
    host, found = cluster(link, workers), []
    for ranks, groups in arrangements(workers):
        for kind in kinds_of(ranks):
            for size in SIZES:
                if kind == "send":
                    took = network.transfer(host, size, 0, 1, groups)
                else:
                    took = network.collective(host, kind, size, range(ranks), groups)
                found.append(Carried(kind, size, ranks, groups, took, link.cpu))
    return found


def small() -> list[Case]:
    """A few of a few microseconds each, for a quick and rough sweep."""
    cases = [_linear(n, n, n) for n in (32, 64, 128)]
    cases += [_linear(8, 64, 64), _linear(64, 64, 256), _bmm(16, 32, 32, 32), _convolution(4, 8, 16, 16, 3)]
    return [*cases, _attention(2, 2, 64, 32, True), *_moving(1 << 12), *_moving(1 << 15)]


def quick() -> Effort:
    """A second or two, and rough."""
    cases = small()
    return Effort(
        cases=tuple(cases),
        rated=tuple(case for case in cases if case.family == "matmul")[:3],
        rounds=1,
        case_seconds=0.005,
        stream_bytes=64 << 20,
        sizes=(1024, 16 * 1024, 256 * 1024),
        traffic_seconds=0.005,
        sharing_seconds=0.05,
        warm_seconds=0.05,
    )
