"""polylane doctor on two hosts: it finds faults that were planted there, and nothing where none was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from polylane.errors import PolylaneError
from polylane.probe.health import meeting
from polylane.runtime.workers.launch_environment import Launch
from tests.support.hosts import Hosts, data_address

DOCTOR = ["-m", "--", "polylane", "doctor", "--json"]
LOW_LIMIT = ["--no-python", "sh", "-c", f"ulimit -n 300 && exec {sys.executable} -m polylane doctor --json"]


def examine(hosts: Hosts, words: list[str], **options: Any) -> tuple[int, dict[str, Any]]:
    """Run doctor with a worker on each host; return torchrun's exit code and what was found, by subject."""
    first, *_ = hosts.run_torchrun(words, 1, **options)
    start = first.stdout.index("{")
    told, _ = json.JSONDecoder().raw_decode(first.stdout[start:])
    # Both hosts compute on this machine's cores, as other programs do: which one is slower is not theirs to say.
    return first.code, {
        finding["subject"]: finding
        for finding in told["findings"]
        if finding["level"] != "fine" and finding["subject"] != "speed"
    }


def block(hosts: Hosts) -> None:
    hosts.hosts[1].run(f"ip route add blackhole {data_address(1)}/32")


PLANTED: dict[str, tuple[str, dict[str, Any], Callable[[Hosts], None] | None, list[str]]] = {
    "wrong interface": ("network", {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, None, DOCTOR),
    "no name": ("network", {"environment": {"GLOO_SOCKET_IFNAME": ""}}, None, DOCTOR),
    "blocked": ("network", {}, block, DOCTOR),
    "small shared memory": ("shared memory", {"own_mounts": ["/dev/shm:32m"]}, None, DOCTOR),
    "limits": ("limits", {}, None, LOW_LIMIT),
    "full disk": ("disk", {"own_mounts": ["RUN:1m"]}, None, [*DOCTOR, "--run", "RUN"]),
    "unshared folder": ("run folder", {"own_mounts": ["RUN"]}, None, [*DOCTOR, "--run", "RUN"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "slow link", *PLANTED])
def test_planted_faults(fault: str, tmp_path: Path) -> None:
    hosts = Hosts.make(2, "100mbit" if fault == "slow link" else None)
    if isinstance(hosts, str):
        pytest.skip(f"no hosts can be made: {hosts}")
    subject, options, plant, words = PLANTED.get(fault, (fault, {}, None, [*DOCTOR, "--run", "RUN"]))
    words = [word.replace("RUN", str(tmp_path)) for word in words]
    options = {k: [m.replace("RUN", str(tmp_path)) for m in v] if k == "own_mounts" else v for k, v in options.items()}
    with closing(hosts):
        if plant is not None:
            plant(hosts)
        code, found = examine(hosts, words, **options)
    expected = {"": set(), "slow link": {"links"}}.get(fault, {subject})
    if fault == "full disk":
        expected = {"disk", "run folder"}  # a disk of its own is not shared, either
    assert found.keys() == expected and (code != 0) == any(f["level"] == "failure" for f in found.values()), found


@pytest.mark.slow
def test_of_three_hosts_the_one_with_a_slow_link_is_named(tmp_path: Path) -> None:
    hosts = Hosts.make(3)
    if isinstance(hosts, str):
        pytest.skip(f"no hosts can be made: {hosts}")
    with closing(hosts):
        hosts.slow_down(2, "100mbit")
        _, found = examine(hosts, [*DOCTOR, "--run", str(tmp_path)])
    assert found.keys() == {"links"} and found["links"]["text"].startswith("host-c: at most 0."), found


def test_a_store_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_SECONDS", 1.0)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PolylaneError, match=r"rank 1 on .* does not reach rank 0's store at 127.0.0.1:9"):
        meeting.Meeting(Launch(True, 1, 2, 0, 1, "torchrun"))
