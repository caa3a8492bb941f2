"""Probe result: fit device, link and contention figures to the workers' measurements, as a one-host cluster file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polylane.cluster import cluster_file as read
from polylane.cluster.catalogue import device_presets
from polylane.cluster.cluster import Cluster, Hosts
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.probe import fit_device, fit_link
from polylane.probe.fit_device import FitErrors
from polylane.probe.link_speed import TimedTraffic
from polylane.probe.machine import available_memory, cpu_name, find_preset, shared_cores
from polylane.probe.measure import Accelerator, WorkerMeasurements
from polylane.profiling.machine_load import MachineLoad

DIGITS = 4  # significant digits of a figure


@dataclass(frozen=True)
class MeasuredMachine:
    """This machine as a cluster, and how well the fitted figures reproduce the measurements.

    Attributes:
        cluster: cluster of this one host.
        threads: number of threads of each worker.
        device: relative errors of the device model over the sweep.
        link: median and worst relative error of the link model over all traffic; None for one worker.
    """

    cluster: Cluster
    threads: int
    device: FitErrors
    link: tuple[float, float] | None

    def text(self, when: str, load: MachineLoad) -> str:
        """Return the cluster file, headed by a comment on the origin of its figures.

        Args:
            when: date and time of the measurement.
            load: what disturbed the measurement.
        """
        workers, off = self.cluster.count, self.device
        lines = [
            f"# Measured by polylane probe, {when}: {_many(workers, 'worker')} of {_many(self.threads, 'thread')}, "
            f"torch {torch.__version__}; meanwhile {load}.",
            f"# Figures against what was measured: operators {off.median:.0%} off (median; worst {off.worst:.0%}, "
            f"{off.worst_case})"
            + ("." if self.link is None else f", messages {self.link[0]:.0%} ({self.link[1]:.0%})."),
        ]
        return "\n".join([*lines, read.dump(self.cluster)])


def _many(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def conclude(data: WorkerMeasurements, workers: int) -> MeasuredMachine:
    """Fit the machine's figures to the measurements of its workers."""
    link = crowded = off = None
    if data.timed_traffic:
        link = fit_measured_link(data.timed_traffic, data.sums)
        errors = fit_link.link_errors(link, data.timed_traffic)
        if data.crowded is not None:
            crowded = fit_measured_link(data.crowded.timed_traffic, data.crowded.sums)
            errors += fit_link.link_errors(crowded, data.crowded.timed_traffic)
        off = statistics.median(errors), max(errors)
    fields: dict[str, Any]
    if data.gpu is None:
        device = _cpu_device(data, workers)
        fields = {"cores": shared_cores(workers), "contention": data.contention}
    else:
        device, fields = _gpu_device(data, data.gpu), {}
        link = link and link.model_copy(update={"cpu": 0.0})  # the CPU time measured was busy waiting
    device = device.model_copy(update={"codecs": _rounded(data.codecs)})
    links = {"link": link, "crowded": crowded}
    cluster = Cluster((Hosts.model_validate({"devices": workers, "device": device, **links, **_rounded(fields)}),))
    return MeasuredMachine(cluster, data.threads, fit_device.fit_errors(device, data.timed_cases), off)


def fit_measured_link(timed: Sequence[TimedTraffic], sums: Mapping[int, float] = {}) -> Link:
    """Fit a link to traffic, with the seconds of small sums between computations as they were measured."""
    fitted = fit_link.fit_link(timed).model_copy(update={"sums": dict(sums)})
    return Link.model_validate(_rounded(fitted.model_dump()))


def _cpu_device(data: WorkerMeasurements, workers: int) -> Device:
    """Fit a worker's share of the CPU."""
    preset = Device.model_validate(device_presets()["cpu"])
    facts = {"kind": cpu_name(), "memory": max(1, available_memory() // workers), "price": 0.0}
    base = preset.model_copy(update={**facts, "flops": {}, "achieved": {}})
    return _to_digits(fit_device.fit_device(base, data.timed_cases, data.bandwidth))


def _gpu_device(data: WorkerMeasurements, gpu: Accelerator) -> Device:
    """Fit a GPU; peak rates, price and tile sizes come from its preset, if there is one."""
    preset = find_preset(gpu.name, gpu.memory)
    base = Device.model_validate(device_presets()[preset or _GENERIC])
    facts: dict[str, Any] = {"memory": gpu.memory, "units": gpu.units, "dispatch": gpu.dispatch}
    if preset is None:
        facts |= {"kind": gpu.name, "flops": {}, "achieved": {}, "price": 0.0}
    return _to_digits(fit_device.fit_device(base.model_copy(update=facts), data.timed_cases, data.bandwidth, tiles=()))


_GENERIC = "a100-80g"  # the preset whose tiles an unknown GPU gets


def _to_digits(device: Device) -> Device:
    return Device.model_validate(_rounded(device.model_dump()))


def _rounded(tree: Any) -> Any:
    """Round every float in nested data to :data:`DIGITS` significant digits."""
    if isinstance(tree, float):
        return float(f"{tree:.{DIGITS}g}")
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    return tree
