"""Hosts that are network namespaces, and a link between them that is cut: what the workers on both say of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.hosts import DATA_LINK, Hosts, data_address, drop_link, host_names

pytestmark = pytest.mark.slow

MEETING = data_address(1)  # torchrun's store is beyond the link

RECIPE = """
import time, torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def loss(model, batch):
    return model(batch).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)

class Data:
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), index / 1e6)

def data(split):
    return Data() if split == "train" else None
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts.make(2)
    if isinstance(made, str):
        pytest.skip(f"no hosts can be made: {made}")
    with closing(made):
        yield made


def start(hosts: Hosts, node: int, folder: Path) -> subprocess.Popen[bytes]:
    launch = f"-m torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr {MEETING}"
    train = "--master-port 29517 -m -- polylane train r.py --plan data=2 --batch 8 --run run --hang-after 4"
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": DATA_LINK,
        "OMP_NUM_THREADS": "1",
        "POLYLANE_SECRET": "secret" * 9,
    }
    with open(folder / "said", "wb") as said, hosts.hosts[node].enter():
        command = [sys.executable, *launch.split(), *train.split()]
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=said, stdout=subprocess.DEVNULL)


def read(folders: list[Path]) -> list[str]:
    return [(folder / "said").read_text() for folder in folders]


def test_a_link_that_carries_nothing_is_named_by_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in host_names(2)]
    for folder in folders:
        folder.mkdir()
        (folder / "r.py").write_text(RECIPE)
    agents = [start(hosts, node, folder) for node, folder in enumerate(folders)]
    try:
        deadline = time.monotonic() + 200
        while not any(len(each.read_text().splitlines()) > 20 for each in folders[0].rglob("metrics.jsonl")):
            assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
            time.sleep(0.2)
        with hosts.hosts[1].enter():
            drop_link()
        # Before the link is there again: torchrun's agents wait for each other.
        deadline = time.monotonic() + 60
        while not all("the training hangs: " in said for said in read(folders)) and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        hosts.raise_link()
        for agent in agents:
            agent.terminate()
        for agent in agents:
            try:
                agent.wait(40)
            except subprocess.TimeoutExpired:
                agent.kill()
    said = read(folders)
    first, second = host_names(2)
    assert f"{second}, with rank 1, has not been heard from for " in said[0]
    assert f"rank 0 on {first} has waited for rank 1 for " in said[0]
    assert f"{second} has not heard of {first} for " in said[1]
    assert f"nor has torchrun's store at {MEETING}:29517 answered" in said[1]
