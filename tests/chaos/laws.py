"""Laws: what must hold of every training that a fault has struck."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.chaos.faults import DAMAGES, DEATHS, HANGS, LIMITS, LOADS, RAISES, FaultKind
from tests.chaos.launches import Ending
from tests.chaos.trials import REQUEUE_CODE, FaultTrial, Unbroken

MOST_SECONDS = 10.0  # from a fault to the sentence that names it, and to the end of a training that ends

_ENDS_AS_INPUT = LOADS | LIMITS | {FaultKind.OPTIMIZER}  # the sentence is about the user's function, not about a worker
_DEATHS = {FaultKind.SEGFAULT: "SIGSEGV", FaultKind.EXIT: r"exit code 0"}
_HANGS = {FaultKind.STOP: "stopped", FaultKind.INTERPRETER: "interpreter", FaultKind.FROZEN: "held by the system"}
_SENTENCES = {
    FaultKind.HANGUP: "SIGHUP: saving a checkpoint",
    FaultKind.STDOUT: "stdout cannot be written: No space left on device; training continues",
    FaultKind.WRITER: "was stopped for .*, and was ended|it was stopped",
    FaultKind.DESCRIPTORS: "cannot open another file",
    FaultKind.PROCESSES: "cannot start another process",
    FaultKind.FULL_DISK: "No space left|File too large|cannot be written|could not be written",
}
_LINK = r"hangs: .*\blink\b.*\bcarries nothing"


def find_named_at(trial: FaultTrial) -> float | None:
    """Return the moment at which a sentence named what the fault had done; None where none did."""
    pattern = re.compile(_pattern_of_name(trial))
    return next((at for at, line in trial.endings[0].said if pattern.search(line)), None)


def _pattern_of_name(trial: FaultTrial) -> str:
    kind, rank = trial.fault.kind, trial.fault.rank
    who = rf"\b(?:worker|rank) {rank}\b"
    if kind in DEATHS | DAMAGES:
        named = rf"{who}.*{_DEATHS.get(kind, 'SIGKILL')}"
        # How a process died is gone once its parent has asked for it: where torchrun's agent does so before the other
        # workers look, they say that it ended, and the agent's own report has the signal.
        return (
            named
            if trial.course.launcher == "own"
            else rf"{named}|{who} failed: it ended, and how could not be determined"
        )
    if kind is FaultKind.LINK:
        return _LINK
    if kind in HANGS:
        return rf"hangs: .*{who}.*{_HANGS[kind]}"
    if kind in RAISES:
        return rf"{who} failed"
    if kind in LOADS:
        return "of the dataset raised InjectedError"
    if kind is FaultKind.OPTIMIZER:
        return r"optimizer\.step\(\) raised InjectedError"
    return _SENTENCES[kind]


def find_redone(trial: FaultTrial) -> int | None:
    """Return the number of complete steps that were made again; None where the training never began again."""
    struck = trial.struck
    entries = [] if struck is None else [e for e in trial.log.read("first step") if e["time"] > struck["time"]]
    return None if struck is None or not entries else max(0, struck["step"] - int(entries[0]["step"]))


def find_seconds(trial: FaultTrial) -> float | None:
    """Return the seconds from the fault to the training's being back at work, or to its end where it had to end."""
    struck = trial.struck
    if struck is None or trial.endings[0].code is None:
        return None
    if len(trial.endings) == 1:
        times = [entry["time"] for entry in trial.log.read("at work") if entry["time"] > struck["time"]]
        return max(times) - struck["time"] if times else None
    return trial.endings[0].ended - float(struck["time"])


