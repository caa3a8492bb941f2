"""A host that vanishes in the middle of a training: it is named, and the training ends with the unbroken one's loss."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hosts import HostRun, Hosts, drop_link
from tests.support.recipes.steady import RECIPE, SCRIPT
from tests.support.workers import forked_commands

NAMED_WITHIN = 10.0  # seconds from the fault to the sentence that names the host
STEPS, PAUSE = 40, 0.1
POLYLANE = ["-m", "--", "polylane"]
# A store of its own for every start, as agents that join later need it; and hosts that are gone are noticed soon.
ELASTIC = ["--nnodes", "1:2", "--rdzv-conf", "is_host=0,keep_alive_interval=1,last_call_timeout=5"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts.make(2, "1gbit")
    if isinstance(made, str):
        pytest.skip(f"no hosts can be made: {made}")
    with closing(made):
        yield made


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of one process that nothing strikes."""
    place = tmp_path_factory.mktemp("unbroken")
    write_files(place)
    words = [*train_words("data=1", place), "--set", "pause=0"]
    forked_commands.run([sys.executable, "-m", "polylane", *words], cwd=place, check=True, timeout=120)
    return place / "run"


def write_files(folder: Path) -> None:
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "script.py").write_text(SCRIPT)


def train_words(plan: str, folder: Path, *options: str) -> list[str]:
    words = ["train", str(folder / "recipe.py"), "--plan", plan, "--run", str(folder / "run"), "--steps", str(STEPS)]
    return [*words, "--batch", "16", "--set", f"pause={PAUSE}", "--audit", "off", *options]


