"""From what workers saw to a cluster: GPUs too, whose figures are here what a preset would say."""

from __future__ import annotations

import pytest
import torch

from polylane.cluster import cluster_file as read
from polylane.cluster.catalogue import device_presets
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cost.operators.roofline import pass_seconds
from polylane.probe import cases as sweep
from polylane.probe.conclusion import conclude
from polylane.probe.device_speed import TimedCase
from polylane.probe.measure import Accelerator, WorkerMeasurements
from polylane.profiling.machine_load import MachineLoad
from polylane.yaml_file import parse
from tests.support.known_measurements import messages

H200 = Device.model_validate(device_presets()["h200"])
LINK = Link(bandwidth=3e11, latency=2e-5, latencies={"send": 9e-6}, cpu=0.9)


def seen(name: str, dispatch: float = 7e-6) -> WorkerMeasurements:
    timed = tuple(
        TimedCase(case.name, case.family, operation, dtype, *pass_seconds(operation, H200, dtype))
        for dtype, cases in (("bfloat16", sweep.gpu_cases()), ("float32", sweep.gpu_cases()[:12]))
        for case in cases
        for operation in (case.describe_operation(getattr(torch, dtype)),)
    )
    gpu = Accelerator(name, 150_109_880_320, 132, dispatch)
    return WorkerMeasurements(1, gpu, timed, H200.bandwidth, tuple(messages(LINK, 2)), {})


def test_a_gpu_with_a_preset_keeps_what_is_not_measured() -> None:
    measured = conclude(seen("NVIDIA H200"), 2)
    device, host = measured.cluster.device(0), measured.cluster.hosts[0]
    assert (device.kind, device.type, device.price) == ("h200", "cuda", H200.price)
    assert (device.memory, device.units, device.dispatch) == (150_109_880_320, 132, 7e-6)
    assert device.tiles == H200.tiles and device.flops["float8"] == H200.flops["float8"]
    assert host.cores is None and not host.contention
    assert host.link is not None and host.link.bandwidth == pytest.approx(3e11, rel=1e-3)
    assert host.link.cpu == 0


def test_a_gpus_figures_tell_what_was_measured() -> None:
    measured = conclude(seen("NVIDIA H200"), 2)
    assert measured.device.median < 0.02
    rate = measured.cluster.device(0).rate("bfloat16")
    assert rate == pytest.approx(H200.rate("bfloat16"), rel=0.1)


def test_a_gpu_without_a_preset_has_a_name_and_the_peaks_that_were_reached() -> None:
    measured = conclude(seen("NVIDIA Unheard-Of"), 2)
    device = measured.cluster.device(0)
    assert (device.kind, device.price) == ("NVIDIA Unheard-Of", 0.0)
    assert set(device.flops) == {"bfloat16", "float32"}
    assert read.from_mapping(parse(measured.text("now", MachineLoad()))) == measured.cluster
