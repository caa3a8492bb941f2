"""Faults are drawn from the seed, strike, and are judged; trainings that a dozen of them strike come out unchanged."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polylane.plan.spec import Spec, parse
from tests.chaos import campaign
from tests.chaos.control_groups import FREEZER, PIDS, can_hold
from tests.chaos.faults import Course, Fault, FaultKind, FaultLog, draw_fault, draw_pairs
from tests.chaos.launches import Ending
from tests.chaos.laws import judge_trial
from tests.chaos.trials import FaultTrial, LinkKeeper, Unbroken
from tests.support.hosts import Hosts
from tests.support.workers import child_processes
from tests.support.workers.forked_commands import run, start

RECIPE = Path(__file__).parents[1] / "support/recipes/small_network.py"
SHORT = ["--steps", "18", "--save-every", "3", "--batch", "16", "--hang-after", "0.6"]
ENDINGS = (  # of the system, the terminal and the disk that is printed to
    *(FaultKind.FROZEN, FaultKind.HANGUP, FaultKind.STDOUT),
    *(FaultKind.WRITER, FaultKind.DESCRIPTORS, FaultKind.PROCESSES),
)
SLOW = (FaultKind.INTERPRETER, FaultKind.LOADER_WORKER, FaultKind.LINK, *ENDINGS)  # take more than a second
QUICK = [kind for kind in FaultKind if kind not in SLOW]
COURSE = Course("data=2", "shared_memory", "own")


def chaos(*words: str, seconds: float = 120) -> dict[str, object]:
    ended = run([sys.executable, "-m", "tests.chaos", str(RECIPE), "--json", *SHORT, *words], seconds)
    assert ended.stdout, ended.stderr
    told: dict[str, object] = json.loads(ended.stdout)
    assert (ended.returncode == 0) == (told["broken"] == 0)
    return told


def test_a_dozen_faults_change_nothing() -> None:
    only = [word for kind in QUICK for word in ("--only", kind)]
    plans = ["--plan", "data=2", "--plan", "pipeline=2"]
    told = chaos(*plans, *only, "--transport", "shared_memory", "--faults", "12", "--seed", "237")
    faults: Any = told["faults"]
    assert (
        "; ".join(f"{each['number']} {each['fault']}: {broken}" for each in faults for broken in each["broken"]) == ""
    )
    assert all(each["struck"] for each in faults)
    assert {each["fault"] for each in faults} == set(QUICK)


@pytest.mark.slow
@pytest.mark.skipif(not (can_hold(FREEZER) and can_hold(PIDS)), reason="no control groups of version 1 can be made")
def test_endings_that_the_system_makes_change_nothing() -> None:
    only = [word for kind in ENDINGS for word in ("--only", kind)]
    plans = ["--plan", "data=2", "--plan", "pipeline=2"]
    told = chaos(*plans, *only, "--transport", "shared_memory", "--hang-after", "3", "--faults", "6", seconds=300)
    faults: Any = told["faults"]
    assert [each for each in faults if each["broken"] or not each["struck"]] == []
    assert {each["fault"] for each in faults} == set(ENDINGS)


@pytest.mark.slow
def test_a_dead_link_changes_nothing() -> None:
    """Down for a moment; until the workers are started again; until the training has ended."""
    if isinstance(why := Hosts.make(), str):
        pytest.skip(f"no hosts can be made: {why}")
    why.close()
    words = ["--only", "link", "--launcher", "torchrun", "--transport", "gloo", "--hang-after", "2"]
    told = chaos("--plan", "data=2", *words, "--faults", "3", "--seed", "15", seconds=600)
    faults: Any = told["faults"]
    assert [each for each in faults if each["broken"]] == []
    assert {each["recovery"] for each in faults} == {"none", "restart", "resume"}
    assert all(each["hosts"] == 2 for each in faults)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_what_was_started(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The table of the faults so far is printed, and no file and no process is left."""
    words = [str(RECIPE), *SHORT, "--plan", "data=2", "--launcher", "torchrun", "--only", "kill"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = start([sys.executable, "-m", "tests.chaos", *words, "--faults", "9"], env=environment)
    try:
        assert process.stdout is not None and "kill, rank" in process.stdout.readline()
        while len(started := list_descendants(process.pid)) < 3:  # torchrun's agent and two workers
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert re.search(r"\d faults?, \d struck; \d kept every law", out)
    assert not list(tmp_path.glob("polylane-*")) and not [pid for pid in started if Path(f"/proc/{pid}/exe").exists()]


def list_descendants(pid: int) -> set[int]:
    """Process ids of all children of a process, and of theirs."""
    with suppress(OSError):
        found = child_processes.children(pid)
        return found.union(*map(list_descendants, found))
    return set()


def test_draws_follow_the_seed_and_leave_nothing_out() -> None:
    hosts = Course("data=2", "gloo", "torchrun", 2)
    courses = [COURSE, Course("pipeline=2", "gloo", "own"), hosts]

    def draw(seed: int) -> list[tuple[FaultKind, Course]]:
        return list(itertools.islice(draw_pairs(random.Random(seed), list(FaultKind), courses), 3 * len(FaultKind)))

    assert draw(1) == draw(1) != draw(2)
    assert {kind for kind, _ in draw(1)[: len(FaultKind)]} == set(FaultKind)
    assert all((course == hosts) == (kind is FaultKind.LINK) for kind, course in draw(1))
    for kind in FaultKind:
        faults = [draw_fault(random.Random(seed), kind, range(2), 60, 10, True, Path()) for seed in range(50)]
        assert {fault.rank for fault in faults} == {0, 1} and len({fault.step for fault in faults}) > 5
        assert all(2 <= fault.step <= 58 for fault in faults)
        assert ({fault.recovery for fault in faults} == {"none", "restart", "resume"}) == (kind is FaultKind.LINK)


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("data=2", [0, 1]),
        ("data=2,servers=2", [0, 1]),
        ("data=2,servers=1,staleness=2", [0]),
        ("data=4,servers=2", [0, 2]),
        ("data=2,servers=1,dedicated=yes", [2]),
    ],
)
def test_an_optimizer_raises_where_one_is(plan: str, ranks: list[int]) -> None:
    spec = parse(plan)
    assert isinstance(spec, Spec)
    assert list(campaign._find_ranks(FaultKind.OPTIMIZER, spec)) == ranks
    assert list(campaign._find_ranks(FaultKind.KILL, spec)) == list(range(spec.processes))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plan", "auto"], "--plan auto: faults are tried on a plan that is known: name it"),
        (["--plan", "data=2", "--only", "flood"], "--only flood: there is no such thing, known are kill, stop, "),
        (["--plan", "data=2", "--only", "link"], "--only link: a link is one of two hosts, whose workers "),
        (["--plan", "data=2", "--steps", "5"], "--steps 5 with --save-every 3: faults need at least 6 intervals: "),
    ],
)
def test_wrong_options_are_one_sentence(words: list[str], sentence: str) -> None:
    ended = run([sys.executable, "-m", "tests.chaos", str(RECIPE), *SHORT, *words])
    assert ended.returncode == 2 and ended.stderr.startswith(f"polylane: {sentence}")


