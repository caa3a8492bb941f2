"""Campaign: trials one after another, as many as there is time for, and the table of what became of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import console, make_table, print_json, print_line
from polylane.errors import PolylaneError, format_plural
from polylane.runtime.workers.stop_request import Stopped
from tests.chaos.control_groups import FREEZER, PIDS, can_hold
from tests.chaos.faults import (
    LAUNCHERS,
    MEANINGS,
    OF_OWN_LAUNCHER,
    TRANSPORTS,
    Course,
    FaultKind,
    draw_fault,
    draw_pairs,
)
from tests.chaos.isolation import end_orphans, isolate_process
from tests.support.hosts import Hosts

if TYPE_CHECKING:
    from polylane.plan.plan import AnyPlan
    from tests.chaos.launches import Ending
    from tests.chaos.request import ChaosRequest
    from tests.chaos.trials import Bench, FaultTrial, Unbroken

T = TypeVar("T", bound=str)

FEWEST_INTERVALS = 6  # of a training, between checkpoints


def run(request: ChaosRequest) -> bool:
    """Try faults on trainings of a recipe, and print what became of them; return whether every law was kept.

    Raises:
        PolylaneError: an option, the recipe or a plan is wrong, or an unbroken training does not end well.
    """
    plans = _read_plans(request)
    all_kinds = list(FaultKind)
    kinds = _choose("--only", request.only, all_kinds) or all_kinds
    transports = _choose("--transport", request.transports, TRANSPORTS) or TRANSPORTS
    launchers = _choose("--launcher", request.launchers, LAUNCHERS) or LAUNCHERS[:1]
    if request.steps < FEWEST_INTERVALS * request.save_every:
        raise PolylaneError(
            f"--steps {request.steps} with --save-every {request.save_every}: faults need at least {FEWEST_INTERVALS} "
            f"intervals: give --steps {FEWEST_INTERVALS * request.save_every}"
        )
    can_mount = isolate_process()
    if not can_mount:
        print("polylane: disks cannot be mounted here: a full one is a limit on files in place", file=sys.stderr)
    kinds = _leave_out(kinds, launchers)
    courses = [
        Course(plan, transport, launcher) for plan in plans for transport in transports for launcher in launchers
    ]
    on_torchrun = [course for course in courses if course.launcher == "torchrun" and plans[course.plan].processes > 1]
    hosts = _make_hosts(bool(on_torchrun), bool(request.only)) if FaultKind.LINK in kinds else None
    if hosts is None:
        kinds = [kind for kind in kinds if kind is not FaultKind.LINK]
    else:
        courses += [replace(course, hosts=2) for course in on_torchrun]
    from polylane.commands.running import worker  # noqa: F401  what trainings are forked from has imported everything
    from tests.chaos.trials import Bench

    folder = Path(tempfile.mkdtemp(prefix="polylane-chaos-"))
    trials: list[FaultTrial] = []
    try:
        with _raise_on_sigterm():
            _try_faults(request, Bench(request, folder, hosts), kinds, courses, plans, can_mount, trials)
    except (KeyboardInterrupt, Stopped):
        end_orphans()  # what the trial had launched is killed by now; its workers may outlive that a little
        if trials and not request.json:
            _print_outcome(request, trials)
        raise
    finally:
        if not any(trial.broken for trial in trials):
            shutil.rmtree(folder, ignore_errors=True)
    _print_outcome(request, trials)
    return bool(trials) and not any(trial.broken for trial in trials)


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Context manager: SIGTERM raises meanwhile, as Ctrl-C does, so that whatever was started is ended.

    Raises:
        Stopped: there was one.
    """

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    old_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def _read_plans(request: ChaosRequest) -> dict[str, AnyPlan]:
    """Return the plans by their lines.

    Raises:
        PolylaneError: one cannot be parsed, or is left to be found.
    """
    if any(text.startswith("auto") for text in request.plans):
        raise PolylaneError("--plan auto: faults are tried on a plan that is known: name it")
    return {text: inputs.read_plan(text) for text in request.plans}


def _choose(option: str, names: Sequence[str], choices: Sequence[T]) -> list[T]:
    """Return those of the known items that an option names.

    Raises:
        PolylaneError: a name is not known.
    """
    for name in names:
        if name not in choices:
            raise PolylaneError(f"{option} {name}: there is no such thing, known are {', '.join(map(str, choices))}")
    return [choice for choice in choices if choice in names]


