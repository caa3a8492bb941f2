"""What is known of a machine without measuring: cores, memory, names, presets; and what it cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from polylane.cluster import cluster_file as read
from polylane.errors import PolylaneError
from polylane.probe import machine
from polylane.probe.machine import check_workers, cores, find_preset, local_cluster, nearest_preset, running_cluster
from polylane.yaml_file import parse

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "memory", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 85_024_112_640, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 42_297_131_008, "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", 42_297_131_008, "a100-40g"),
        ("NVIDIA H100 80GB HBM3", 85_024_112_640, "h100-80g"),
        ("NVIDIA H200", 150_109_880_320, "h200"),
        ("Tesla V100-SXM2-32GB", 34_079_637_504, "v100"),
        ("Tesla P40", 24_032_378_880, "p40"),
        ("NVIDIA GeForce GTX 1080 Ti", 11_719_409_664, "gtx-1080-ti"),
        ("NVIDIA GeForce GTX 1080", 8 * GIB, None),
        ("Tesla V100-SXM2-16GB", 16 * GIB, None),  # another device, though its name has the words
        ("NVIDIA GeForce RTX 4090", 25_386_352_640, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * GIB, None),
        ("NVIDIA GeForce RTX 3090", 25_438_126_080, "rtx-3090"),
        ("NVIDIA GeForce RTX 5090", 33_660_600_320, "rtx-5090"),
        ("NVIDIA RTX A6000", 51_033_931_776, "a6000"),
        ("NVIDIA A10", 24_146_608_128, "a10"),
        ("NVIDIA L4", 23_665_573_888, "l4"),
        ("NVIDIA L40S", 47_810_936_832, "l40s"),
        ("Tesla T4", 15_835_660_288, "t4"),
        ("NVIDIA B200", 191_502_483_456, "b200"),
        ("NVIDIA GB200", 198_712_492_032, "gb200"),
        ("AMD Instinct MI300X", 206_141_652_992, "mi300x"),
        ("NVIDIA GeForce GTX 1070", 8 * GIB, None),
    ],
)
def test_presets_by_the_names_that_drivers_give(name: str, memory: int, preset: str | None) -> None:
    assert find_preset(name, memory) == preset


@pytest.mark.parametrize(("memory", "preset"), [(10 * GIB, "gtx-1080-ti"), (16 * GIB, "t4"), (300 * GIB, "mi300x")])
def test_a_card_without_a_preset_is_told_the_nearest_one(memory: int, preset: str) -> None:
    assert nearest_preset(memory) == preset


def test_here_is_this_machine_and_a_file_can_say_it() -> None:
    cluster = local_cluster(2)
    assert cluster.count == 2 and cluster.host(1) == 0
    assert cluster.device(0).type == "cpu" and cluster.device(0).kind == machine.device_kind()
    assert cluster.cores(0) == cores() // max(1, cores() // 2) or cluster.cores(0) == cores()
    assert 2 * cluster.device(0).memory <= machine.available_memory() * 1.5
    assert cluster.link((0, 1)).kind == "shared-memory"
    assert read.from_mapping(parse(read.dump(cluster))) == cluster


def test_here_has_a_worker_for_each_core_where_nobody_says() -> None:
    assert local_cluster().count == cores()
    assert local_cluster(1).hosts[0].link is None


def test_workers_that_have_been_started_are_not_refused_and_have_the_threads_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (running_cluster(2, "cpu").count, running_cluster(2, "cpu").device(0).type) == (2, "cpu")
    assert running_cluster(10_000, "cpu").cores(0) == cores()  # the tests have one thread
    monkeypatch.setattr("torch.get_num_threads", lambda: 3 * cores())
    assert running_cluster(2, "cpu").cores(0) == 1


@pytest.mark.parametrize(
    ("workers", "said"),
    [(0, "--workers must be at least 1, not 0"), (-3, "not -3"), (10_000, "can take turns on")],
)
def test_workers_that_cannot_be(workers: int, said: str) -> None:
    with pytest.raises(PolylaneError, match=said):
        check_workers(workers)
    with pytest.raises(PolylaneError, match=said):
        local_cluster(workers)


def test_workers_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: GIB)
    check_workers(2)
    with pytest.raises(PolylaneError, match=r"--workers 3 would need 1.50 GiB .* and 1.00 GiB is free"):
        check_workers(3)


def quota(folder: Path, line: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Cores in control groups of which these files are, with so many cores to be bound to."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    own = folder / "own"
    own.write_text(line)
    monkeypatch.setattr(machine, "CGROUPS", folder)
    monkeypatch.setattr(machine, "OWN_CGROUPS", own)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    return cores()


def test_cores_are_those_that_control_groups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}
    assert quota(tmp_path / "2", "0::/a/b\n", second, monkeypatch) == 3
    first = {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}
    assert quota(tmp_path / "1", "5:memory:/\n4:cpu,cpuacct:/x\n", first, monkeypatch) == 1
    free = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    assert quota(tmp_path / "0", "4:cpu:/\n", free, monkeypatch) == 8
