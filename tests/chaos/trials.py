"""Trials: a training that a fault strikes, and what became of it, beside the unbroken one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylane.runtime.workers.world import accelerator_type
from tests.chaos.control_groups import release
from tests.chaos.faults import HANGS, VARIABLE, Course, Fault, FaultKind, FaultLog
from tests.chaos.faulty_train import LOG_VARIABLE
from tests.chaos.isolation import SHARED_MEMORY, end_orphans, mount_disk, unmount_disk
from tests.chaos.launches import Ending, Tend, run_command
from tests.support.hosts import Hosts

if TYPE_CHECKING:
    from tests.chaos.request import ChaosRequest

# After which a training has not ended; where it and its restart begin in new processes that open an accelerator.
LIMIT_SECONDS, NEW_PROCESS_SECONDS = 90.0, 240.0
REQUEUE_CODE = 75  # of a training that a signal has ended early
SHORT_SECONDS = 2.0  # that a link is down where the training is to go on by itself


@dataclass
class FaultTrial:
    """A training that a fault struck, from its start to its good end.

    Attributes:
        number: number of the trial, from 1.
        course: how the training was split and started.
        fault: the fault that struck it.
        endings: how each of its command lines ended: the one that was struck, and those that went on from it.
        log: what the workers wrote about it.
        metrics: its last line of metrics of every step, without times.
        weights: path of its weights.
        left: what it has left behind: processes, shared memory, files.
        broken: the laws that it has broken, each a sentence.
        facts: figures about it as plain data, made before its files are removed.
    """

    number: int
    course: Course
    fault: Fault
    endings: list[Ending]
    log: FaultLog
    metrics: dict[int, dict[str, Any]]
    weights: Path
    left: list[str]
    broken: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def struck(self) -> dict[str, Any] | None:
        """What the fault wrote as it struck; None where it did not."""
        return next(iter(self.log.read("struck")), None)


@dataclass(frozen=True)
class Unbroken:
    """A training that nothing struck.

    Attributes:
        metrics: its line of metrics of every step, without times.
        weights: path of its weights.
        plan: path of the plan that it was trained by, with the cuts of its stages.
        ranks: number of its workers, dedicated servers counted.
        bytes: size of the files of its folder.
    """

    metrics: dict[int, dict[str, Any]]
    weights: Path
    plan: Path
    ranks: int
    bytes: int


class LinkKeeper:
    """Has a link that a fault took down carry again, when it is time for that.

    Args:
        hosts: the hosts at its ends.
        fault: what takes it down. Where the training is to go on by itself, it is down for :data:`SHORT_SECONDS`; where
            the workers are to be started again, until the hang is named; else until the training has ended.
        log: what happened to the training.
    """

    def __init__(self, hosts: Hosts, fault: Fault, log: FaultLog) -> None:
        self._hosts, self._recovery, self._log = hosts, fault.recovery, log

    def tend(self, lines: Sequence[tuple[float, str]]) -> None:
        """Raise the link if it is time.

        Args:
            lines: the lines that the training has printed so far, with their times.
        """
        if not (down := self._log.read("link down")) or self._log.read("link up"):
            return
        since = float(down[0]["time"])
        if self._recovery == "restart":
            is_time = any(at > since and "hangs: " in line for at, line in lines)
        else:
            is_time = self._recovery == "none" and time.time() > since + SHORT_SECONDS
        if is_time:
            self.raise_link()

    def raise_link(self) -> None:
        """Raise the link, and write down that it carries again."""
        self._log.write("link up", states=self._hosts.raise_link())


class Bench:
    """Where trials are made.

    Args:
        request: the options of the command line.
        folder: an empty folder for everything.
        hosts: two hosts for trainings on several; None where there can be none.
    """

    def __init__(self, request: ChaosRequest, folder: Path, hosts: Hosts | None = None) -> None:
        self._request, self.folder, self._hosts = request, folder, hosts
        self._unbroken = dict[Course, Unbroken]()

    def train_unbroken(self, course: Course, ranks: int) -> Unbroken | Ending:
        """Return the unbroken training of a course, which is trained once; how it ended where that was not well."""
        if course in self._unbroken:
            return self._unbroken[course]
        folder = self.folder / f"unbroken-{len(self._unbroken)}"
        folder.mkdir()
        words = self._words(course.plan, folder / "run")
        ending = self._run(course, ranks, words, folder, None)
        if ending.code != 0:
            return ending
        run = folder / "run"
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        unbroken = Unbroken(read_metrics(run), run / "model.safetensors", run / "plan.yaml", ranks, size)
        self._unbroken[course] = unbroken
        return unbroken

    def _words(self, plan: str, run: Path) -> list[str]:
        request = self._request
        settings = [word for setting in request.settings for word in ("--set", setting)]
        clip = [] if request.clip_norm is None else ["--clip-norm", str(request.clip_norm)]
        words = [
            "train",
            request.recipe,
            "--plan",
            plan,
            "--run",
            str(run),
            "--steps",
            str(request.steps),
            *settings,
            *clip,
        ]
        words += ["--batch", str(request.batch), "--seed", str(request.seed), "--save-every", str(request.save_every)]
        return [*words, "--keep", "3", "--json"]

    def _run(
        self,
        course: Course,
        ranks: int,
        words: Sequence[str],
        folder: Path,
        fault: Path | None,
        tend: Tend = lambda lines: None,
    ) -> Ending:
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        variables = {LOG_VARIABLE: str(folder / "log"), "TMPDIR": str(temporary)}
        if fault is not None:
            variables[VARIABLE] = str(fault)
        hosts = self._hosts if course.hosts > 1 else None
        is_full = fault is not None and Fault.read(fault).kind is FaultKind.STDOUT
        limit = LIMIT_SECONDS if accelerator_type() is None else NEW_PROCESS_SECONDS
        return run_command(course, ranks, words, folder, variables, limit, hosts, tend, is_full)

    def try_fault(self, number: int, course: Course, unbroken: Unbroken, fault: Fault) -> FaultTrial:
        """Train with a fault, go on from where it has ended, and return all of it; its files are kept for the judge."""
        folder = Path(fault.log).parent
        run = folder / "run"
        run.mkdir()
        known_files = set(SHARED_MEMORY.glob("*"))
        if fault.whole_disk:
            mount_disk(run, str(max(4 << 20, 4 * unbroken.bytes)))
        fault.write(folder / "fault")
        words = self._words(str(unbroken.plan), run)
        log, struck = FaultLog(folder / "log"), folder / "fault"
        keeper = LinkKeeper(self._hosts, fault, log) if self._hosts and fault.kind is FaultKind.LINK else None
        tend: Tend = keeper.tend if keeper else lambda lines: None
        endings = [self._run(course, unbroken.ranks, [*words, *self._reaction(fault, course)], folder, struck, tend)]
        if keeper and not log.read("link up"):
            keeper.raise_link()
        release(log.path)  # what could not be killed ends now
        leftovers = [f"process {orphan}" for orphan in end_orphans()]
        if fault.whole_disk:  # what is said below of files is said of those on the disk
            kept_folder = folder / "kept"
            shutil.copytree(run, kept_folder)
            unmount_disk(run)
            run.rmdir()
            kept_folder.rename(run)
        while endings[-1].code not in (0, None) and len(endings) < 3:
            if len(endings) == 2:  # as the sentence says: take another checkpoint
                self._remove_damaged(log)
            endings.append(self._run(course, unbroken.ranks, [*words, "--resume", "auto"], folder, struck))
            leftovers += [f"process {orphan}" for orphan in end_orphans()]
        leftovers += [f"shared memory {path.name}" for path in set(SHARED_MEMORY.glob("*")) - known_files]
        leftovers += _find_unfinished(run, folder / "tmp")
        return FaultTrial(number, course, fault, endings, log, read_metrics(run), run / "model.safetensors", leftovers)

    def _reaction(self, fault: Fault, course: Course) -> list[str]:
        is_hang = fault.kind in HANGS and fault.recovery != "none"
        words = ["--hang-after", str(self._request.hang_after)] if is_hang else []
        if fault.recovery == "restart":
            words += ["--max-restarts", "1"]
            words += ["--on-hang", "restart"] if fault.kind in HANGS and course.launcher == "own" else []
        return words + ["--requeue-code", str(REQUEUE_CODE)] * (fault.kind is FaultKind.HANGUP)

    def _remove_damaged(self, log: FaultLog) -> None:
        for entry in log.read("struck"):
            if "damaged" in entry:
                shutil.rmtree(Path(entry["damaged"]).parent, ignore_errors=True)


def read_metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Return the last line of every step of a run's metrics, without times."""
    metrics = dict[int, dict[str, Any]]()
    with suppress(OSError):
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                content = json.loads(line)
                if "loss" in content:  # a step, not an epoch or what an audit said
                    metrics[content["step"]] = {
                        name: content.get(name) for name in ("step", "epoch", "loss", "learning_rate")
                    }
    return metrics


def _find_unfinished(run: Path, temporary: Path) -> list[str]:
    """Return what a run that ended well should not have left in its folder, nor in that for temporary files."""
    paths = [path for path in run.rglob("*") if path.name.startswith(".") or path.name == "unfinished"]
    paths += [path for path in temporary.glob("*") if not path.name.startswith("torchelastic_")]
    return [f"file {path.relative_to(run.parent)}" for path in paths]