def judge_trial(trial: FaultTrial, unbroken: Unbroken, save_every: int, exact: bool) -> None:
    """Write down the laws that a trial has broken, each as a sentence.

    Args:
        trial: the trial, whose list of broken laws grows.
        unbroken: the training that nothing struck.
        save_every: steps between two checkpoints.
        exact: whether the plan's numbers are the same from one training to the next; else only their steps, names and
            shapes are held against the unbroken training's.
    """
    broken, struck = trial.broken, trial.struck
    if struck is None:
        broken.append(f"the fault did not strike; the training ended with code {trial.endings[0].code}")
        return
    if trial.fault.kind is FaultKind.FULL_DISK and struck.get("left"):
        broken.append(f"the disk had {struck['left']} bytes left")
    _judge_endings(trial)
    if trial.fault.kind is FaultKind.LINK:
        _judge_link(trial, struck)
    elif trial.fault.kind not in HANGS:
        wrong = [line for ending in trial.endings for _, line in ending.said if "the training hangs: " in line]
        broken += [f"a hang was named beside it: {line}" for line in wrong[:1]]
    named = find_named_at(trial)
    if trial.fault.kind is FaultKind.LINK and trial.fault.recovery == "none":
        wrong = [line for _, line in trial.endings[0].said if "hangs" in line]
        broken += [f"a link that was down for a moment was named: {line}" for line in wrong[:1]]
    elif named is None:
        broken.append(f"nothing named it: {_last_line(trial.endings[0])}")
    elif named - struck["time"] > MOST_SECONDS and trial.fault.kind is not FaultKind.FULL_DISK:
        broken.append(f"it was named after {named - struck['time']:.1f} s")
    has_ended = len(trial.endings) > 1 and trial.endings[0].code is not None
    if has_ended and (seconds := _find_end_seconds(trial, struck)) > MOST_SECONDS:
        broken.append(f"the training ended {seconds:.1f} s after it")
    _judge_redone(trial, struck, save_every)
    if trial.endings[-1].code == 0:
        _judge_numbers(trial, unbroken, exact)
    broken += [f"left behind: {leftover}" for leftover in trial.left]


def _find_end_seconds(trial: FaultTrial, struck: Mapping[str, Any]) -> float:
    """Return the seconds from the moment at which a training had to end, to its end."""
    first_ending, since = trial.endings[0], float(struck["time"])
    if trial.fault.recovery == "restart":  # it ends because the checkpoint that the new workers find is damaged
        name = _name_damaged(trial)
        since = next((at for at, line in first_ending.said if name and name in line), since)
    return first_ending.ended - since


def _judge_link(trial: FaultTrial, struck: Mapping[str, Any]) -> None:
    """The link's state was read back after it was taken down, and after it was raised."""
    down, up = trial.log.read("link down"), trial.log.read("link up")
    if [entry["state"] for entry in down] != ["DOWN"]:
        trial.broken.append(f"the link did not go down: {down}")
    elif [entry["states"] for entry in up] != [["UP", "UP"]]:
        trial.broken.append(f"the link did not come up again: {up}")


def _judge_endings(trial: FaultTrial) -> None:
    kind, first_ending = trial.fault.kind, trial.endings[0]
    expected = {0} if trial.fault.recovery in ("restart", "none") else {2 if kind in _ENDS_AS_INPUT else 1}
    if kind is FaultKind.HANGUP:
        expected = {REQUEUE_CODE}
    if trial.course.launcher == "torchrun" and expected == {2}:  # torchrun's own code
        expected = {1}
    if kind is FaultKind.FLIPPED and trial.fault.recovery == "restart":
        expected |= {1, 2}  # the damaged checkpoint is refused, which _judge_damaged looks at
    if first_ending.code not in expected:
        broken = "did not end" if first_ending.code is None else f"ended with code {first_ending.code}"
        trial.broken.append(f"the training {broken}, expected {min(expected)}: {_last_line(first_ending)}")
    if first_ending.code != 0 and trial.endings[-1].code != 0:
        last_ending = trial.endings[-1]
        trial.broken.append(f"--resume auto ended with code {last_ending.code}: {_last_line(last_ending)}")
    if any("Traceback" in ending.text and "polylane.commands.cli" in ending.text for ending in trial.endings):
        trial.broken.append("a traceback of polylane's own")
    if kind is FaultKind.FLIPPED and not (_is_named_damaged(trial) or _is_passed_over(trial)):
        trial.broken.append("no sentence named the damaged file")


