"""Judgement of hosts: what of their facts and measurements is wrong, how badly, and what mends it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from polylane.cluster.figures import format_size
from polylane.cluster.link import Link
from polylane.probe.health.facts import WorkerHealth
from polylane.probe.health.meeting import PairMeasurement

# Below the first of each pair a training may fail, below the second it may be hindered; in bytes, or files.
SHARED_MEMORY = (128 << 20, 1 << 30)
DISK = (1 << 30, 10 << 30)
OPEN_FILES = (512, 4096)
FREE_DEVICE = (0.5, 0.9)  # fractions of an accelerator's memory
CLOCKS = 2.0  # seconds by which clocks may differ: times of logs and of checkpoints are compared by people
SLOW_DEVICE, SLOW_LINK = 1.5, 0.5  # times the median of all workers; fraction of the usual bandwidth
SLOW_INTERFACE = 0.3  # fraction of what an interface says it has, for one connection


class Severity(IntEnum):
    """How bad a finding is."""

    FINE = 0
    WARNING = 1
    FAILURE = 2


@dataclass(frozen=True)
class HealthFinding:
    """One line of the report.

    Attributes:
        level: how bad it is.
        subject: what was looked at.
        text: what was found, with the rank or the host.
        mend: what to do; "" where nothing is to be done.
    """

    level: Severity
    subject: str
    text: str
    mend: str = ""


def judge_hosts(
    facts: Sequence[WorkerHealth],
    pairs: Sequence[PairMeasurement],
    seen_by: Sequence[bool] | None = None,
    link: Link | None = None,
) -> list[HealthFinding]:
    """Return a finding for every subject, or several where something is wrong with it.

    Args:
        facts: of every worker, by rank.
        pairs: what the hosts measured of each other.
        seen_by: of every worker, whether it sees the file that rank 0 wrote into the run's folder; None: no folder.
        link: the link between hosts as it is known; None: hosts are compared with each other.
    """
    firsts = list({worker.machine: worker for worker in reversed(facts)}.values())[::-1]
    findings = list[HealthFinding]()
    for subject, problem_rows in (
        ("versions", _judge_versions(facts)),
        ("devices", _judge_devices(facts)),
        ("speed", _judge_speed(facts)),
        ("shared memory", _judge_shared_memory(firsts)),
        ("limits", _judge_limits(firsts)),
        ("disk", _judge_disk(firsts)),
        ("run folder", _judge_folder(facts, seen_by)),
        ("network", _judge_network(firsts, pairs)),
        ("clocks", _judge_clocks(firsts, pairs)),
        ("links", _judge_links(firsts, pairs, link)),
    ):
        problems = [HealthFinding(level, subject, text, mend) for level, text, mend in problem_rows]
        summary = _SUMMARIES[subject](facts, pairs) if not problems else ""
        findings += problems or ([HealthFinding(Severity.FINE, subject, summary)] if summary else [])
    return findings


Problem = tuple[Severity, str, str]


def _name(worker: WorkerHealth) -> str:
    return f"rank {worker.rank} on {worker.host}"


def _judge_versions(facts: Sequence[WorkerHealth]) -> Iterator[Problem]:
    for software in dict.fromkeys(name for worker in facts for name in worker.versions):
        hosts: dict[str, list[str]] = {}
        for worker in facts:
            hosts.setdefault(worker.versions.get(software, "none"), []).append(worker.host)
        if len(hosts) > 1:
            listed = "; ".join(f"{version} on {', '.join(dict.fromkeys(names))}" for version, names in hosts.items())
            yield (
                Severity.FAILURE,
                f"{software} is not the same: {listed}",
                f"install one version of {software} everywhere",
            )


def _judge_devices(facts: Sequence[WorkerHealth]) -> Iterator[Problem]:
    with_card = [worker for worker in facts if worker.accelerator is not None]
    for worker in facts:
        if worker.hidden:
            yield Severity.FAILURE, f"{_name(worker)}: {worker.hidden}", "install torch for this driver's CUDA"
        elif worker.accelerator is None and with_card:
            yield Severity.FAILURE, f"{_name(worker)} has no accelerator, others have", "see nvidia-smi on that host"
        card = worker.accelerator
        if card is not None and card.free < FREE_DEVICE[1] * card.total:
            level = Severity.FAILURE if card.free < FREE_DEVICE[0] * card.total else Severity.WARNING
            use = f"{format_size(card.total - card.free)} of {format_size(card.total)} are taken"
            yield level, f"{_name(worker)}: of {card.name} {use}", "end the processes that nvidia-smi shows"
    names = {worker.accelerator.name for worker in with_card if worker.accelerator}
    if len(names) > 1:
        yield Severity.WARNING, f"accelerators differ: {', '.join(sorted(names))}", "describe them in a cluster file"
    identities: dict[tuple[str, str], list[int]] = {}
    for worker in with_card:
        assert worker.accelerator is not None
        identities.setdefault((worker.machine, worker.accelerator.identity), []).append(worker.rank)
    for ranks in identities.values():
        if len(ranks) > 1:
            listed = ", ".join(map(str, ranks))
            yield (
                Severity.WARNING,
                f"ranks {listed} share one accelerator",
                "start as many workers as there are accelerators",
            )


def _judge_speed(facts: Sequence[WorkerHealth]) -> Iterator[Problem]:
    usual = statistics.median_low([worker.matmul_seconds for worker in facts])
    for worker in facts:
        if worker.matmul_seconds > SLOW_DEVICE * usual:
            times = worker.matmul_seconds / usual
            yield (
                Severity.WARNING,
                f"{_name(worker)} takes {times:.1f} times as long as others for the same product of matrices",
                "look for other processes, for heat, and for a power limit on that host",
            )


def _judge_shared_memory(firsts: Sequence[WorkerHealth]) -> Iterator[Problem]:
    for worker in firsts:
        free = worker.shared_memory
        if free is not None and free < SHARED_MEMORY[1]:
            level = Severity.FAILURE if free < SHARED_MEMORY[0] else Severity.WARNING
            mend = "docker run --shm-size 8g, or an emptyDir with medium: Memory at /dev/shm of a pod"
            yield level, f"{worker.host}: {format_size(free)} are free in /dev/shm", mend


def _judge_limits(firsts: Sequence[WorkerHealth]) -> Iterator[Problem]:
    for worker in firsts:
        if worker.open_files < OPEN_FILES[1]:
            level = Severity.FAILURE if worker.open_files < OPEN_FILES[0] else Severity.WARNING
            yield level, f"{worker.host}: a process may have {worker.open_files} open files", "ulimit -n 65536"
        if worker.memory < 1 << 30:
            yield (
                Severity.FAILURE,
                f"{worker.host}: {format_size(worker.memory)} of memory are free",
                "end other processes",
            )


def _judge_disk(firsts: Sequence[WorkerHealth]) -> Iterator[Problem]:
    for worker in firsts:
        if worker.folder_problem:
            yield Severity.FAILURE, f"{worker.host}: {worker.folder_problem}", "give another folder with --run"
        elif worker.disk is not None and worker.disk < DISK[1]:
            level = Severity.FAILURE if worker.disk < DISK[0] else Severity.WARNING
            mend = "free some, or give a folder on another disk with --run"
            yield level, f"{worker.host}: {format_size(worker.disk)} are free for the run's folder", mend


def _judge_folder(facts: Sequence[WorkerHealth], seen_by: Sequence[bool] | None) -> Iterator[Problem]:
    blind = [worker for worker, sees in zip(facts, seen_by or [True] * len(facts), strict=True) if not sees]
    if blind:
        hosts = ", ".join(dict.fromkeys(worker.host for worker in blind))
        yield (
            Severity.FAILURE,
            f"what rank 0 writes into the run's folder is not there on {hosts}",
            "give a folder on a disk that all hosts share with --run: all workers write their part of a checkpoint",
        )


def _judge_network(firsts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> Iterator[Problem]:
    several = len(firsts) > 1
    for worker in firsts if several else ():
        if worker.name_problem:
            mend = "set GLOO_SOCKET_IFNAME to the interface to use, or add the name to /etc/hosts"
            yield Severity.FAILURE, f"{worker.host}: its own name leads nowhere ({worker.name_problem})", mend
        elif worker.address.startswith("127.") or not worker.interface:
            listener = worker.interface or worker.address or "no address"
            yield (
                Severity.FAILURE,
                f"{worker.host} would listen at {listener}, where other hosts do not reach it",
                "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts (ip -brief address)",
            )
    names = {worker.interface for worker in firsts if worker.interface}
    if several and len(names) > 1:
        listed = ", ".join(f"{worker.interface} on {worker.host}" for worker in firsts)
        yield Severity.WARNING, f"hosts use interfaces of several names: {listed}", "check that they are of one network"
    for pair in pairs:
        if pair.problem:
            ends = f"{firsts[pair.source].host} does not reach {firsts[pair.target].host}"
            yield Severity.FAILURE, f"{ends} ({pair.problem})", "open all ports between the hosts, in both directions"


def _judge_clocks(firsts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> Iterator[Problem]:
    for pair in pairs:
        # Of both directions the one from the earlier host: they measure the same.
        if not pair.problem and pair.source < pair.target and abs(pair.clock_ahead) > CLOCKS + pair.latency:
            side = "ahead of" if pair.clock_ahead > 0 else "behind"
            ends = f"{firsts[pair.target].host} is {abs(pair.clock_ahead):.1f} s {side} {firsts[pair.source].host}"
            yield Severity.WARNING, f"the clock of {ends}", "synchronize the clocks (chrony, ntp)"


def _judge_links(
    firsts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement], link: Link | None
) -> Iterator[Problem]:
    reached = [pair for pair in pairs if not pair.problem]
    if not reached:
        return
    best = {host: max(pair.bandwidth for pair in reached if host in _ends(pair)) for host in _hosts_of(reached)}
    # Of hosts, not of pairs: with three of them one slow host is an end of most.
    usual = statistics.median_high(best.values()) if link is None else link.bandwidth
    source = "of all hosts is usual" if link is None else "the cluster file says"
    slow = [host for host, bandwidth in best.items() if bandwidth < SLOW_LINK * usual]
    if len(slow) < len(best):
        for host in slow:
            rate = f"at most {8 * best[host] / 1e9:.2f} Gb/s to and from all other hosts"
            text = f"{firsts[host].host}: {rate}, where {8 * usual / 1e9:.2f} {source}"
            yield Severity.WARNING, text, "check that host's cable, port and duplex"
        reached = [pair for pair in reached if not {*slow} & {*_ends(pair)}]
    for pair in reached:
        ends = f"{firsts[pair.source].host} to {firsts[pair.target].host}"
        rate = f"{8 * pair.bandwidth / 1e9:.2f} Gb/s"
        speed = firsts[pair.source].interface_speed
        if pair.bandwidth < SLOW_LINK * usual:
            yield (
                Severity.WARNING,
                f"{ends}: {rate}, where {8 * usual / 1e9:.2f} {source}",
                "check cables, ports and duplex",
            )
        elif link is None and speed is not None and 8 * pair.bandwidth < SLOW_INTERFACE * speed:
            yield (
                Severity.WARNING,
                f"{ends}: {rate}, where {firsts[pair.source].interface} says {speed / 1e9:.0f} Gb/s",
                "check what else sends, and the links between; or write what is right into a cluster file (--cluster)",
            )


def _ends(pair: PairMeasurement) -> tuple[int, int]:
    return pair.source, pair.target


def _hosts_of(pairs: Sequence[PairMeasurement]) -> list[int]:
    return sorted({host for pair in pairs for host in _ends(pair)})


def _say_versions(facts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())


def _say_devices(facts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> str:
    card = facts[0].accelerator
    device = f"CPU, {facts[0].cores} cores" if card is None else f"{card.name}, {format_size(card.total)}"
    hosts = len({worker.machine for worker in facts})
    return f"{len(facts)} workers on {hosts} hosts: {device} each" if len(facts) > 1 else device


def _say_speed(facts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> str:
    times = [worker.matmul_seconds * 1e3 for worker in facts]
    return f"{min(times):.2f} to {max(times):.2f} ms for one product of matrices" if len(facts) > 1 else ""


def _say_network(facts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> str:
    return f"{len(pairs)} connections between hosts, over {facts[0].interface}" if pairs else ""


def _say_links(facts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> str:
    if not pairs:
        return ""
    rates, trips = [8 * pair.bandwidth / 1e9 for pair in pairs], [pair.latency * 1e6 for pair in pairs]
    return f"{min(rates):.2f} to {max(rates):.2f} Gb/s, {min(trips):.0f} to {max(trips):.0f} us there and back"


def _say_disk(facts: Sequence[WorkerHealth], pairs: Sequence[PairMeasurement]) -> str:
    free = [worker.disk for worker in facts if worker.disk is not None]
    return f"{format_size(min(free))} are free" if free else ""


# What is summary of a subject where nothing is wrong with it; nothing where there is nothing to say.
_SUMMARIES: Mapping[str, Callable[[Sequence[WorkerHealth], Sequence[PairMeasurement]], str]] = {
    "versions": _say_versions,
    "devices": _say_devices,
    "speed": _say_speed,
    "shared memory": lambda facts, pairs: (
        f"{format_size(min(w.shared_memory or 0 for w in facts))} are free in /dev/shm"
    ),
    "limits": lambda facts, pairs: f"{min(w.open_files for w in facts):,} open files",
    "disk": _say_disk,
    "run folder": lambda facts, pairs: "all workers see it" if facts[0].disk is not None and len(facts) > 1 else "",
    "network": _say_network,
    "clocks": lambda facts, pairs: "no two differ" if pairs else "",
    "links": _say_links,
}
