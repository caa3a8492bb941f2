"""What is wrong with hosts is found in what their workers say and measure, and nothing is where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from polylane.cluster.link import Link
from polylane.probe.health.facts import AcceleratorFacts, WorkerHealth
from polylane.probe.health.judge import HealthFinding, Severity, judge_hosts
from polylane.probe.health.meeting import PairMeasurement

GB = 1 << 30
CARD = AcceleratorFacts("H100", "gpu0", 79 * GB, 80 * GB)


def worker(rank: int, **changes: Any) -> WorkerHealth:
    """A healthy worker, two of which are on each host."""
    host = f"node{rank // 2}"
    facts = WorkerHealth(
        rank=rank,
        local_rank=rank % 2,
        host=host,
        machine=host,
        versions={"polylane": "0.2", "torch": "2.13", "CUDA": "13.0"},
        accelerator=replace(CARD, identity=f"gpu{rank}"),
        cores=16,
        memory=100 * GB,
        shared_memory=16 * GB,
        open_files=65536,
        disk=1000 * GB,
        interface="eth0",
        address=f"10.0.0.{rank // 2}",
        interface_speed=10e9,
        matmul_seconds=0.001,
    )
    return replace(facts, **changes)


HEALTHY = [worker(rank) for rank in range(4)]
PAIRS = [PairMeasurement(0, 1, "", 50e-6, 1.1e9, 0.001), PairMeasurement(1, 0, "", 50e-6, 1.0e9, -0.001)]


def problems(findings: Sequence[HealthFinding]) -> list[HealthFinding]:
    return [finding for finding in findings if finding.level]


def test_nothing_is_wrong_with_healthy_hosts() -> None:
    findings = judge_hosts(HEALTHY, PAIRS, [True] * 4)
    assert problems(findings) == []
    assert len({finding.subject for finding in findings}) == len(findings) == 10, "a line for each subject"
    assert problems(judge_hosts(HEALTHY[:1], [])) == [], "nor with one that is alone"


def change(rank: int, **changes: Any) -> Callable[[], list[HealthFinding]]:
    return lambda: judge_hosts([*HEALTHY[:rank], worker(rank, **changes), *HEALTHY[rank + 1 :]], PAIRS, [True] * 4)


def pairs_of_three(slow: int) -> list[PairMeasurement]:
    ends = [(source, target) for source in range(3) for target in range(3) if source != target]
    return [PairMeasurement(*pair, "", 50e-6, 1e8 if slow in pair else 1.1e9) for pair in ends]


def pairs_with(number: int, **changes: Any) -> list[PairMeasurement]:
    return [replace(pair, **changes) if at == number else pair for at, pair in enumerate(PAIRS)]


FAULTS: dict[str, tuple[Callable[[], list[HealthFinding]], Severity, str, str]] = {
    "another torch": (
        change(2, versions={"polylane": "0.2", "torch": "2.14", "CUDA": "13.0"}), Severity.FAILURE, "versions",
        "torch is not the same: 2.13 on node0, node1; 2.14 on node1",
    ),
    "no CUDA on one": (
        change(3, versions={"polylane": "0.2", "torch": "2.13"}, accelerator=None, hidden="a driver is there, torch"),
        Severity.FAILURE, "devices", "rank 3 on node1: a driver is there",
    ),
    "a lost card": (change(1, accelerator=None), Severity.FAILURE, "devices", "rank 1 on node0 has no accelerator"),
    "a taken card": (
        change(1, accelerator=replace(CARD, identity="gpu1", free=30 * GB)), Severity.FAILURE, "devices",
        "50.0 GiB of 80.0",
    ),
    "one card for two": (
        change(1, accelerator=replace(CARD, identity="gpu0")), Severity.WARNING, "devices", "ranks 0, 1 share one",
    ),
    "another card": (
        change(3, accelerator=replace(CARD, identity="gpu3", name="A100")), Severity.WARNING, "devices", "A100, H100",
    ),
    "a slow device": (change(3, matmul_seconds=0.0021), Severity.WARNING, "speed", "rank 3 on node1 takes 2.1 times"),
    "small shared memory": (change(2, shared_memory=64 << 20), Severity.FAILURE, "shared memory", "node1: 64.0 MiB"),
    "few files": (change(0, open_files=256), Severity.FAILURE, "limits", "node0: a process may have 256 open files"),
    "a full disk": (change(2, disk=1 << 20), Severity.FAILURE, "disk", "node1: 1.00 MiB are free"),
    "a folder of root's": (change(0, folder_problem="/d may not be written"), Severity.FAILURE, "disk", "/d may not"),
    "an unshared folder": (
        lambda: judge_hosts(HEALTHY, PAIRS, [True, True, False, False]), Severity.FAILURE, "run folder",
        "not there on node1",
    ),
    "the loopback": (
        change(2, interface="lo", address="127.0.1.1"), Severity.FAILURE, "network", "node1 would listen at lo",
    ),
    "a nameless host": (
        change(0, name_problem="node0: unknown", interface="", address=""), Severity.FAILURE, "network",
        "its own name leads",
    ),
    "a blocked port": (
        lambda: judge_hosts(HEALTHY, pairs_with(1, problem="10.0.0.0:4: timed out"), [True] * 4), Severity.FAILURE,
        "network", "node1 does not reach node0",
    ),
    "a skewed clock": (
        lambda: judge_hosts(HEALTHY, pairs_with(0, clock_ahead=-90.0), [True] * 4), Severity.WARNING, "clocks",
        "the clock of node1 is 90.0 s behind node0",
    ),
    "a slow link": (
        lambda: judge_hosts(HEALTHY, pairs_with(1, bandwidth=1.2e8), [True] * 4), Severity.WARNING, "links",
        "node1 to node0: 0.96 Gb/s",
    ),
    "a host of three with a slow link": (
        lambda: judge_hosts([worker(rank) for rank in range(6)], pairs_of_three(slow=2), [True] * 6), Severity.WARNING,
        "links", "node2: at most 0.80 Gb/s to and from all other hosts, where 8.80 of all hosts is usual",
    ),
    "a link slower than the file says": (
        lambda: judge_hosts(HEALTHY, PAIRS, [True] * 4, Link(bandwidth=25e9, latency=1e-6)), Severity.WARNING, "links",
        "200.00 the cluster file says",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_host_and_its_mend(fault: str) -> None:
    judge, level, subject, text = FAULTS[fault]
    found = problems(judge())
    assert {finding.subject for finding in found} - {"versions"} <= {subject}, "and nothing else"
    assert any(finding.level is level and finding.subject == subject and text in finding.text for finding in found), (
        found
    )
    assert all(finding.mend for finding in found)
