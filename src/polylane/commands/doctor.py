"""``polylane doctor``: what is wrong with the hosts of a training, before days are spent on it."""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from polylane import __version__
from polylane.commands.printing import print_json, print_line
from polylane.runtime.workers.launch_environment import Launch

if TYPE_CHECKING:
    from polylane.probe.health.judge import HealthFinding
    from polylane.probe.health.meeting import Meeting

LOOK_SECONDS = 5.0  # in which a file that rank 0 has written must be seen: of network disks, some take a few
_MARKS = {0: "ok", 1: "warning", 2: "FAILURE"}


def run(folder: Path | None, cluster: Path | None, json: bool) -> None:
    """Look at this host, or with a launcher at all of them, and print what was found; leave with 1 if something fails.

    Args:
        folder: the run's folder, which all hosts must see; None: no disk is looked at.
        cluster: a cluster file with the link that is to be between hosts; None: hosts are compared with each other.
        json: whether to print one JSON object, in place of lines.

    Raises:
        PolylaneError: the workers do not meet, or the cluster file is wrong.
    """
    from polylane.cluster.cluster_file import load
    from polylane.probe.health.facts import WorkerHealth, collect_facts
    from polylane.probe.health.judge import Severity, judge_hosts
    from polylane.probe.health.meeting import Meeting

    link = None if cluster is None else load(cluster).links.hosts
    launch = Launch.of_process()
    meeting = Meeting(launch)
    own_facts = collect_facts(launch, folder)
    own_facts = replace(own_facts, versions={"polylane": __version__, **own_facts.versions})
    facts = [WorkerHealth.from_dict(data) for data in meeting.exchange(own_facts.to_dict())]
    facts = meeting.measure_speeds(facts)
    seen_by = None if folder is None else _look_for_file(meeting, launch, folder)
    machines = list(dict.fromkeys(worker.machine for worker in facts))
    firsts = [next(worker for worker in facts if worker.machine == machine) for machine in machines]
    number = machines.index(own_facts.machine) if own_facts.rank in {worker.rank for worker in firsts} else None
    addresses = [worker.address for worker in firsts]
    pairs = meeting.measure_pairs(addresses, number) if len(firsts) > 1 else []
    findings = judge_hosts(facts, pairs, seen_by, link)
    worst = max(finding.level for finding in findings)
    if launch.is_first:
        _print(findings, json)
    meeting.exchange(None)  # the store is rank 0's
    if worst is Severity.FAILURE:
        sys.exit(1)


def _print(findings: list[HealthFinding], json: bool) -> None:
    if json:
        rows = [{**vars(finding), "level": finding.level.name.lower()} for finding in findings]
        print_json({"worst": max(f.level for f in findings).name.lower(), "findings": rows})
        return
    for finding in findings:
        mend = f": {finding.mend}" if finding.mend else ""
        print_line(f"{_MARKS[finding.level]:8} {finding.subject:14} {finding.text}{mend}")


def _look_for_file(meeting: Meeting, launch: Launch, folder: Path) -> list[bool]:
    """Return of every worker whether it sees a file that rank 0 writes into the run's folder; a collective."""
    text = name = ""
    is_new = not folder.exists()
    if launch.is_first:
        name, text = f".doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        except OSError:
            name = ""
    name, text = meeting.exchange([name, text])[0]
    is_seen = not name  # what rank 0 cannot write is said of its disk
    deadline = time.monotonic() + LOOK_SECONDS
    while not is_seen and time.monotonic() < deadline:
        try:
            is_seen = (folder / name).read_text() == text
        except OSError:
            time.sleep(0.1)
    seen_by = [bool(value) for value in meeting.exchange(is_seen)]
    if launch.is_first and name:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has written there meanwhile
            if is_new:
                folder.rmdir()
    return seen_by
