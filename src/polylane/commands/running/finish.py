"""Finish: a run's files in their place, and what is printed of its outcome."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylane.commands.logs.goodput import describe_goodput
from polylane.commands.printing import format_count, format_seconds, print_json, print_line
from polylane.commands.progress import describe_test
from polylane.errors import PolylaneError, format_plural
from polylane.observe.timeline import Timeline
from polylane.output import say_at_once
from polylane.plan.spec import shorten_plan

if TYPE_CHECKING:
    from polylane.commands.logs.step_log import TrainingOutcome
    from polylane.commands.requests import FolderRequest, TrainRequest
    from polylane.commands.running.resume import NothingLeft
    from polylane.commands.running.run_folder import RunFolder


def raise_if_stopped(folder: RunFolder, outcome: TrainingOutcome) -> None:
    """Raise on every worker alike where a loss was not finite.

    Args:
        folder: folder of the run, which the message names.
        outcome: what this worker has come to.

    Raises:
        PolylaneError: a loss was not finite, and the training has stopped for it.
    """
    if outcome.stopped is not None:
        cause = f"{outcome.cause}; " if outcome.cause else ""
        raise PolylaneError(
            f"{_describe_anomaly(outcome, outcome.stopped)}: training stopped, and no weights were saved; "
            f"{cause}the metrics are "
            f"in {folder.metrics}, and --on-nan warn continues instead"
        )


def _describe_anomaly(outcome: TrainingOutcome, at: tuple[int, int]) -> str:
    return f"the loss was {outcome.bad_loss} at step {at[0]} (epoch {at[1]})"


def finish_run(request: TrainRequest, folder: RunFolder, outcome: TrainingOutcome, goodput: Mapping[str, Any]) -> None:
    """Put the run's files in place of an earlier run's, and print what it has come to.

    Args:
        request: the options of the command line.
        folder: folder of the run, which this process has written.
        outcome: what the workers have come to.
        goodput: where the time of the run went, with its verdict, see :meth:`.Reporter.judge`.

    Raises:
        PolylaneError: the loss was not finite, the weights were not saved, or the last checkpoint was not.
    """
    write_timelines(folder, outcome, request.recipe)  # also of a run that stopped: it shows where
    raise_if_stopped(folder, outcome)
    if outcome.ended_early:
        _tell_early_end(request, outcome)
        return
    if not outcome.saved:
        hint = "" if folder.kept() is None else f"; what else there is of the run is in {folder.metrics.parent}"
        raise PolylaneError(
            f"the weights were not saved after {format_plural(outcome.steps, 'step')}: {outcome.cause}{hint}"
        )
    if outcome.not_finite is not None:
        print(f"polylane: {_describe_anomaly(outcome, outcome.not_finite)}, and training went on", file=sys.stderr)
    # Only now, after everything that can fail, the earlier run's files are replaced.
    folder.finish()
    files = folder.files()
    summary = {
        "recipe": request.recipe,
        "plan": outcome.plan,
        "workers": outcome.timeline.ranks,
        "steps": outcome.steps,
        "samples": outcome.samples,
        "seconds": outcome.seconds,
        "loss": outcome.loss,
        "train_loss": outcome.train_loss,
        "test_loss": outcome.test_loss,
        **({"metrics": dict(outcome.test_metrics)} if outcome.test_metrics else {}),
        **({"stop_reason": outcome.stop_reason} if outcome.stop_reason else {}),
        "samples_per_second": outcome.samples_per_second,
        "utilization": outcome.timeline.utilization(),
        **({} if outcome.staleness is None else {"staleness": outcome.staleness}),
        "sent_bytes": list(outcome.timeline.sent()),
        "bytes_a_step": list(outcome.traffic),
        **({"checkpoint_stall": outcome.stall_seconds} if request.saves_checkpoints else {}),
        **({} if outcome.audit is None else {"audit": asdict(outcome.audit)}),
        "goodput": dict(goodput),
        "run": str(folder.path),
        "files": files,
    }
    if request.json:
        print_json(summary)
    else:
        _print_outcome(request, folder, outcome, goodput)


def write_timelines(folder: RunFolder, outcome: TrainingOutcome, name: str) -> None:
    """Write the timelines of the steps that are shown; their titles say of which recipe or script, and plan.

    Args:
        folder: folder of the run.
        outcome: what the workers have come to.
        name: of the recipe or script, as the user gave it.
    """

    def note(timeline: Timeline) -> Timeline:
        return replace(
            timeline, notes={**timeline.notes, "recipe": Path(name).name, "plan": shorten_plan(outcome.plan)}
        )

    folder.timelines(note(outcome.timeline), {key: note(shown) for key, shown in outcome.timelines.items()})


def _print_outcome(
    request: TrainRequest, folder: RunFolder, outcome: TrainingOutcome, goodput: Mapping[str, Any]
) -> None:
    test = describe_test(outcome.test_loss, outcome.test_metrics)
    print(
        f"{format_plural(outcome.steps, 'step')} in {format_seconds(outcome.seconds)}: final loss "
        f"{outcome.loss:.4f}{test}"
    )
    if outcome.stop_reason:
        print_line(f"ended early: {outcome.stop_reason}")
    speed = f"{outcome.samples_per_second:,.0f} samples/s{_describe_traffic(outcome)}"
    print_line(speed if folder.page is None else f"{speed}; see {folder.page}")
    for line in sync_traffic_lines(outcome.traffic, len(outcome.traffic) - outcome.servers):
        print(line)
    if request.saves_checkpoints:
        share = outcome.stall_seconds / max(outcome.seconds, 1e-9)
        print(f"checkpoint stall: {format_seconds(outcome.stall_seconds)}, {share:.1%} of the time")
    if outcome.audit is not None:
        print_line(str(outcome.audit))
    if outcome.staleness:
        print(_describe_staleness(outcome.staleness))
    if goodput["verdict"]:
        print_line(goodput["verdict"])
    print_line(describe_goodput(goodput))
    for sentence in goodput["advice"]:
        print_line(sentence)
    print_line(f"{folder.path}/: {', '.join(Path(file).name for file in folder.files().values())}")


def _tell_early_end(request: TrainRequest, outcome: TrainingOutcome) -> None:
    """Say how to go on after a signal.

    Raises:
        PolylaneError: the checkpoint that the signal asked for could not be written.
    """
    if not outcome.checkpoint.endswith(f"{outcome.steps:08d}"):
        raise PolylaneError(
            f"the training was ended after {format_plural(outcome.steps, 'step')}, and no checkpoint of that step "
            f"could be written; the newest is {outcome.checkpoint or 'none'}"
        )
    if request.json:
        print_json({"ended_early": True, "steps": outcome.steps, "checkpoint": outcome.checkpoint})
    else:
        steps = format_plural(outcome.steps, "step")
        print(f"ended after {steps}; {outcome.checkpoint} has all: resume with --resume auto")


def end_without_steps(folder: RunFolder, nothing_left: NothingLeft) -> None:
    """Say that all steps are made; write the weights where the run died after its last step, before they were."""
    from polylane.checkpoint.manifest import read_manifest
    from polylane.checkpoint.read_tensors import read_weights
    from polylane.runtime.parameters.broadcast import save_safetensors

    def write(path: Path) -> None:
        save_safetensors(read_weights(nothing_left.folder, read_manifest(nothing_left.folder)), path)

    written = folder.add_weights(nothing_left.step, write)
    say_at_once(f"{nothing_left}{'' if written is None else f'; {written} was missing, and has its weights now'}")


def describe_kept(request: FolderRequest, folder: RunFolder) -> str:
    """Describe what there is of a run that a signal ended at once."""
    if (kept_path := folder.kept()) is None:
        return "nothing was written"
    if folder.model.exists():
        return f"{kept_path}/ keeps what was written so far, the weights among it"
    if request.saves_checkpoints:
        return f"{kept_path}/ keeps what was written so far, and the checkpoints that were complete"
    return f"{kept_path}/ keeps what was written so far, no weights among it: no checkpoints were requested"


def _describe_staleness(updates: Mapping[int, int]) -> str:
    """Describe how stale the updates of parameter servers were."""
    count = sum(updates.values())
    mean = sum(stale * times for stale, times in updates.items()) / count
    return (
        f"{format_plural(count, 'update')} of servers, of weights that were {mean:.2g} updates old, at most "
        f"{max(updates)}"
    )


def sync_traffic_lines(traffic: Sequence[Mapping[str, float]], training: int) -> list[str]:
    """Return lines with the bytes of gradient synchronization per step, next to theory; none without synchronization.

    Args:
        traffic: bytes of every worker by kind, dedicated servers after those that train.
        training: number of workers that train.
    """
    lines = []
    for role, group in (("worker", traffic[:training]), ("server of its own", traffic[training:])):
        sent, theory = (sum(counts[key] for counts in group) / max(len(group), 1) for key in ("agreement", "theory"))
        if sent or theory:
            lines.append(
                f"for replicas to agree each {role} sent {format_count(sent, 'B')} a step (theory: "
                f"{format_count(theory, 'B')})"
            )
    return lines


def _describe_traffic(outcome: TrainingOutcome) -> str:
    sent = sum(outcome.timeline.sent())
    return f", {format_count(sent, 'B')} sent in a step" if sent else ""