def read_steps(run: Path) -> list[tuple[int, float]]:
    """The number and the loss of every step in the order in which they were made, some of them twice."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def wait_for(find: Callable[[], Any], seconds: float, run: HostRun) -> float:
    """Wait until something is true, and return how long that took."""
    began = time.monotonic()
    while not find():
        assert time.monotonic() - began < seconds, "\n".join(run.read(number) for number in (0, 1))
        time.sleep(0.05)
    return time.monotonic() - began


def find_name(run: HostRun, host: int, lost: int) -> re.Match[str] | None:
    """What a host says of the other one, or of the link between them."""
    here, there = (f"host-{'ab'[number]}" for number in (host, lost))
    ways = (
        rf"{there}, with ranks? .*, has not been heard from for",
        rf"{here} has not heard of {there} for",
        r"the link between host-a and host-b carries nothing",
        r"on host-a and .* on host-b wait for each other",
    )
    return re.search(rf"polylane: the training hangs: .*({'|'.join(ways)}).*", run.read(host))


def assert_unbroken(run: Path, unbroken: Path) -> None:
    found, wanted = dict(read_steps(run)), dict(read_steps(unbroken))
    assert list(found) == list(range(1, STEPS + 1)) and found == pytest.approx(wanted, rel=1e-12, abs=0)
    weights = load_file(run / "model.safetensors")
    torch.testing.assert_close(weights, load_file(unbroken / "model.safetensors"), rtol=0, atol=1e-12)


# ---- named -----------------------------------------------------------------------------------------------------------


def strike(hosts: Hosts, run: HostRun, how: str, lost: int) -> None:
    if how == "killed":
        run.kill_host(lost)
    elif how == "silent":
        hosts.drop_host(lost)
    else:
        with hosts.hosts[lost].enter():
            assert drop_link() == "DOWN"


def check_named(
    hosts: Hosts, words: list[str], workers: int, folder: Path, how: str, lost: int, ends: bool = True
) -> None:
    variables = {} if how == "link" else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with HostRun(hosts, words, workers, environment=variables) as run:
        for number in range(2):
            run.start(number)
        at_work = folder / "run" / "metrics.jsonl"
        wait_for(lambda: at_work.exists() and at_work.read_text().count("loss") > 4, 90, run)
        strike(hosts, run, how, lost)
        seconds = wait_for(lambda: find_name(run, 1 - lost, lost), 30, run)
        said = find_name(run, 1 - lost, lost)
        print(f"{how} {words}: {seconds:.1f} s: {said and said[0]}")
        assert seconds < NAMED_WITHIN
        if how == "killed" and ends:  # torchrun's own agents may wait longer for one that does not answer
            (ended,) = run.wait(30, [1 - lost])
            assert ended.code == 1
    kept = json.loads((folder / "run" / "why.json").read_text())
    assert f"host-{'ab'[lost]}" in kept["sentence"]


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_host_that_is_killed_is_named(hosts: Hosts, tmp_path: Path, lost: int) -> None:
    write_files(tmp_path)
    check_named(hosts, [*POLYLANE, *train_words("data=2", tmp_path)], 1, tmp_path, "killed", lost, ends=False)


PLANS = ("data=4", "data=2,pipeline=2,microbatches=2", "data=2,tensor=2", "script")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("how", ["killed", "silent", "link"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_host_that_vanishes_is_named(hosts: Hosts, tmp_path: Path, plan: str, how: str, lost: int) -> None:
    write_files(tmp_path)
    words = train_words(plan, tmp_path)
    if plan == "script":
        words = ["run", "--plan", "data=4", "--run", str(tmp_path / "run"), "--audit", "off"]
        words += [str(tmp_path / "script.py"), "400", str(PAUSE), str(tmp_path / "weights")]
    check_named(hosts, [*POLYLANE, *words], 2, tmp_path, how, lost)


# ---- it comes back, or does not --------------------------------------------------------------------------------------


@dataclass
class Recovery:
    """Seconds of a recovery: from the fault to the sentence, and to the next new step; and steps made again."""

    named: float
    restarted: float
    redone: int


def recover(
    hosts: Hosts, folder: Path, plan: str, how: str, lost: int, back: bool, options: list[str], *more: str
) -> Recovery:
    """Train on two hosts of two workers, lose one in the middle, and train to the end."""
    words = train_words(plan, folder, "--save-every", "5", "--max-restarts", "3", *more)
    # Each start of the workers has a store of its own, which agents that join later find.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    stay, options = 1 - lost, ["--max-restarts", "3", *options]
    with HostRun(hosts, [*POLYLANE, *words], 2, environment=variables, options=options) as run:
        for number in range(2):
            run.start(number)
        # Between two checkpoints: who waits in one is waited for longer, since what it moves may be large.
        wait_for(lambda: len(read_steps(folder / "run")) == STEPS // 2 + 2, 90, run)
        strike(hosts, run, how, lost)
        began = time.monotonic()
        named = wait_for(lambda: find_name(run, stay, lost), 30, run)
        if back and how == "link":
            hosts.raise_link()
        elif back:
            run.start(lost)
        before = read_steps(folder / "run")
        wait_for(lambda: read_steps(folder / "run") != before, 120, run)  # cut back to the checkpoint, or further
        restarted = time.monotonic() - began
        ended = run.wait(120, [] if back else [stay])
        assert [each.code for each in ended] == [0] * len(ended), "\n".join(each.stderr for each in ended)
        resumed_at = json.loads((folder / "run" / "goodput.json").read_text())["attempts"][-1]["resumed_at"]
        redone = before[-1][0] - resumed_at
        return Recovery(named, restarted, redone)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS[:-1])
@pytest.mark.parametrize("how", ["killed", "link"])
def test_a_host_that_comes_back_goes_on(hosts: Hosts, tmp_path: Path, unbroken: Path, plan: str, how: str) -> None:
    write_files(tmp_path)
    recovery = recover(hosts, tmp_path, plan, how, 1, True, [])
    print(plan, how, recovery)
    assert recovery.named < NAMED_WITHIN and 0 <= recovery.redone <= 5
    assert_unbroken(tmp_path / "run", unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("plan", ["data=4", "pipeline=2,tensor=2,microbatches=2", "data=2,pipeline=2,microbatches=2"])
def test_the_others_go_on_without_it(hosts: Hosts, tmp_path: Path, unbroken: Path, plan: str, lost: int) -> None:
    """2 hosts of 2 workers, 1 Gb/s between them: one is lost in the middle, and the loss is the unbroken run's."""
    write_files(tmp_path)
    recovery = recover(hosts, tmp_path, plan, "killed", lost, False, ELASTIC, "--resume", "auto")
    print(plan, lost, recovery)
    assert recovery.named < NAMED_WITHIN and 0 <= recovery.redone <= 5
    assert_unbroken(tmp_path / "run", unbroken)