def _leave_out(kinds: Sequence[FaultKind], launchers: Sequence[str]) -> list[FaultKind]:
    """Return the faults that can strike here, and say which cannot."""
    missing = {FaultKind.FROZEN: FREEZER, FaultKind.PROCESSES: PIDS}
    missing = {kind: group for kind, group in missing.items() if kind in kinds and not can_hold(group)}
    for kind, group in missing.items():
        print(f"polylane: no fault of kind {kind}: groups of {group} cannot be made here", file=sys.stderr)
    elsewhere = frozenset() if "own" in launchers else OF_OWN_LAUNCHER
    return [kind for kind in kinds if kind not in missing and kind not in elsewhere]


def _make_hosts(has_courses: bool, is_asked: bool) -> Hosts | None:
    """Return two hosts, for a link between them that drops; None where that fault is left out.

    Args:
        has_courses: whether any training can be on two hosts.
        is_asked: whether the fault was named with ``--only``.

    Raises:
        PolylaneError: it was named, and cannot be.
    """
    why = "a link is one of two hosts, whose workers torchrun starts: give --launcher torchrun, a plan of two workers"
    if has_courses:
        result = Hosts.make()
        if isinstance(result, Hosts):
            # Else torch warns that no name service knows the hosts; it reads this as it is imported.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            return result
        why = f"two hosts, namespaces of this machine, cannot be made here: {result}"
        if not is_asked:
            print(f"polylane: no link drops: {why}", file=sys.stderr)
    if is_asked:
        raise PolylaneError(f"--only link: {why}")
    return None


def _try_faults(
    request: ChaosRequest,
    bench: Bench,
    kinds: Sequence[FaultKind],
    courses: Sequence[Course],
    plans: dict[str, AnyPlan],
    can_mount: bool,
    trials: list[FaultTrial],
) -> None:
    """Try faults until their number is reached, or the time is over; a trial that has begun is finished.

    Args:
        request: the options of the command line.
        bench: where trials are made.
        kinds: the faults that are drawn from.
        courses: the trainings that are drawn from.
        plans: by their lines, the plans of these.
        can_mount: whether a run's folder can be a disk of its own.
        trials: where each trial is added once it is judged.

    Raises:
        PolylaneError: an unbroken training does not end well.
    """
    from tests.chaos.laws import judge_trial

    faults = request.faults or (len(kinds) if request.minutes is None else None)
    random_, started = random.Random(request.seed), time.monotonic()
    for number, (kind, course) in enumerate(draw_pairs(random_, kinds, courses), 1):
        over = request.minutes is not None and time.monotonic() - started > 60 * request.minutes
        if over or (faults is not None and number > faults):
            break
        plan = plans[course.plan]
        unbroken = _train_unbroken(bench, course, plan)
        folder = bench.folder / f"trial-{number}"
        folder.mkdir()
        steps = request.steps, request.save_every
        disk = can_mount and kind is FaultKind.FULL_DISK
        fault = draw_fault(random_, kind, _find_ranks(kind, plan), *steps, disk, folder / "log")
        trial = bench.try_fault(number, course, unbroken, fault)
        exact = not (plan.sync.has_servers and plan.sync.is_replica_local)
        judge_trial(trial, unbroken, request.save_every, exact)
        trial.facts = describe_trial(trial)
        trials.append(trial)
        if not request.json:
            _print_trial(trial)
        if not trial.broken:
            shutil.rmtree(folder, ignore_errors=True)


def _find_ranks(kind: FaultKind, plan: AnyPlan) -> Sequence[int]:
    """Return the workers at which a fault of a kind can strike: an optimizer raises where one is, on a server if any.

    Args:
        kind: word for what goes wrong.
        plan: plan of the training.
    """
    from polylane.program.server_assignment import server_rank

    if kind is FaultKind.OPTIMIZER and plan.sync.has_servers:
        return sorted({server_rank(plan, server) for server in range(plan.sync.server_count)})
    return range(plan.processes)


