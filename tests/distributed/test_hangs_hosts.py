"""Hosts that are network namespaces, and a link between them that is cut: what the workers on both say of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="makes network namespaces, as root"),
]

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
NAMES = [f"plt{os.getpid()}{letter}" for letter in "ab"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with a cable between them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for number, name in enumerate(NAMES, start=1):
            ip("-n", name, "addr", "add", f"10.91.7.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    yield NAMES
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False)


def start(name: str, node: int, folder: Path) -> subprocess.Popen[bytes]:
    launch = f"-m torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr 10.91.7.1"
    train = "--master-port 29517 -m -- polylane train r.py --plan data=2 --batch 8 --run run --hang-after 4"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "POLYLANE_SECRET": "secret" * 9}
    command = ["ip", "netns", "exec", name, sys.executable, *launch.split(), *train.split()]
    with open(folder / "said", "wb") as said:
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=said, stdout=subprocess.DEVNULL)


def read(folders: list[Path]) -> list[str]:
    return [(folder / "said").read_text() for folder in folders]


def test_a_link_that_carries_nothing_is_named_by_both_hosts(hosts: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in hosts]
    for folder in folders:
        folder.mkdir()
        (folder / "r.py").write_text(RECIPE)
    agents = [start(name, node, folders[node]) for node, name in enumerate(hosts)]
    try:
        deadline = time.monotonic() + 200
        while not any(len(each.read_text().splitlines()) > 20 for each in folders[0].rglob("metrics.jsonl")):
            assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
            time.sleep(0.2)
        ip("-n", hosts[1], "link", "set", "eth0", "down")
        # Before the link is there again: torchrun's agents wait for each other.
        deadline = time.monotonic() + 60
        while not all("the training hangs: " in said for said in read(folders)) and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        subprocess.run(["ip", "-n", hosts[1], "link", "set", "eth0", "up"], check=False)
        for agent in agents:
            agent.terminate()
        for agent in agents:
            try:
                agent.wait(40)
            except subprocess.TimeoutExpired:
                agent.kill()
    said = read(folders)
    machine = os.uname().nodename
    assert f"{machine} (node 1), with rank 1, has not been heard from for " in said[0]
    assert f"rank 0 on {machine} (node 0) has waited for rank 1 for " in said[0]
    assert f"{machine} (node 1) has not heard of {machine} (node 0) for " in said[1]
    assert "nor has torchrun's store at 10.91.7.1:29517 answered" in said[1]
