"""Machine inventory, without measuring: cores, memory and accelerators, and the cluster that presets make of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from polylane.cluster.catalogue import device_presets, link_presets, usual_links
from polylane.cluster.cluster import Cluster, Hosts
from polylane.cluster.device import Device
from polylane.cluster.figures import format_size
from polylane.cluster.link import Link
from polylane.errors import PolylaneError
from polylane.runtime.workers.threads import threads_per_worker
from polylane.runtime.workers.world import accelerator_type, affine_cores

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

USUAL = 4  # workers by default, at most
LEAST_MEMORY = 512 << 20  # bytes that a worker needs to start: torch, its buffers, a small model
EACH_CORE = 4  # workers per core at most; more would only wait for each other
AT_LEAST = 8  # workers that are allowed on every machine

# Parts of a preset's name that give memory or power ("80g", "700w"), not the model.
_SIZE = re.compile(r"\d+[gw]")
_ALIKE = 0.12  # relative difference between the memory that a driver reports and the nominal one


def cores() -> int:
    """Return the cores that this process may use: those of its CPU affinity, limited by its cgroup quota."""
    return max(1, min([affine_cores(), *map(int, _quotas(CGROUPS, OWN_CGROUPS))]))


def _quotas(root: Path, listing: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroups (version 1 or 2) in cores; nothing if there is no limit."""
    for folder in _folders(root, listing, "cpu"):
        limit = (_read_text(folder / "cpu.max") or " ".join(_read_text(folder / name) for name in _QUOTA)).split()
        if len(limit) == 2 and limit[0] != "max" and float(limit[0]) > 0:
            yield float(limit[0]) / float(limit[1])


