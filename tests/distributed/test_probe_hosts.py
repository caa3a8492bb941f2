"""polylane probe, started by torchrun on two hosts: it writes a cluster file of them and of the link between them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from polylane.cluster.cluster_file import load
from polylane.cluster.rank_span import Level
from tests.support.hosts import Hosts

PROBE = ["-m", "--", "polylane", "probe", "--json", "-o"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_link_between_hosts_is_in_the_file(workers: int, tmp_path: Path) -> None:
    hosts = Hosts.make(2, "1gbit")
    if isinstance(hosts, str):
        pytest.skip(f"no hosts can be made: {hosts}")
    with closing(hosts):
        first, second = hosts.run_torchrun(
            [*PROBE, str(tmp_path / "cluster.yaml")], workers, seconds=300.0, own_mounts=("/dev/shm",)
        )
    assert first.code == second.code == 0, first.stderr
    figures, cluster = json.loads(first.stdout), load(tmp_path / "cluster.yaml")
    assert figures["hosts"] == ["host-a", "host-b"] and not second.stdout.strip()
    assert cluster.count == 2 * workers and [group.count * group.devices for group in cluster.hosts] == [2 * workers]
    assert cluster.level((0, workers)) is Level.RACK and cluster.host(workers) == 1
    link = cluster.links.hosts
    # 1 Gb/s; a burst of half a millisecond passes faster.
    assert link is not None and 0.6 * 1.25e8 < link.bandwidth < 1.5 * 1.25e8 and link.total is not None
    assert all(0.5 * 1.25e8 < pair["bandwidth"] < 1.1 * 1.25e8 for pair in figures["pairs"])


def test_what_cannot_be_measured_ends_all_hosts_at_once(tmp_path: Path) -> None:
    """A file that cannot be written, of which rank 0 alone knows."""
    hosts = Hosts.make(2)
    if isinstance(hosts, str):
        pytest.skip(f"no hosts can be made: {hosts}")
    with closing(hosts):
        outputs = hosts.run_torchrun([*PROBE, str(tmp_path)], 1, seconds=50.0)
    for output in outputs:
        assert output.code and f"{tmp_path} cannot be written" in output.stderr, output.stderr