# The judge -----------------------------------------------------------------------------------------------------------

LINES = {step: {"step": step, "epoch": 1, "loss": 1 / step, "learning_rate": 0.1} for step in range(1, 13)}
SAID = "polylane: worker 1 failed: it was killed by SIGKILL; restart 1 of 1, from the beginning"


class Story:
    """A training that a kill struck in step 8, from whose checkpoint of step 6 it went on, as it should be."""

    def __init__(self, folder: Path) -> None:
        self.log = FaultLog(folder / "log")
        self.now, self.folders = time.time(), ["step-00000003", "step-00000006"]
        self.again, self.code, self.said, self.left = 7, 0, (self.now + 0.1, SAID), list[str]()
        self.fault = Fault(FaultKind.KILL, 1, 8, 0.5, "restart", 6, False, str(self.log.path))
        self.metrics, self.weights = dict(LINES), torch.ones(3)
        self.folder, self.damaged, self.launcher = folder, "", "own"
        self.exact = True
        self.refused = list[tuple[float, str]]()  # by the restarted training, which then ended
        self.ended = self.now + 1

    def judge(self) -> list[str]:
        self.log.write("struck", rank=1, step=8, kind="kill", folders=self.folders, damaged=self.damaged)
        self.log.write("first step", rank=0, step=self.again)
        save_file({"weight": torch.ones(3)}, self.folder / "unbroken")
        save_file({"weight": self.weights}, self.folder / "weights")
        unbroken = Unbroken(LINES, self.folder / "unbroken", Path(), 2, 0)
        said = [self.said, *self.refused]
        endings = [Ending(self.code, self.ended, "\n".join(line for _, line in said), said)]
        if self.refused:
            endings.append(Ending(0, self.ended + 1, "", []))
        course = replace(COURSE, launcher=self.launcher)
        trial = FaultTrial(1, course, self.fault, endings, self.log, self.metrics, self.folder / "weights", self.left)
        judge_trial(trial, unbroken, 3, self.exact)
        return trial.broken