def _damaged_file(trial: FaultTrial) -> Path:
    return Path((trial.struck or {}).get("damaged", ""))


def _is_named_damaged(trial: FaultTrial) -> bool:
    """Return whether a sentence names the damaged file by its folder and name."""
    return any(_name_damaged(trial) in ending.text for ending in trial.endings)


def _name_damaged(trial: FaultTrial) -> str:
    return "/".join(_damaged_file(trial).parts[-2:])


def _is_passed_over(trial: FaultTrial) -> bool:
    """Return whether nobody read the damaged checkpoint: the next one was under way then, and became complete."""
    redone, damaged = find_redone(trial), re.fullmatch(r"step-(\d+)", _damaged_file(trial).parent.name)
    return redone is not None and damaged is not None and (trial.struck or {})["step"] - 1 - redone > int(damaged[1])


def _judge_redone(trial: FaultTrial, struck: Mapping[str, Any], save_every: int) -> None:
    """The steps since the newest whole checkpoint are made again, and that one is young.

    An interval lies between two checkpoints, also where the next one is still being written: then the steps that were
    made meanwhile come on top. A save waits for the one before, so that these are an interval at most. Another interval
    where the newest was damaged.
    """
    redone, total = find_redone(trial), struck["step"] - 1
    if redone is None:
        return
    damaged = Path(struck.get("damaged", "")).parent.name
    steps = {name: int(match[1]) for name in struck["folders"] if (match := re.match(r"\.?step-(\d+)", name))}
    newest = max((step for name, step in steps.items() if name[0] != "." and name != damaged), default=0)
    under_way = max((step for name, step in steps.items() if name[0] == "." and step > newest), default=total)
    if redone > total - newest:
        trial.broken.append(f"{redone} steps were made again, {total - newest} since the checkpoint of step {newest}")
    meanwhile = min(total - under_way, save_every)
    limit = save_every * (1 + bool(damaged)) + meanwhile
    if redone > limit:
        reason = f"{save_every} are an interval, {meanwhile} were made while a checkpoint was being written"
        trial.broken.append(f"{redone} steps were made again, of which {reason}")


def _judge_numbers(trial: FaultTrial, unbroken: Unbroken, exact: bool) -> None:
    """Every step has its metrics, and the weights are all there; where numbers are exact, each of them is the same."""
    import torch
    from safetensors import safe_open

    missing = sorted(set(unbroken.metrics) - set(trial.metrics))
    if missing and trial.fault.kind is not FaultKind.FULL_DISK:
        trial.broken.append(f"the metrics of {len(missing)} steps are lost, the first is step {missing[0]}")
    differing = [step for step, line in sorted(trial.metrics.items()) if line != unbroken.metrics.get(step)]
    if differing and exact:
        step = differing[0]
        trial.broken.append(f"step {step} is {trial.metrics[step]}, unbroken {unbroken.metrics.get(step)}")
    try:
        with safe_open(trial.weights, "pt") as ours, safe_open(unbroken.weights, "pt") as reference:
            names = list(ours.keys())
            differs = sorted(names) != sorted(reference.keys()) or any(
                not torch.equal(ours.get_tensor(name), reference.get_tensor(name))
                if exact
                else ours.get_tensor(name).shape != reference.get_tensor(name).shape
                for name in names
            )
    except (OSError, ValueError) as error:
        trial.broken.append(f"the weights cannot be read: {error}")
        return
    if differs:
        trial.broken.append(
            f"the {'' if exact else 'names or shapes of the '}weights differ from the unbroken training's"
        )


def _last_line(ending: Ending) -> str:
    lines = [line for line in ending.text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
