"""Measurements that are what known figures say, to the last digit: what a fit must find again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polylane.cluster.catalogue import device_presets
from polylane.cluster.cluster import Cluster, Hosts
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cost.network import collectives as network
from polylane.cost.operators.roofline import pass_seconds
from polylane.probe import cases as sweep
from polylane.probe.cases import OperatorCase, _attention, _bmm, _convolution, _linear, _moving
from polylane.probe.device_speed import TimedCase
from polylane.probe.effort import Effort
from polylane.probe.link_speed import TimedTraffic, group_arrangements, kinds_of

SIZES = tuple(1 << power for power in range(10, 25, 2))
OPERATIONS = [(case, case.describe_operation(torch.float32)) for case in sweep.cpu_cases()]


def operators(device: Device, dtype: str = "float32", families: Sequence[str] = ()) -> list[TimedCase]:
    """The sweep as a device would run it."""
    return [
        TimedCase(case.name, case.family, operation, dtype, *pass_seconds(operation, device, dtype))
        for case, operation in OPERATIONS
        if not families or case.family in families
    ]


def cluster(link: Link, workers: int) -> Cluster:
    """One host."""
    device = Device.model_validate(device_presets()["cpu"])
    return Cluster((Hosts(devices=workers, device=device, link=link),))


def messages(link: Link, workers: int) -> list[TimedTraffic]:
    """All traffic of so many workers as a link would carry it."""
    host, found = cluster(link, workers), []
    for ranks, groups in group_arrangements(workers):
        for kind in kinds_of(ranks):
            for size in SIZES:
                if kind == "send":
                    took = network.message_seconds(host, size, 0, 1, groups)
                else:
                    took = network.collective_seconds(host, kind, size, range(ranks), groups)
                found.append(TimedTraffic(kind, size, ranks, groups, took, link.cpu))
    return found


def small() -> list[OperatorCase]:
    """A few of a few microseconds each, for a quick and rough sweep."""
    cases = [_linear(n, n, n) for n in (32, 64, 128)]
    cases += [_linear(8, 64, 64), _linear(64, 64, 256), _bmm(16, 32, 32, 32), _convolution(4, 8, 16, 16, 3)]
    return [*cases, _attention(2, 2, 64, 32, True), *_moving(1 << 12), *_moving(1 << 15)]


def quick() -> Effort:
    """A second or two, and rough."""
    cases = small()
    return Effort(
        cases=tuple(cases),
        dtype_cases=tuple(case for case in cases if case.family == "matmul")[:3],
        rounds=1,
        case_seconds=0.005,
        stream_bytes=64 << 20,
        sizes=(1024, 16 * 1024, 256 * 1024),
        traffic_seconds=0.005,
        contention_seconds=0.05,
        warm_seconds=0.05,
        sums_seconds=0.005,
        sums_rounds=1,
    )