def lose_step(story: Story) -> None:
    del story.metrics[9]


def change_loss(story: Story) -> None:
    story.metrics[9] = {**LINES[9], "loss": 1 / 9 + 1e-16}


def change_weight(story: Story) -> None:
    story.weights[1] += 1e-7


def go_back_far(story: Story) -> None:
    story.again = 4


def pass_over_newest(story: Story) -> None:
    story.folders, story.again = ["step-00000005", "step-00000007"], 6


def wait_for_nothing(story: Story) -> None:
    story.folders, story.again = [".step-00000006.ab12"], 1


def name_nobody(story: Story) -> None:
    story.said = (story.now + 0.1, "polylane: a worker failed")


def name_late(story: Story) -> None:
    story.said = (story.now + 11, SAID)


def end_badly(story: Story) -> None:
    story.code = 1


def leave_process(story: Story) -> None:
    story.left.append("process 12: python")


def flip_byte(story: Story) -> None:
    story.fault = replace(story.fault, kind=FaultKind.FLIPPED)
    story.damaged, story.again = "checkpoints/step-00000006/rank-00000.safetensors", 4


def commit_next_after_flip(story: Story) -> None:
    """The checkpoint of step 3 is damaged, that of step 6 is under way when the fault strikes, and is complete then."""
    story.fault = replace(story.fault, kind=FaultKind.FLIPPED)
    story.damaged = "checkpoints/step-00000003/rank-00000.safetensors"
    story.folders = ["step-00000003", ".step-00000006.ab12"]


def refuse_damaged(story: Story) -> None:
    """The workers that were started again, which takes long, find that the newest checkpoint is damaged, and end."""
    flip_byte(story)
    story.refused = [(story.now + 20, f"polylane: checkpoint {story.damaged} is damaged")]
    story.code, story.ended = 1, story.now + 21


def end_late(story: Story) -> None:
    refuse_damaged(story)
    story.ended = story.now + 31


def name_hang_beside(story: Story) -> None:
    story.refused = [(story.now + 9, "polylane: the training hangs: ranks 0 and 1 have all begun 1 operation")]


def lose_asynchronous_step(story: Story) -> None:
    story.exact = False
    lose_step(story)


def lose_asynchronous_weight(story: Story) -> None:
    story.exact, story.weights = False, torch.ones(2)


def see_no_signal(story: Story) -> None:
    story.said = (
        story.now + 0.1,
        "polylane: worker 1 failed: it ended, and how could not be determined (killed, or left)",
    )


BROKEN = {
    end_late: "the training ended 11.0 s after it",
    see_no_signal: "nothing named it: polylane: worker 1 failed: it ended",
    flip_byte: "no sentence named the damaged file",
    lose_step: "the metrics of 1 steps are lost, the first is step 9",
    change_loss: "step 9 is ",
    change_weight: "the weights differ from the unbroken training's",
    name_hang_beside: "a hang was named beside it: polylane: the training hangs: ranks 0 and 1",
    lose_asynchronous_step: "the metrics of 1 steps are lost, the first is step 9",
    lose_asynchronous_weight: "the names or shapes of the weights differ from the unbroken training's",
    go_back_far: "4 steps were made again, 1 since the checkpoint of step 6",
    pass_over_newest: "2 steps were made again, 0 since the checkpoint of step 7",
    wait_for_nothing: "7 steps were made again, of which 3 are an interval, 1 were made while a checkpoint was being",
    name_nobody: "nothing named it: polylane: a worker failed",
    name_late: "it was named after 11.0 s",
    end_badly: "the training ended with code 1, expected 0: ",
    leave_process: "left behind: process 12: python",
}


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_the_judge_sees_what_breaks_a_law(change: Callable[[Story], None], tmp_path: Path) -> None:
    story = Story(tmp_path)
    change(story)
    assert any(each.startswith(BROKEN[change]) for each in story.judge())


