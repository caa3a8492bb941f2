"""The folder of a run: no two runs share one, and nothing of an earlier run is lost before the next has ended well."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from polylane.commands.logs.file_names import METRICS, MODEL, NAMES, TIMELINE, UNFINISHED, WHY
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import NotFinite, PolylaneError
from polylane.observe.timeline import Timeline
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.workers.team import fork_workers
from tests.support.workers import forked_commands

RECIPE = '''
"""Learn a logarithm; from some step on its argument is negative."""
import time
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Linear(3, 64)
        self.head = torch.nn.Linear(64, 1)

    def forward(self, x, offset):
        return self.head(torch.relu(self.scale(x))) + torch.log(offset)

def model():
    torch.manual_seed(0)
    return Net()

class InOrder(torch.utils.data.IterableDataset):
    def __init__(self, bad_from, pause):
        self.bad_from, self.pause = bad_from, pause

    def __iter__(self):
        for i in range(24):
            time.sleep(self.pause)
            x = torch.arange(3.0) + i
            yield x, torch.tensor([1.0 if i < self.bad_from else -1.0]), torch.ones(1)

def data(split, bad_from=1000, pause=0.0):
    return InOrder(bad_from, pause) if split == "train" else None

def loss(model, batch):
    x, offset, y = batch
    return ((model(x, offset) - y) ** 2).mean()

def optimizer(parameters, rate=1e-4):
    return torch.optim.SGD([p for _, p in parameters], lr=rate)
'''
LOG_LINE = 1 + RECIPE.splitlines().index("        return self.head(torch.relu(self.scale(x))) + torch.log(offset)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs.py").write_text(RECIPE)
    return tmp_path


def start(folder: Path, line: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "polylane", "train", "logs.py", "--batch", "4", *line.split()]
    return forked_commands.start(command, cwd=folder, preexec_fn=before)


def train(folder: Path, line: str, code: int = 0, before: Callable[[], None] | None = None) -> tuple[str, str]:
    process = start(folder, line, before)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    return out, err


# ---- the folder itself ---------------------------------------------------------------------------------------------


def test_runs_that_start_together_get_a_folder_each(tmp_path: Path) -> None:
    """Each of the processes takes its own, however they interleave."""

    def take() -> None:
        place = RunFolder(tmp_path / "run" / "x", given=False)
        place.claim()
        place.begin()
        place.metric({"of": os.getpid()})
        os._exit(0)

    processes = [get_context("fork").Process(target=take) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    names = sorted(each.name for each in (tmp_path / "run").iterdir())
    assert names == sorted(["x", *(f"x-{number}" for number in range(2, 9))])
    said = [json.loads((tmp_path / "run" / name / "metrics.jsonl").read_text())["of"] for name in names]
    assert len(set(said)) == 8


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "x"), RunFolder(tmp_path / "x")
    first.claim()
    with pytest.raises(PolylaneError, match="another run is writing there"):
        second.claim()
    assert (tmp_path / "x").is_dir()
    first.leave()
    assert not (tmp_path / "x").exists()  # nothing was written
    second.claim()
    second.leave()


def test_the_claim_ends_with_the_process(tmp_path: Path) -> None:
    def hold() -> None:
        RunFolder(tmp_path / "x").claim()
        (tmp_path / "held").touch()
        time.sleep(60)

    process = get_context("fork").Process(target=hold)
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(PolylaneError, match="another run"):
        RunFolder(tmp_path / "x").claim()
    process.kill()
    process.join()
    RunFolder(tmp_path / "x").claim()


def test_an_earlier_run_stays_until_the_next_has_ended_well(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()
    for name in NAMES:
        (path / name).write_text("earlier")
    (path / "notes.txt").write_text("the user's")
    place = RunFolder(path)
    with place.claimed(True):
        place.begin()
        place.plan("later")
        place.metric({"step": 1})
        place.model.write_text("later")
        place.close()
        assert [(path / name).read_text() for name in NAMES] == ["earlier"] * len(NAMES)
        assert place.kept() == path / UNFINISHED
        place.finish()
    assert (path / MODEL).read_text() == (path / "plan.yaml").read_text() == "later"
    written = [MODEL, "metrics.jsonl", "notes.txt", "plan.yaml", "report.html"]
    assert sorted(each.name for each in path.iterdir()) == sorted(written)


def test_what_is_made_for_a_run_that_never_begins_goes(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a" / "b" / "c").claimed(True):
        assert (tmp_path / "a" / "b" / "c").is_dir()
    assert list(tmp_path.iterdir()) == []


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MODEL, "plan.yaml", WHY])
def test_a_folder_where_a_file_of_the_run_goes_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(PolylaneError, match=f"{name} there is a folder, and a file of the run: move it away"):
        RunFolder(tmp_path).claim()


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.yaml", ".attempt", "unfinished/metrics.jsonl"])
def test_what_holds_up_who_opens_it_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(PolylaneError, match=f"{Path(name).name} there is a named pipe, and a file of the run: move"):
        RunFolder(tmp_path).claim()


def test_a_device_behind_a_link_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(PolylaneError, match=r"metrics\.jsonl there is a device or socket, and a file of the run"):
        RunFolder(tmp_path).claim()


def break_off(work: Callable[[], object]) -> int | None:
    """Do some work in a process, and return how it ended."""
    child = get_context("fork").Process(target=work)
    child.start()
    child.join(30)
    return child.exitcode


def kill_in_the_midst(path: Path) -> None:
    def write(file: BinaryIO, block: memoryview) -> None:
        file.write(block[: len(block) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    weights.write_all = write
    weights.save_safetensors({"a": torch.zeros(999)}, path)


def reach_a_limit(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        weights.save_safetensors({"a": torch.zeros(999)}, path)
    except PolylaneError as error:
        os._exit(7 if "File too large" in str(error) else 1)


def reach_a_limit_without_proc(path: Path) -> None:
    weights._path_of = lambda descriptor: "/nowhere"
    reach_a_limit(path)


@pytest.mark.parametrize(
    ("work", "code"), [(kill_in_the_midst, -9), (reach_a_limit, 7), (reach_a_limit_without_proc, 7)]
)
def test_weights_that_are_broken_off_leave_nothing(work: Callable[[Path], None], code: int, tmp_path: Path) -> None:
    path = tmp_path / MODEL
    weights.save_safetensors({"a": torch.ones(2)}, path)
    assert break_off(lambda: work(path)) == code
    assert os.listdir(tmp_path) == [MODEL] and torch.equal(load_file(path)["a"], torch.ones(2))


def test_weights_of_all_types_are_what_safetensors_reads(tmp_path: Path) -> None:
    """Where a file system has no nameless files, too."""
    types = [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint16, torch.float8_e5m2]
    state = {f"{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in types}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "tied": state["torch.float64"]}
    state["a\0b \u2028"] = torch.ones(1).t()
    weights.save_safetensors(state, tmp_path / "a")
    assert (
        break_off(lambda: (setattr(weights, "_path_of", lambda _: ""), weights.save_safetensors(state, tmp_path / "b")))
        == 0
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = load_file(tmp_path / "a")
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name].to(torch.complex128), value.to(torch.complex128))
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)


def test_weights_are_replaced_by_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    weights.save_safetensors({"a": torch.ones(2)}, path)
    kept = path.open("rb")

    def full(file: BinaryIO, block: memoryview) -> None:
        file.write(block[: len(block) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "write_all", full)
    with pytest.raises(PolylaneError, match=r"model\.safetensors: No space left on device"):
        weights.save_safetensors({"a": torch.zeros(2)}, path)
    monkeypatch.undo()
    assert torch.equal(load_file(path)["a"], torch.ones(2))
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    before = kept.read()
    weights.save_safetensors({"a": torch.zeros(2)}, path)
    kept.seek(0)
    assert kept.read() == before  # the file of before was not written into
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_mask()


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("value", "trained", "refused"),
    [
        (float("nan"), True, True),
        (float("nan"), False, True),
        (float("inf"), True, True),
        (float("-inf"), False, False),
        (1.0, True, False),
    ],
)
def test_weights_that_are_no_numbers(value: float, trained: bool, refused: bool) -> None:
    state = {"good": torch.ones(2), "index": torch.arange(2), "one": torch.tensor([1.0, value])}
    names = ["good", "one"] if trained else ["good"]
    if refused:
        with pytest.raises(NotFinite, match=r"one holds .* so that there was not written"):
            weights.require_finite(state, names, Path("there"))
    else:
        weights.require_finite(state, names, Path("there"))


# ---- whole runs ----------------------------------------------------------------------------------------------------


def test_two_trainings_started_together_do_not_share_a_folder(folder: Path) -> None:
    both = [start(folder, "--steps 3 --json") for _ in range(2)]
    results = [json.loads(process.communicate(timeout=240)[0]) for process in both]
    assert sorted(result["run"] for result in results) == ["run/logs", "run/logs-2"]
    for result in results:
        assert {Path(file).name for file in result["files"].values()} == set(NAMES)


def test_the_second_run_into_a_folder_in_use_is_refused(folder: Path) -> None:
    first = start(folder, "--run here --set pause=0.2 --epochs 50")
    while not (folder / "here/metrics.jsonl").exists():
        assert first.poll() is None
        time.sleep(0.1)
    _, err = train(folder, "--run here --steps 1", code=2)
    assert (
        err.strip() == "polylane: --run here: another run is writing there; wait for its end, or choose another folder"
    )
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)


@pytest.fixture
def good(folder: Path) -> bytes:
    """What a run that ended well has left in run/x; its weights."""
    (folder / "run/x").mkdir(parents=True)
    weights.save_safetensors({"scale.weight": torch.ones(2)}, folder / "run/x" / MODEL)
    (folder / "run/x/metrics.jsonl").write_text("earlier\n")
    return (folder / "run/x" / MODEL).read_bytes()


@pytest.mark.parametrize("plan", ["data=1", "pipeline=2,microbatches=2"])
def test_a_loss_that_is_no_number_stops_and_names_the_operator(folder: Path, good: bytes, plan: str) -> None:
    """Steps 1 and 2 are good; the third batch has negative arguments."""
    _, err = train(folder, f"--run run/x --plan {plan} --set bad_from=8 --epochs 3", code=2)
    assert "polylane: the loss was nan at step 3 (epoch 1): training stopped, and no weights were saved" in err
    assert f"the first operator is log (logs.py:{LOG_LINE}" in err.replace(str(folder) + "/", "")
    assert err.strip().count("polylane: ") == 1
    assert (folder / "run/x" / MODEL).read_bytes() == good
    rows = [json.loads(line) for line in (folder / "run/x/unfinished/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] is None for row in rows[:3]] == [False, False, True]
    assert (folder / "run/x/metrics.jsonl").read_text() == "earlier\n"


def test_an_overflow_in_an_update_is_named(folder: Path, good: bytes) -> None:
    _, err = train(folder, "--run run/x --set rate=3e38 --epochs 3", code=2)
    assert "training stopped, and no weights were saved; the parameter " in err
    assert "is not finite: the update of step 1 made it so" in err
    assert (folder / "run/x" / MODEL).read_bytes() == good


def test_going_on_is_said_and_keeps_good_weights(folder: Path, good: bytes) -> None:
    _, err = train(folder, "--run run/x --on-nan warn --set bad_from=8 --epochs 2", code=2)
    assert "the weights were not saved after 12 steps: scale.weight holds NaN" in err
    assert (folder / "run/x" / MODEL).read_bytes() == good
    assert not (folder / "run/x" / UNFINISHED / MODEL).exists()


def test_a_full_disk_is_one_sentence(folder: Path, good: bytes) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

    _, err = train(folder, "--run run/x --steps 4", code=2, before=no_room)
    assert "Traceback" not in err
    assert "cannot be written: File too large" in err
    assert (folder / "run/x" / MODEL).read_bytes() == good


# ---- faults of the disk ----------------------------------------------------------------------------------------------


def test_metrics_that_cannot_be_written_end_with_a_whole_line(tmp_path: Path) -> None:
    """The process may write 40 bytes, as on a disk with 40 bytes left; the run goes on, and this is said once."""
    said: list[str] = []

    def write() -> list[str]:
        place = RunFolder(tmp_path / "x", warn=said.append)
        place.claim()
        place.begin()
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
        for step in range(9):
            place.metric({"step": step, "loss": 0.5})
        place.timelines(Timeline((), 1), {})
        return said

    (told,) = fork_workers(lambda context: write(), 1)
    metrics = tmp_path / "x/metrics.jsonl"
    reason = "cannot be written: File too large (raise the limit on the size of files (ulimit -f))"
    assert told == [
        f"--run {tmp_path}/x: {metrics} {reason}; training continues, and the metrics from here on are lost",
        f"--run {tmp_path}/x: {metrics.with_name(TIMELINE)} {reason}; training continues, and some timelines and "
        "pictures of steps are lost",
    ]
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0]
    assert {each.name for each in (tmp_path / "x").iterdir()} == {"metrics.jsonl"}  # no half of a timeline


def test_a_restart_goes_on_where_the_disk_is_full(tmp_path: Path) -> None:
    """As the attempt before it did; a first start is refused, before anything was trained."""
    said: list[str] = []

    def write() -> list[str]:
        place = RunFolder(tmp_path / "x", warn=said.append)
        place.claim()
        place.begin()
        place.plan("data=2")
        for step in range(1, 5):
            place.metric({"step": step})
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))
        place.begin(resumed_at=3)
        place.plan("data=1, which is longer")
        place.metric({"step": 4})
        other = RunFolder(tmp_path / "y", warn=said.append)
        other.claim()
        with pytest.raises(PolylaneError, match=r"plan\.yaml cannot be written: File too large"):
            other.plan("data=1, which is longer")
        return said

    (told,) = fork_workers(lambda context: write(), 1)
    losses = "the metrics from here on are lost", "plan.yaml is that of an earlier attempt"
    assert [each.partition("training continues, and ")[2] for each in told] == list(losses)
    assert all("cannot be written: File too large (" in each for each in told)
    lines = (tmp_path / "x/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert (tmp_path / "x/plan.yaml").read_text() == "data=2"


def test_what_cannot_be_replaced_is_named_and_not_what_was_to_take_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / MODEL).write_text("of an earlier run")
    place = RunFolder(folder)
    with place.claimed(writes=True):
        place.begin()
        place.model.write_text("weights")
        (folder / MODEL).unlink()
        (folder / MODEL).mkdir()  # meanwhile
        with pytest.raises(PolylaneError, match=rf"--run {folder}: {folder}/{MODEL} cannot be written: Is a directory"):
            place.finish()


@pytest.mark.parametrize(
    ("loss", "is_own", "kept"),
    [(0.25, False, [1, 2]), (0.5, True, []), (0.5, False, []), (math.nan, True, [1, 2]), (math.nan, False, [])],
)
def test_metrics_of_another_run_are_not_those_of_the_run_that_goes_on(
    loss: float, is_own: bool, kept: list[int], tmp_path: Path
) -> None:
    """An earlier run without checkpoints has left them, and this one goes on from somewhere else."""
    folder = tmp_path / "x"
    folder.mkdir()
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = RunFolder(folder)
    with place.claimed(writes=True):
        place.begin(2, loss, is_own)
        assert [json.loads(line)["step"] for line in place.metrics.read_text().splitlines()] == kept


def test_a_folder_that_vanishes_is_noticed_at_the_next_line(tmp_path: Path) -> None:
    said: list[str] = []
    for warn in (said.append, None):
        place = RunFolder(tmp_path / "x", warn=warn)
        with place.claimed(True):
            place.begin()
            place.metric({"step": 1})
            shutil.rmtree(tmp_path / "x")
            if warn is None:
                with pytest.raises(PolylaneError, match=r"metrics\.jsonl cannot be written: it was removed"):
                    place.metric({"step": 2})
            else:
                place.metric({"step": 2})
                place.metric({"step": 3})
                place.timelines(Timeline((), 1), {})
                place.finish()
                assert (tmp_path / "x/timeline.json").exists()
    assert len(said) == 1 and "metrics.jsonl cannot be written: it was removed; training continues" in said[0]


def test_a_later_attempt_of_torchrun_goes_on_in_the_folder(tmp_path: Path) -> None:
    """It finds the folder by who started it, and keeps all whole lines; another start does not."""

    def attempt(launch: str, step: int, ends: bool = False) -> Path:
        place = RunFolder(tmp_path / "run" / "x", given=False, launch=launch)
        place.claim()
        place.begin()
        place.metric({"step": step})
        if ends:
            place.finish()
        place.leave()
        return place.metrics

    first = attempt("one", 1)
    with first.open("a") as file:
        file.write('{"step": 2, "lo')  # the worker died in the midst of it
    assert attempt("one", 2) == first
    assert [json.loads(line)["step"] for line in first.read_text().splitlines()] == [1, 2]
    other = attempt("another", 7)
    assert other.parent.name == "x-2" and first.read_text().count("\n") == 2
    assert attempt("one", 3, ends=True) == first
    assert attempt("one", 1).parent.name == "x-3"  # its run has ended: this is another one
    assert {each.name for each in first.parent.iterdir()} == {"metrics.jsonl", "report.html"}


def test_a_later_attempt_keeps_what_is_unfinished_beside_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text("earlier\n")
    for step in (1, 2):
        place = RunFolder(tmp_path / "x", launch="one")
        with place.claimed(True):
            place.begin()
            place.metric({"step": step})
    assert (tmp_path / "x/unfinished/metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "x/metrics.jsonl").read_text() == "earlier\n"


def test_a_kill_while_a_run_goes_on_loses_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an earlier run's files: the lines that are kept are there before anything is deleted."""
    (tmp_path / "x/unfinished").mkdir(parents=True)
    (tmp_path / "x/model.safetensors").write_text("earlier")
    (tmp_path / "x/unfinished/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')

    def kill(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    place = RunFolder(tmp_path / "x")
    with pytest.raises(KeyboardInterrupt), place.claimed(True), monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        place.begin(resumed_at=2)
    assert (tmp_path / "x/unfinished/metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.skipif(os.getuid() != 0, reason="a small disk is mounted by root alone")
@pytest.mark.parametrize("option", ["", "--on-disk-error stop"])
def test_a_disk_that_fills_up(folder: Path, option: str) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        _, err = train(folder, f"--run disk/x --epochs 8 {option}", code=2)
        rows = [json.loads(line) for line in (disk / "x/metrics.jsonl").read_text().splitlines()]
        assert "Traceback" not in err and rows
        # Each file is named once; nor is there room for the run's page.
        full = "cannot be written: No space left on device (free some space on that disk, or choose a folder on "
        subjects = [word for line in err.splitlines() for word in re.findall(r"disk/x/(?:\w+/)?(\w+\.\w+) ", line)]
        assert "training continues" in err or option
        assert len(subjects) == len(set(subjects)) and METRICS in subjects, err
        if option:
            (line,) = (line for line in err.splitlines() if line.startswith("polylane: --run disk/x: disk/x/metrics"))
            assert line == f"polylane: --run disk/x: disk/x/metrics.jsonl {full}another one)"
        else:
            lost = err.splitlines()[-2 if "report.html was not written" in err.splitlines()[-1] else -1]
            assert "the weights were not saved after 48 steps: the weights cannot be written to disk/x/" in lost
            spare = Path(lost.partition("they are in ")[2].partition(" instead")[0])
            assert set(load_file(spare)) == {"scale.weight", "scale.bias", "head.weight", "head.bias"}
            shutil.rmtree(spare.parent)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_sys_exit_of_a_recipe_is_a_mistake(folder: Path) -> None:
    text = RECIPE.replace("    torch.manual_seed(0)\n", "    raise SystemExit(0)\n")
    (folder / "logs.py").write_text(text)
    _, err = train(folder, "--steps 1", code=2)
    assert err == "polylane: logs.py:16: model() raised SystemExit: 0\n"
    (folder / "logs.py").write_text(
        RECIPE.replace("        for i in range(24):", "        exit()\n        for i in (1,):")
    )
    _, err = train(folder, "--steps 1", code=2)
    assert "logs.py:24: data('train') raised SystemExit: None" in err


def write_all(place: RunFolder, text: str, weights: bool = True) -> None:
    place.begin()
    for name in NAMES:
        if weights or name != MODEL:
            (place.model.parent / name).write_text(text)


def test_a_run_that_ends_well_says_nothing_of_an_attempt_that_failed(tmp_path: Path) -> None:
    for text in ("first", "second"):
        place = RunFolder(tmp_path / "run")
        with place.claimed(True):
            write_all(place, text)
            (place.model.parent / WHY).write_text("a worker died")
            place.finish()
        assert {each.name for each in place.path.iterdir()} == set(NAMES)
        assert (place.path / MODEL).read_text() == text


@pytest.mark.parametrize("earlier", [False, True])
def test_weights_of_a_run_that_died_before_they_were_written(tmp_path: Path, earlier: bool) -> None:
    def step(number: int) -> str:
        return json.dumps({"step": number}) + "\n"

    def save(path: Path) -> None:
        path.write_text("weights of step 9")

    if earlier:
        place = RunFolder(tmp_path / "run")
        with place.claimed(True):
            write_all(place, step(4))
            place.finish()
    place = RunFolder(tmp_path / "run")
    with place.claimed(True):
        write_all(place, step(9), weights=False)
    for again in (False, True):
        place = RunFolder(tmp_path / "run")
        with place.claimed(True):
            assert place.add_weights(9, save) == (None if again else tmp_path / "run" / MODEL)
        assert {each.name for each in place.path.iterdir()} == set(NAMES)
        assert (place.path / MODEL).read_text() == "weights of step 9"
        assert (place.path / "metrics.jsonl").read_text() == step(9)