_QUOTA = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def _folders(root: Path, listing: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors; lines read "4:cpu,cpuacct:/path"."""
    for line in _read_text(listing).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            # Hierarchy 0 is cgroup version 2; version 1 has a folder for each controller.
            base = root if number == "0" else root / controller
            inner = base / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(base))


def _read_text(file: Path) -> str:
    """Return the text of a file of the system; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not every system and container has the file
        return ""


def available_memory() -> int:
    """Return the bytes of memory available to new processes, limited by the cgroup."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read_text(Path("/proc/meminfo")))
    free = int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_text(folder / name) for folder in _folders(CGROUPS, OWN_CGROUPS, "memory") for name in _MEMORY]
    return min([free, *(int(limit) for limit in limits if limit.strip().isdecimal())])


_MEMORY = ("memory.max", "memory.limit_in_bytes")


def cpu_name() -> str:
    """Return the processor's model name from /proc/cpuinfo; "cpu" if it is not there."""
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return "cpu"


def accelerators() -> int:
    """Return how many workers can have an accelerator of their own; 0 on a CPU-only machine."""
    return torch.accelerator.device_count() if accelerator_type() is not None else 0


def usual_workers() -> int:
    """Return the default number of workers: one per accelerator or core, at most :data:`USUAL`."""
    return min(USUAL, accelerators() or cores())


def check_workers(workers: int) -> None:
    """Check that the machine can run this number of workers.

    Raises:
        PolylaneError: fewer than one worker, or more than accelerators, memory or cores allow.
    """
    if workers < 1:
        raise PolylaneError(f"--workers must be at least 1, not {workers}")
    devices = accelerators()
    if devices:
        if workers > devices:
            raise PolylaneError(f"--workers {workers}: this machine has {devices} accelerator(s), one for each worker")
        return
    max_workers = max(AT_LEAST, EACH_CORE * cores())
    if workers > max_workers:
        raise PolylaneError(f"--workers {workers}: at most {max_workers} can take turns on {cores()} core(s)")
    memory = available_memory()
    if workers * LEAST_MEMORY > memory:
        raise PolylaneError(
            f"--workers {workers} would need {format_size(workers * LEAST_MEMORY)} of memory to start, "
            f"and {format_size(memory)} is free"
        )


def find_preset(name: str, memory: int) -> str | None:
    """Return the preset of an accelerator: all words of its name are in the driver's, and its memory is nearest.

    >>> find_preset("NVIDIA A100-SXM4-80GB", 80 << 30)
    'a100-80g'
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    differences = {
        preset: abs(figures["memory"] / memory - 1)
        for preset, figures in device_presets().items()
        if figures.get("type", "cuda") == "cuda"
        and words.issuperset(word for word in preset.split("-") if not _SIZE.fullmatch(word))
    }
    best = min(differences, key=differences.__getitem__, default=None)
    return best if best is not None and differences[best] < _ALIKE else None


def nearest_preset(memory: int) -> str:
    """Return the preset of an accelerator whose memory is nearest to so many bytes."""
    accelerator_presets = {
        preset: figures["memory"]
        for preset, figures in device_presets().items()
        if figures.get("type", "cuda") == "cuda"
    }
    return min(accelerator_presets, key=lambda preset: abs(accelerator_presets[preset] / memory - 1))


def device_kind() -> str:
    """Return the name of this machine's devices: of their preset, if there is one, else of the system."""
    if not accelerators():
        return cpu_name()
    properties = torch.cuda.get_device_properties(0)
    return find_preset(properties.name, properties.total_memory) or str(properties.name)


def preset_device(workers: int) -> Device:
    """Return a worker's device by preset: an accelerator, or a share of the CPU.

    Raises:
        PolylaneError: the accelerator has no preset.
    """
    if not accelerators():
        return _share_of_cpu(workers)
    properties = torch.cuda.get_device_properties(0)
    preset = find_preset(properties.name, properties.total_memory)
    if preset is None:
        raise PolylaneError(
            f"there is no preset for {properties.name}: measure it with polylane probe -o cluster.yaml, or plan for "
            f"the preset with the nearest memory: --cluster {accelerators()}:{nearest_preset(properties.total_memory)}"
        )
    return Device.model_validate({**device_presets()[preset], "memory": properties.total_memory})


def _share_of_cpu(workers: int) -> Device:
    share = {"kind": cpu_name(), "memory": max(1, available_memory() // workers)}
    return Device.model_validate({**device_presets()["cpu"], **share})


def local_cluster(workers: int | None = None) -> Cluster:
    """Return this machine as a cluster, from presets and its present cores and memory.

    Args:
        workers: number of workers; default: one for each accelerator, or each core.

    Raises:
        PolylaneError: fewer than one worker, more than the machine can run, or an accelerator without preset.
    """
    count = (accelerators() or cores()) if workers is None else workers
    check_workers(count)
    return _host(count, preset_device(count), shared_cores(count))


def running_cluster(workers: int, device_type: str) -> Cluster:
    """Return this machine as a cluster for workers already started, each with as many threads as this process.

    Args:
        workers: number of workers on this machine.
        device_type: type of the workers' devices, "cpu" or "cuda".

    Raises:
        PolylaneError: the accelerator has no preset.
    """
    device = _share_of_cpu(workers) if device_type == "cpu" else preset_device(workers)
    return _host(workers, device, max(1, cores() // torch.get_num_threads()))


def _host(workers: int, device: Device, at_once: int) -> Cluster:
    """Return a cluster of one host; of CPU workers ``at_once`` can compute without sharing cores."""
    on_cpu = device.type == "cpu"
    link = Link.model_validate(link_presets()[usual_links()["cpu" if on_cpu else device.kind]["link"]])
    if workers == 1:
        return Cluster((Hosts(devices=1, device=device, cores=at_once if on_cpu else None),))
    if not on_cpu:
        return Cluster((Hosts(devices=workers, device=device, link=link),))
    crowded = Link.model_validate(link_presets()["shared-memory-crowded"]) if workers > at_once else None
    return Cluster((Hosts(devices=workers, device=device, link=link, crowded=crowded, cores=at_once),))


def shared_cores(workers: int) -> int:
    """Return how many workers can compute at once without sharing cores, given the threads of each."""
    return max(1, cores() // threads_per_worker(workers))
