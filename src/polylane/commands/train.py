"""``polylane train``: start the workers, show the progress, and write the results."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import format_count, format_seconds, print_json, print_line
from polylane.commands.running.launch import Reporter, start_workers
from polylane.commands.running.resume import NothingLeft, prepare_checkpoints
from polylane.commands.running.run_control import parse_interval
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import INTERRUPTIONS, PolylaneError, format_plural
from polylane.output import put_work_first, say_at_once
from polylane.plan.fixed_keys import parse_auto
from polylane.runtime.workers.stop_request import LauncherSignals, Stopped, StopRequest
from polylane.runtime.workers.torchrun_worker import TorchrunWorker, identify_launch

if TYPE_CHECKING:
    from polylane.commands.requests import TrainRequest
    from polylane.commands.running.step_log import TrainingOutcome
    from polylane.diagnosis.report import HangReport
    from polylane.plan.plan import Plan
    from polylane.plan.spec import Spec

T = TypeVar("T")

LONGEST_GRACE = 24 * 3600  # seconds; timers of the operating system do not take any number


def run(request: TrainRequest) -> None:
    """Train, and print the outcome.

    Raises:
        PolylaneError: an option, the recipe or the plan is wrong, or the loss is not finite and ``on_nan`` is stop.
        OutOfMemory: a worker asked for memory in vain.
        WorkerFailed: an exception ended one of the workers.
    """
    put_work_first()
    if request.epochs is not None and request.steps is not None:
        raise PolylaneError("--epochs and --steps exclude each other: give one of them")
    inputs.check_positive("--clip-norm", request.clip_norm)
    inputs.check_positive("--hang-after", request.trouble.hang_after)
    if not 0 <= request.trouble.grace <= LONGEST_GRACE:  # also where it is not a number
        raise PolylaneError(f"--grace {request.trouble.grace:g}: give seconds, from 0 to {LONGEST_GRACE} (a day)")
    request = _check_saving(request)
    if request.trouble.requeue_code and "RANK" in os.environ:
        raise PolylaneError("--requeue-code is not for torchrun: the exit code is torchrun's own")
    path = request.run_folder
    folder = RunFolder(
        path or Path("run") / _recipe_name(request.recipe),
        given=path is not None,
        launch=identify_launch(),
        warn=say_at_once if request.trouble.on_disk_error == "warn" else None,
    )
    stop = StopRequest(waits_for_save=request.saves_checkpoints)
    ended_early = False
    # Before anything takes long: a plan that is searched, or a recipe that imports torch.
    if "RANK" in os.environ:
        worker = TorchrunWorker(stop, request.trouble.grace, lambda number: _describe_kept(request, folder))
        worker.start()
        try:
            _claim_and_train(request, folder, lambda request: _under_torchrun(request, folder, stop, worker))
        finally:
            worker.close()
    else:
        with LauncherSignals(stop, request.trouble.grace, say_at_once).handled():
            ended_early = _claim_and_train(request, folder, lambda request: _train(request, folder, stop))
    # Ctrl-C has its exit code also where it waited for a checkpoint; other signals ask for a good end.
    if stop.number == signal.SIGINT:
        raise Stopped(signal.SIGINT, "a checkpoint was saved")
    if ended_early and request.trouble.requeue_code:
        sys.exit(request.trouble.requeue_code)


def _claim_and_train(request: TrainRequest, folder: RunFolder, train: Callable[[TrainRequest], T]) -> T:
    request = replace(request, plan=_choose_plan(request))
    inputs.open_recipe(request)  # a mistake in it is reported before polylane imports torch
    # Under torchrun only rank 0 writes, and looks: the folder need not be there on other hosts.
    with folder.claimed(os.environ.get("RANK", "0") == "0"):
        request = replace(request, model_path=folder.model)
        if os.environ.get("RANK", "0") == "0":
            request = prepare_checkpoints(request, folder.path, say_at_once, folder.continues)
        return train(request)


def _check_saving(request: TrainRequest) -> TrainRequest:
    """Check the options of checkpoints; restarts without checkpoints would begin from the beginning.

    Raises:
        PolylaneError: the interval cannot be parsed, or the folder whose checkpoints are meant is not named.
    """
    if request.saving.resume == "auto" and request.run_folder is None:
        raise PolylaneError(
            "--resume auto resumes from the newest checkpoint of the run's folder: name that with --run DIR"
        )
    if request.saving.resume == "":
        raise PolylaneError("--resume '': give auto, or the path of a checkpoint")
    if request.trouble.on_hang == "restart" and not request.saving.max_restarts:
        raise PolylaneError("--on-hang restart: say with --max-restarts N how often workers are started again")
    if request.saving.max_restarts and request.saving.save_every is None:
        request = replace(request, saving=replace(request.saving, save_every="auto"))
    if request.saving.save_every is not None:
        parse_interval(request.saving.save_every)
    return request


def _train(request: TrainRequest, folder: RunFolder, stop: StopRequest) -> bool:
    """Train on workers that this process starts; return whether a signal ended the training early.

    Raises:
        Stopped: a signal ended the run at once.
    """
    try:
        with Reporter(folder, to_stderr=request.json) as reporter:
            outcome = start_workers(request, reporter, stop)
        _finish(request, folder, outcome)
        return outcome.ended_early
    except NothingLeft as nothing_left:
        _end_without_steps(folder, nothing_left)
        return False
    except Stopped as stopped:
        raise Stopped(stopped.number, stopped.reason or _describe_kept(request, folder)) from None
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT, _describe_kept(request, folder)) from None


def _describe_kept(request: TrainRequest, folder: RunFolder) -> str:
    """Describe what there is of a run that a signal ended at once."""
    if os.environ.get("RANK", "0") != "0":  # of several hosts, on another one than that of the files
        return ""
    if (kept_path := folder.kept()) is None:
        return "nothing was written"
    if folder.model.exists():
        return f"{kept_path}/ keeps what was written so far, the weights among it"
    if request.saves_checkpoints:
        return f"{kept_path}/ keeps what was written so far, and the checkpoints that were complete"
    return f"{kept_path}/ keeps what was written so far, no weights among it: no checkpoints were requested"


def _choose_plan(request: TrainRequest) -> Spec | Plan | str:
    """Return the plan; under torchrun plan=auto is deferred until the process group exists."""
    if parse_auto(request.plan) is None or "RANK" not in os.environ:
        return inputs.choose_plan(request)
    started = os.environ.get("WORLD_SIZE")
    if request.workers is not None and str(request.workers) != started and request.fewest_workers is None:
        raise PolylaneError(f"--workers {request.workers}, but torchrun started {started}: they must be equal")
    return str(request.plan)


def _recipe_name(recipe: str) -> str:
    """Return a recipe's name: that of its file, or the last part of its module's name."""
    return Path(recipe).stem if recipe.endswith(".py") else recipe.rpartition(".")[2]


def _under_torchrun(request: TrainRequest, folder: RunFolder, stop: StopRequest, worker: TorchrunWorker) -> None:
    """Train in this process, which is one of torchrun's workers; rank 0 writes and prints."""
    import torch

    from polylane.commands.running.worker import run_torchrun_worker
    from polylane.runtime.progress.host_watch import HostWatch
    from polylane.runtime.workers.failure import Failure
    from polylane.runtime.workers.fork import ECHO_GRACE_SECONDS, threads_per_worker
    from polylane.runtime.workers.world import World

    torch.set_num_threads(threads_per_worker(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    watch = HostWatch.start(
        local_rank, request.trouble.on_hang, request.trouble.hang_after, partial(_keep_report, folder)
    )
    try:
        world = watch.attach(replace(World.join(), stop=stop))
        if world.store is not None:
            worker.meet_peers(world.store, world.size)
        if world.rank != 0:
            outcome = run_torchrun_worker(request, world, lambda message: None)
            watch.end()
            _raise_if_stopped(folder, outcome)
        else:
            with Reporter(folder, to_stderr=request.json) as reporter:
                outcome = run_torchrun_worker(request, world, partial(reporter, 0))
            watch.end()
            _finish(request, folder, outcome)
        worker.mark_reported()
    except NothingLeft as nothing_left:
        worker.mark_reported()
        if int(os.environ["RANK"]) == 0:
            _end_without_steps(folder, nothing_left)
    except PolylaneError:
        worker.mark_reported()
        raise
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        failure = Failure.of_exception(int(os.environ["RANK"]), error)
        # torchrun ends all workers as soon as one ends: an echo waits, so that the worker with the cause can print it.
        if failure.is_echo:
            worker.name_lost_peer(ECHO_GRACE_SECONDS, " ".join(failure.error_message.split())[:200])
            time.sleep(ECHO_GRACE_SECONDS)
            sys.exit(1)
        worker.mark_reported()
        exception = failure.to_exception()
        if isinstance(exception, PolylaneError):
            raise exception from None
        say_at_once(str(exception))
        sys.exit(1)


def _keep_report(folder: RunFolder, report: HangReport) -> None:
    """Keep a report of a hang or a failure in the run's folder, where this host writes that."""
    if os.environ["RANK"] == "0":
        with suppress(PolylaneError):  # what is reported matters more than that it cannot be kept
            folder.why(report)


# The end -------------------------------------------------------------------------------------------------------------


def _raise_if_stopped(folder: RunFolder, outcome: TrainingOutcome) -> None:
    if outcome.stopped is not None:
        cause = f"{outcome.cause}; " if outcome.cause else ""
        raise PolylaneError(
            f"{_describe_anomaly(outcome, outcome.stopped)}: training stopped, and no weights were saved; "
            f"{cause}the metrics are "
            f"in {folder.metrics}, and --on-nan warn continues instead"
        )


def _describe_anomaly(outcome: TrainingOutcome, at: tuple[int, int]) -> str:
    return f"the loss was {outcome.bad_loss} at step {at[0]} (epoch {at[1]})"


def _finish(request: TrainRequest, folder: RunFolder, outcome: TrainingOutcome) -> None:
    folder.timeline(outcome.timeline)
    _raise_if_stopped(folder, outcome)
    if outcome.ended_early:
        _tell_early_end(request, folder, outcome)
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
        "samples_per_second": outcome.samples_per_second,
        "utilization": outcome.timeline.utilization(),
        **({} if outcome.staleness is None else {"staleness": outcome.staleness}),
        "sent_bytes": list(outcome.timeline.sent()),
        "bytes_a_step": list(outcome.traffic),
        **({"checkpoint_stall": outcome.stall_seconds} if request.saves_checkpoints else {}),
        **({} if outcome.audit is None else {"audit": asdict(outcome.audit)}),
        "run": str(folder.path),
        "files": files,
    }
    if request.json:
        print_json(summary)
        return
    test = "" if outcome.test_loss is None else f", test loss {outcome.test_loss:.4f}"
    print(
        f"{format_plural(outcome.steps, 'step')} in {format_seconds(outcome.seconds)}: final loss "
        f"{outcome.loss:.4f}{test}"
    )
    steps = outcome.timeline.notes["step"]
    print_line(
        f"{outcome.samples_per_second:,.0f} samples/s; {'step' if steps.isdecimal() else 'steps'} {steps} kept the "
        f"workers busy {outcome.timeline.utilization():.1%} of the time{_describe_traffic(outcome)}, "
        f"see {folder.path / 'swimlane.html'}"
    )
    for line in sync_traffic_lines(outcome.traffic, len(outcome.traffic) - outcome.servers):
        print(line)
    if request.saves_checkpoints:
        share = outcome.stall_seconds / max(outcome.seconds, 1e-9)
        print(f"checkpoint stall: {format_seconds(outcome.stall_seconds)}, {share:.1%} of the time")
    if outcome.audit is not None:
        print_line(str(outcome.audit))
    if outcome.staleness:
        print(_describe_staleness(outcome.staleness))
    print_line(f"{folder.path}/: {', '.join(Path(file).name for file in files.values())}")


def _end_without_steps(folder: RunFolder, nothing_left: NothingLeft) -> None:
    """Say that all steps are made; write the weights where the run died after its last step, before they were."""
    from polylane.checkpoint.manifest import read_manifest
    from polylane.checkpoint.read_tensors import read_weights
    from polylane.runtime.parameters.broadcast import save_safetensors

    def write(path: Path) -> None:
        save_safetensors(read_weights(nothing_left.folder, read_manifest(nothing_left.folder)), path)

    written = folder.add_weights(nothing_left.step, write)
    say_at_once(f"{nothing_left}{'' if written is None else f'; {written} was missing, and has its weights now'}")


def _tell_early_end(request: TrainRequest, folder: RunFolder, outcome: TrainingOutcome) -> None:
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
    return f" and sent {format_count(sent, 'B')}" if sent else ""
