"""polylane, started once on each node by a launcher: it becomes torchrun's agent, and has its workers' exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.workers import forked_commands

RECIPE = str(Path(__file__).parents[1] / "support/recipes/small_network.py")


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polylane

torch.manual_seed(0)
model, x = nn.Linear(8, 1), torch.randn(64, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(dim=1)), batch_size=16, shuffle=True)
model, optimizer, loader = polylane.prepare(model, optimizer, loader)
for epoch in polylane.epochs(range(EPOCHS)):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()
        optimizer.step()
"""


def start_agents(folder: Path, *words: str, workers: int = 1) -> list[subprocess.Popen[str]]:
    """Start polylane as the two pods of a JobSet are, with so many workers each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [*words[:2], "--run", str(folder), "--save-every", "1h", "--resume", "auto", "--requeue-code", "75"]
    meeting = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": workers, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    return [
        forked_commands.start(
            [sys.executable, "-m", "polylane", *line, "--plan", f"data={2 * workers}", *words[2:]],
            env={**os.environ, **{name: str(value) for name, value in meeting.items()}, "PET_NODE_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(2)
    ]


def wait_for_ends(agents: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Return the agents' exit codes, and what each has printed on stdout."""
    try:
        printed = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    print(*printed, sep="\n")
    return [agent.returncode for agent in agents], [out for out, _ in printed]


def read_losses(folder: Path) -> dict[int, float]:
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return {}
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_wrong_input_has_its_code_on_every_node(tmp_path: Path) -> None:
    assert wait_for_ends(start_agents(tmp_path / "run", "train", RECIPE, "--set", "depth=1"))[0] == [2, 2]


def stop_one(agents: list[subprocess.Popen[str]], stopped: int, folder: Path) -> list[str]:
    """Stop one of the agents once the training is under way, and return what both have printed.

    The other one's code says that the training is to go on.
    """
    deadline = time.monotonic() + 90
    while len(read_losses(folder)) < 3:
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
        time.sleep(0.05)
    agents[stopped].terminate()
    codes, printed = wait_for_ends(agents)
    assert codes[1 - stopped] == 75 and codes[stopped] == 143
    return printed


@pytest.mark.parametrize(("stopped", "workers"), [(0, 1), (1, 2)])
def test_a_node_that_is_stopped_ends_the_other_with_the_code_to_go_on(
    tmp_path: Path, stopped: int, workers: int
) -> None:
    """As where one pod is evicted: all workers save, rank 0 writes its files, and those that start again go on."""
    folder, words = tmp_path / "run", ("train", RECIPE, "--batch", "32", "--steps")
    printed = stop_one(start_agents(folder, *words, "100000", workers=workers), stopped, folder)
    (checkpoint,) = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert f"ended after {step} steps" in printed[0], "the agent has not ended rank 0 before"
    goodput = json.loads((folder / "goodput.json").read_text())
    assert goodput["attempts"][-1]["ended_by"] == "SIGTERM", "rank 0 has heard of it from the others"
    assert wait_for_ends(start_agents(folder, *words, str(step + 2), workers=workers))[0] == [0, 0]
    assert sorted(read_losses(folder)) == list(range(1, step + 3)) and (folder / "model.safetensors").exists()


def test_scripts_that_one_node_is_stopped_of(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("EPOCHS", "100000"))
    stop_one(start_agents(folder, "run", str(script)), 1, folder)
    epochs = max(read_losses(folder)) // 4 + 2
    script.write_text(SCRIPT.replace("EPOCHS", str(epochs)))
    assert wait_for_ends(start_agents(folder, "run", str(script)))[0] == [0, 0]
    assert sorted(read_losses(folder)) == list(range(1, 4 * epochs + 1))
