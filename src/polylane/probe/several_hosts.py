"""Several hosts: what the workers of a launcher measure of their hosts and of the links between them, as one cluster.

    what is measured                              by whom
    operators, memory, links inside a host        the first host of each kind, as if it were alone (:mod:`.measure`)
    how fast each device is                       every worker
    how fast hosts reach each other               every pair of hosts, over plain sockets
    messages and collectives between hosts        their first workers, over the transport that a plan has

Hosts of one kind have equal devices and as many workers. A host that others reach more slowly than these reach each
other becomes a rack of its own in the cluster: links of racks are slower than those inside.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import networkx
import torch

from polylane.cluster import cluster_file
from polylane.cluster.cluster import Cluster, Hosts, Links
from polylane.cluster.link import Link
from polylane.errors import PolylaneError, format_plural
from polylane.probe import fit_link
from polylane.probe.conclusion import MeasuredMachine, conclude, fit_measured_link
from polylane.probe.effort import MB, Effort
from polylane.probe.fit_device import FitErrors
from polylane.probe.health.facts import WorkerHealth, collect_facts
from polylane.probe.health.meeting import Meeting, PairMeasurement
from polylane.probe.link_speed import TimedTraffic, measure_traffic
from polylane.probe.machine import device_kind
from polylane.probe.measure import Told, measure_machine
from polylane.profiling.machine_load import MachineLoad
from polylane.runtime.workers.launch_environment import Launch
from polylane.runtime.workers.world import World
from polylane.yaml_file import parse

NEAR = 0.5  # fraction of the fastest pair's bandwidth from which on hosts are in one rack
UNEQUAL = 1.15  # a device is slower or faster than its kind where its time differs by more than this factor
MACHINE_SECONDS = 300.0  # in which a host has measured itself
_TRANSFER_SECONDS = 0.15  # of the largest message that is measured, so that a slow link does not take minutes
_ALL_SHARE = 0.95  # of the sum of what workers reach alone, from which on they do not share a card


HostKind = tuple[str, int, int]


@dataclass(frozen=True)
class HostWorkers:
    """One host and its workers.

    Attributes:
        name: what the host calls itself.
        address: at which others reach it.
        ranks: of its workers, one after the other.
        device: name of its devices.
        cores: how many of them its workers may use.
    """

    name: str
    address: str
    ranks: range
    device: str
    cores: int

    @property
    def kind(self) -> HostKind:
        """What hosts that are measured once have in common: devices, cores, and the number of workers."""
        return self.device, self.cores, len(self.ranks)


@dataclass(frozen=True)
class MeasuredHosts:
    """Hosts as a cluster, and how well the fitted figures reproduce the measurements.

    Attributes:
        cluster: all hosts, in the order of their ranks.
        hosts: the same with their names.
        machines: one host of each kind, as it has measured itself.
        pairs: what the hosts measured of each other.
        link: median and worst relative error of the models of links over all traffic between hosts.
    """

    cluster: Cluster
    hosts: tuple[HostWorkers, ...]
    machines: tuple[MeasuredMachine, ...]
    pairs: tuple[PairMeasurement, ...]
    link: tuple[float, float]

    def slowest_pair(self) -> PairMeasurement:
        """Return the pair of the least bandwidth."""
        return min(self.pairs, key=lambda pair: pair.bandwidth)

    def text(self, when: str, load: MachineLoad) -> str:
        """Return the cluster file, headed by a comment on the origin of its figures.

        Args:
            when: date and time of the measurement.
            load: what disturbed the measurement on the host of rank 0.
        """
        operators = max((machine.device for machine in self.machines), key=lambda errors: errors.median)
        lines = [
            f"# Measured by polylane probe, {when}: {format_plural(self.cluster.count, 'worker')} on "
            f"{', '.join(host.name for host in self.hosts)}, torch {torch.__version__}; meanwhile {load}.",
            f"# Figures against what was measured: operators {operators.median:.0%} off (median; worst "
            f"{operators.worst:.0%}, {operators.worst_case}), messages between hosts {self.link[0]:.0%} "
            f"({self.link[1]:.0%}).",
        ]
        return "\n".join([*lines, cluster_file.dump(self.cluster)])


def measure_hosts(launch: Launch, effort: Effort, tick: Told, problem: str = "") -> MeasuredHosts:
    """Measure all hosts of a launcher's workers, and the links between them; a collective of the workers.

    Args:
        launch: which worker this is.
        effort: how much is measured, and for how long.
        tick: called with what is measured, and how many parts of it are done.
        problem: why nothing can be measured, as far as this worker knows; all hear of it. "" for nothing.

    Raises:
        PolylaneError: a worker has a problem, the workers do not meet or are all on one host, a host cannot be
            measured or does not reach another, or ranks are not numbered host by host.
        WorkerFailed: a worker that a host started for its measurement raised an error or died.
    """
    meeting = Meeting(launch)
    if said := next(filter(None, meeting.exchange(problem)), ""):
        raise PolylaneError(said)
    facts = [WorkerHealth.from_dict(data) for data in meeting.exchange(collect_facts(launch, None).to_dict())]
    hosts = group_workers(facts, meeting.exchange(device_kind()))
    if len(hosts) == 1:
        raise PolylaneError(
            f"all {launch.size} workers are on {hosts[0].name}: start polylane probe without {launch.launcher}, which "
            "is for several hosts"
        )
    # Of each host the first worker speaks.
    speaks_for = next((index for index, host in enumerate(hosts) if launch.rank == host.ranks[0]), None)
    machines = _measure_machines(meeting, hosts, speaks_for, effort, tick)
    facts = meeting.measure_speeds(facts)
    tick("links between hosts", 1)
    pairs = meeting.measure_pairs([host.address for host in hosts], speaks_for)
    refuse_unreached(hosts, pairs)
    racks = find_racks(len(hosts), pairs)
    world = World.join()
    links, errors = _measure_links(world, hosts, racks, pairs, effort, tick)
    meeting.exchange(None)  # the store is rank 0's
    world.leave()
    cluster = Cluster(tuple(_list_groups(hosts, racks, machines)), links, find_speeds(hosts, facts))
    return MeasuredHosts(
        cluster, tuple(hosts), tuple(machines.values()), tuple(pairs), (statistics.median(errors), max(errors))
    )


def group_workers(facts: Sequence[WorkerHealth], kinds: Sequence[str]) -> list[HostWorkers]:
    """Return the hosts of workers, in the order of their ranks.

    Args:
        facts: of every worker, by rank.
        kinds: name of every worker's device.

    Raises:
        PolylaneError: a host's ranks are not consecutive.
    """
    by_machine: dict[str, list[WorkerHealth]] = {}
    for worker in facts:
        by_machine.setdefault(worker.machine, []).append(worker)
    hosts = list[HostWorkers]()
    for workers in by_machine.values():
        leader, ranks = workers[0], range(workers[0].rank, workers[0].rank + len(workers))
        if [worker.rank for worker in workers] != list(ranks):
            listed = ", ".join(str(worker.rank) for worker in workers)
            raise PolylaneError(
                f"{leader.host} has the ranks {listed}: a cluster file numbers devices host by host; start with "
                "torchrun, or srun --distribution=block"
            )
        hosts.append(HostWorkers(leader.host, leader.address, ranks, kinds[leader.rank], leader.cores))
    return hosts


def refuse_unreached(hosts: Sequence[HostWorkers], pairs: Sequence[PairMeasurement]) -> None:
    """Refuse hosts that do not reach each other.

    Raises:
        PolylaneError: a host does not reach another.
    """
    for pair in pairs:
        if pair.problem:
            raise PolylaneError(
                f"{hosts[pair.source].name} does not reach {hosts[pair.target].name} ({pair.problem}); polylane "
                "doctor, started in the same way, says what to mend"
            )


def find_racks(count: int, pairs: Sequence[PairMeasurement]) -> list[int]:
    """Return the rack of every host: hosts are in one where a chain of pairs joins them that reach each other fast.

    Args:
        count: of hosts, also those that no pair names.
        pairs: what they measured of each other, in both directions.
    """
    rates = dict[tuple[int, int], float]()
    for pair in pairs:
        ends = min(pair.source, pair.target), max(pair.source, pair.target)
        rates[ends] = min(rates.get(ends, pair.bandwidth), pair.bandwidth)  # a link is as fast as its slower direction
    fastest, graph = max(rates.values()), networkx.Graph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(ends for ends, rate in rates.items() if rate >= NEAR * fastest)
    racks = [0] * count
    for rack, members in enumerate(sorted(networkx.connected_components(graph), key=min)):
        for host in members:
            racks[host] = rack
    return racks


def find_speeds(hosts: Sequence[HostWorkers], facts: Sequence[WorkerHealth]) -> dict[int, float]:
    """Return the speed factor of each rank whose device is not as fast as that of the host that stands for its kind."""
    usual: dict[HostKind, float] = {}
    speeds = dict[int, float]()
    for host in hosts:
        times = [facts[rank].matmul_seconds for rank in host.ranks]
        reference = usual.setdefault(host.kind, statistics.median(times))
        for rank, seconds in zip(host.ranks, times, strict=True):
            if not 1 / UNEQUAL <= seconds / reference <= UNEQUAL:
                speeds[rank] = round(reference / seconds, 3)
    return speeds


# ---- hosts by themselves ---------------------------------------------------------------------------------------------


def _measure_machines(
    meeting: Meeting,
    hosts: Sequence[HostWorkers],
    speaks_for: int | None,
    effort: Effort,
    tick: Told,
) -> dict[HostKind, MeasuredMachine]:
    """Return one measured host of each kind; they take turns.

    Raises:
        PolylaneError: one cannot be measured.
    """
    machines = dict[HostKind, MeasuredMachine]()
    for number, host in enumerate(hosts):
        if host.kind in machines:
            continue
        text = problem = ""
        if speaks_for == number:
            try:
                text = _to_text(conclude(measure_machine(len(host.ranks), effort, tick), len(host.ranks)))
            except PolylaneError as error:  # said to all, who would wait for it
                problem = str(error)
        else:
            tick(f"{host.name} itself", 0)
        text, problem = meeting.exchange([text, problem], MACHINE_SECONDS)[host.ranks[0]]
        if problem:
            raise PolylaneError(f"{host.name} cannot be measured: {problem}")
        machines[host.kind] = _from_text(text)
    return machines


def _to_text(machine: MeasuredMachine) -> str:
    data = {"cluster": cluster_file.dump(machine.cluster), "device": asdict(machine.device)}
    return json.dumps({**data, "threads": machine.threads, "link": machine.link})


def _from_text(text: str) -> MeasuredMachine:
    data = json.loads(text)
    errors = FitErrors(**data["device"])
    link = None if data["link"] is None else (data["link"][0], data["link"][1])
    return MeasuredMachine(cluster_file.from_mapping(parse(data["cluster"])), data["threads"], errors, link)


def _list_groups(
    hosts: Sequence[HostWorkers],
    racks: Sequence[int],
    machines: dict[HostKind, MeasuredMachine],
) -> list[Hosts]:
    """Return the groups of equal hosts that follow each other."""
    groups = list[Hosts]()
    for host, rack in zip(hosts, racks, strict=True):
        group = machines[host.kind].cluster.hosts[0]
        if len(set(racks)) > 1:
            group = group.model_copy(update={"rack": f"rack{rack}"})
        if groups and groups[-1].model_copy(update={"count": 1}) == group:
            groups[-1] = group.model_copy(update={"count": groups[-1].count + 1})
        else:
            groups.append(group)
    return groups


# ---- links between them ----------------------------------------------------------------------------------------------


def _measure_links(
    world: World,
    hosts: Sequence[HostWorkers],
    racks: Sequence[int],
    pairs: Sequence[PairMeasurement],
    effort: Effort,
    tick: Told,
) -> tuple[Links, list[float]]:
    """Return the links between hosts and between racks, and the relative errors of their figures; a collective."""
    by_rack = [[host for host, rack in enumerate(racks) if rack == number] for number in range(max(racks) + 1)]
    largest, ends = max(by_rack, key=len), [members[0] for members in by_rack]
    errors, fitted = list[float](), dict[str, Link | None]()
    for name, members in (("hosts", largest), ("racks", ends)):
        if len(members) < 2:
            continue

        def count() -> None:
            if world.rank == 0:
                tick("messages between hosts", 1)

        between = [pair.bandwidth for pair in pairs if {pair.source, pair.target} <= set(members)]
        sizes = choose_sizes(effort.sizes, min(between))
        budget, leaders = effort.traffic_seconds, [hosts[host].ranks[0] for host in members]
        timed = measure_traffic(world, sizes, budget, effort.rounds, count, leaders)
        link = fit_measured_link(timed)
        errors += fit_link.link_errors(link, timed)
        total = _measure_total(world, [hosts[host].ranks for host in members[:2]], sizes[-1], link, effort, count)
        if name == "racks" and any(len(rack) > 1 for rack in by_rack):
            total = None  # what several hosts of a rack send at once was not measured
        cpu = 0.0 if world.device.type != "cpu" else link.cpu  # with a card, its CPU time was busy waiting
        fitted[name] = link.model_copy(update={"total": total, "cpu": cpu})
    return Links(**fitted), errors


def choose_sizes(sizes: Sequence[int], bandwidth: float) -> tuple[int, ...]:
    """Return the sizes of which a message over a link of this bandwidth does not take too long; at least up to 1 MB."""
    return tuple(size for size in sizes if size <= max(MB, bandwidth * _TRANSFER_SECONDS)) or tuple(sizes[:1])


def _measure_total(
    world: World, ends: Sequence[range], size: int, link: Link, effort: Effort, tick: Callable[[], Any]
) -> float | None:
    """Return the bandwidth that all workers of a host share, by all pairs of two hosts at once; None: they share none.

    A collective.
    """
    workers = min(map(len, ends))
    if workers < 2:
        return link.bandwidth  # of one worker: more of them cannot send faster over the same card
    members = [rank for pair in zip(*ends, strict=False) for rank in pair]
    counts = [(2, 1), (2, workers)]
    timed = measure_traffic(world, (size,), effort.traffic_seconds, effort.rounds, tick, members, counts)
    slower = statistics.median(_ratios(timed, workers))
    total = link.bandwidth * workers / max(slower, 1.0)
    return None if total > _ALL_SHARE * workers * link.bandwidth else float(f"{total:.4g}")


def _ratios(timed: Sequence[TimedTraffic], workers: int) -> list[float]:
    """Return by how much each kind of traffic is slower with all workers at once."""
    alone = {case.kind: case.seconds for case in timed if case.groups == 1}
    return [case.seconds / alone[case.kind] for case in timed if case.groups == workers]