def write_next(story: Story) -> None:
    """The steps since the snapshot of a checkpoint that was still being written are made again as well."""
    story.folders, story.again = ["step-00000003", ".step-00000006.ab12"], 4


def commit_next(story: Story) -> None:
    """A checkpoint that was being written may have been complete before all workers had ended."""
    story.folders = ["step-00000003", ".step-00000006.ab12"]


def see_no_signal_of_agents_child(story: Story) -> None:
    see_no_signal(story)
    story.launcher = "torchrun"


def change_asynchronous_numbers(story: Story) -> None:
    story.exact = False
    change_loss(story)
    change_weight(story)


WELL = [
    change_asynchronous_numbers,
    lambda story: None,
    write_next,
    commit_next,
    commit_next_after_flip,
    refuse_damaged,
    see_no_signal_of_agents_child,
]


@pytest.mark.parametrize("change", WELL)
def test_the_judge_finds_nothing_where_all_is_well(change: Callable[[Story], None], tmp_path: Path) -> None:
    story = Story(tmp_path)
    change(story)
    assert story.judge() == []


# A link --------------------------------------------------------------------------------------------------------------

HANG = "polylane: the training hangs: ranks 0 and 1 have waited for 3.0 s: the link between them carries nothing"


class RaisedHosts:
    """Hosts whose link is said to be up when it is raised."""

    def raise_link(self) -> list[str]:
        return ["UP", "UP"]


def keep_link(folder: Path, recovery: str, said: list[str], after: float) -> FaultLog:
    """Return what is in the log once a link has been down for some seconds, in which lines were said."""
    log, fault = FaultLog(folder / "log"), link_fault(recovery)
    keeper = LinkKeeper(RaisedHosts(), fault, log)  # type: ignore[arg-type]
    keeper.tend([(time.time(), HANG)])  # of before: it is not down yet
    assert not log.read("link up")
    log.path.write_text(json.dumps({"event": "link down", "time": time.time() - after, "state": "DOWN"}) + "\n")
    for _ in range(2):
        keeper.tend([(time.time(), line) for line in said])
    return log


def link_fault(recovery: Any) -> Fault:
    return Fault(FaultKind.LINK, 1, 8, 0.5, recovery, 6, False, "")


@pytest.mark.parametrize(
    ("recovery", "said", "after", "times"),
    [
        ("none", [], 1.0, 0),
        ("none", [], 2.5, 1),
        ("restart", ["epoch 1"], 60.0, 0),
        ("restart", ["epoch 1", HANG], 3.0, 1),
        ("resume", ["epoch 1", HANG], 60.0, 0),
    ],
)
def test_a_link_is_raised_once_when_it_is_time(
    tmp_path: Path, recovery: str, said: list[str], after: float, times: int
) -> None:
    up = keep_link(tmp_path, recovery, said, after).read("link up")
    assert [each["states"] for each in up] == [["UP", "UP"]] * times


@pytest.mark.parametrize(
    ("recovery", "said", "states", "broken"),
    [
        ("none", "epoch 1", ("DOWN", ["UP", "UP"]), ""),
        ("none", HANG, ("DOWN", ["UP", "UP"]), "a link that was down for a moment was named: polylane: the training"),
        ("restart", HANG, ("DOWN", ["UP", "UP"]), ""),
        ("restart", "epoch 1", ("DOWN", ["UP", "UP"]), "nothing named it: "),
        ("restart", HANG, ("UP", ["UP", "UP"]), "the link did not go down: "),
        ("restart", HANG, ("DOWN", ["UP", "DOWN"]), "the link did not come up again: "),
    ],
)
def test_the_judge_of_links(
    tmp_path: Path, recovery: str, said: str, states: tuple[str, list[str]], broken: str
) -> None:
    story = Story(tmp_path)
    story.fault, story.said = link_fault(recovery), (story.now + 4, said)
    story.log.write("link down", state=states[0])
    story.log.write("link up", states=states[1])
    found = story.judge()
    assert [each for each in found if not (broken and each.startswith(broken))] == [] and len(found) == bool(broken)