def _train_unbroken(bench: Bench, course: Course, plan: AnyPlan) -> Unbroken:
    """Return the unbroken training of a course.

    Raises:
        PolylaneError: it does not end well.
    """
    from tests.chaos.trials import Unbroken

    outcome = bench.train_unbroken(course, plan.processes)
    if not isinstance(outcome, Unbroken):
        raise PolylaneError(f"{course}: the training does not end well by itself: {_describe_end(outcome)}")
    return outcome


def _describe_end(ending: Ending) -> str:
    """Return what a training said last of its end, with the exception below that where a worker raised one."""
    lines = [line for line in ending.text.splitlines() if line.strip()]
    indices = [i for i, line in enumerate(lines) if line.startswith("polylane: ")]
    if not indices:
        return f"it ended with code {ending.code}"
    sentence, below = lines[indices[-1]].removeprefix("polylane: "), lines[indices[-1] + 1 :]
    return f"{sentence} ({below[-1].strip()})" if below and below[0].startswith("Traceback") else sentence


# What is printed -----------------------------------------------------------------------------------------------------


def _print_trial(trial: FaultTrial) -> None:
    facts, fault = trial.facts, trial.fault
    description = f"rank {fault.rank}, step {facts['step'] or fault.step}, {fault.recovery}"
    notes = [f"{facts['seconds']:.1f} s"] if facts["seconds"] is not None else []
    notes += [format_plural(facts["redone"], "step") + " again"] if facts["redone"] is not None else []
    outcome = "; ".join(trial.broken) if trial.broken else ", ".join(notes) or "went on"
    print_line(
        f"{trial.number:4d}  {fault.kind}, {description}: {trial.course}: {'BROKEN: ' if trial.broken else ''}{outcome}"
    )
    sys.stdout.flush()


def describe_trial(trial: FaultTrial) -> dict[str, Any]:
    """Return a trial as plain data for JSON."""
    from tests.chaos.laws import find_named_at, find_redone, find_seconds

    struck, named = trial.struck, find_named_at(trial)
    return {
        "number": trial.number,
        "fault": str(trial.fault.kind),
        "plan": trial.course.plan,
        "transport": trial.course.transport,
        "launcher": trial.course.launcher,
        "hosts": trial.course.hosts,
        "recovery": trial.fault.recovery,
        "rank": trial.fault.rank,
        "struck": struck is not None,
        "step": None if struck is None else struck["step"],
        "pid": None if struck is None else struck["pid"],
        "named_seconds": None if struck is None or named is None else max(0.0, named - struck["time"]),
        "seconds": find_seconds(trial),
        "redone": find_redone(trial),
        "exit_codes": [ending.code for ending in trial.endings],
        "broken": trial.broken,
    }


def _print_outcome(request: ChaosRequest, trials: Sequence[FaultTrial]) -> None:
    data = [trial.facts for trial in trials]
    broken = [trial for trial in trials if trial.broken]
    if request.json:
        print_json({"recipe": request.recipe, "seed": request.seed, "broken": len(broken), "faults": data})
        return
    groups = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for facts in data:
        groups[facts["fault"], facts["plan"]].append(facts)
    columns = ("struck", "named", "s to name", "s to end or work", "steps again", "laws kept")
    table = make_table("", "fault", "plan", *columns, left=("fault", "plan"))
    for (fault, plan), group in sorted(groups.items()):
        table.add_row(MEANINGS[FaultKind(fault)], plan, *_summarize(group))
    console().print(table)
    struck = sum(facts["struck"] for facts in data)
    print(f"{format_plural(len(data), 'fault')}, {struck} struck; {len(data) - len(broken)} kept every law")
    for trial in broken:
        print_line(f"broken by {trial.number}, see {Path(trial.fault.log).parent}: {'; '.join(trial.broken)}")


def _summarize(group: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cells of a row: counts, and the largest of each figure."""

    def largest(name: str, form: str) -> str:
        values = [facts[name] for facts in group if facts[name] is not None]
        return format(max(values), form) if values else "-"

    named = sum(facts["named_seconds"] is not None for facts in group)
    pass_count = sum(not facts["broken"] for facts in group)
    figures = [largest("named_seconds", ".1f"), largest("seconds", ".1f"), largest("redone", "d")]
    counts = [f"{count}/{len(group)}" for count in (sum(facts["struck"] for facts in group), named)]
    return [*counts, *figures, f"{pass_count}/{len(group)}"]
