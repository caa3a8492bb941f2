"""``polylane train``: start the workers, show the progress, and write the results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import format_count, format_plural, format_seconds, print_json
from polylane.commands.progress import display
from polylane.commands.run_folder import RunFolder
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import parse_auto

if TYPE_CHECKING:
    from polylane.commands.requests import TrainRequest
    from polylane.commands.step_log import TrainingOutcome
    from polylane.plan.plan import Plan
    from polylane.plan.spec import Spec


def run(request: TrainRequest) -> None:
    """Train, and print the outcome.

    Raises:
        PolylaneError: an option, the recipe or the plan is wrong, or the loss is not finite and ``on_nan`` is stop.
        OutOfMemory: a worker asked for memory in vain.
        WorkerFailed: an exception ended one of the workers.
    """
    if request.epochs is not None and request.steps is not None:
        raise PolylaneError("--epochs and --steps exclude each other: give one of them")
    inputs.check_positive("--clip-norm", request.clip_norm)
    request = replace(request, plan=_choose_plan(request))
    inputs.open_recipe(request)  # a mistake in it is reported before polylane imports torch
    given = request.run_folder
    place = RunFolder(given or Path("run") / _recipe_name(request.recipe), given=given is not None)
    place.check()
    with place.claimed(os.environ.get("RANK", "0") == "0"):  # under torchrun only rank 0 writes
        _train(replace(request, model_path=place.model), place)


def _train(request: TrainRequest, place: RunFolder) -> None:
    if "RANK" in os.environ:
        _under_torchrun(request, place)
        return
    try:
        with _Reporter(place, to_stderr=request.json) as reporter:
            outcome = _start(request, reporter)
    except KeyboardInterrupt:
        if (kept := place.kept()) is not None:
            print(f"{kept}/ keeps what was written so far", file=sys.stderr)
        raise
    _finish(request, place, outcome)


def _choose_plan(request: TrainRequest) -> Spec | Plan | str:
    """Return the plan; under torchrun plan=auto is deferred until the process group exists."""
    if parse_auto(request.plan) is None or "RANK" not in os.environ:
        return inputs.choose_plan(request)
    started = os.environ.get("WORLD_SIZE")
    if request.workers is not None and str(request.workers) != started:
        raise PolylaneError(f"--workers {request.workers}, but torchrun started {started}: they must be equal")
    return str(request.plan)


def _recipe_name(recipe: str) -> str:
    """Return a recipe's name: that of its file, or the last part of its module's name."""
    return Path(recipe).stem if recipe.endswith(".py") else recipe.rpartition(".")[2]


class _Reporter:
    """Receiver of rank 0's messages, which writes them into the run's folder and onto the screen."""

    def __init__(self, place: RunFolder, to_stderr: bool) -> None:
        self._place = place
        self._display = display(to_stderr)

    def __call__(self, rank: int, message: dict[str, Any]) -> None:
        content = {key: value for key, value in message.items() if key != "kind"}
        if message["kind"] == "begin":
            self._place.begin()
            self._place.plan(message["plan"])
            self._display.begin(message)
        elif message["kind"] == "testing":
            self._display.testing(message)
        elif message["kind"] == "step":
            self._place.metric(content)
            self._display.step(message)
        else:
            self._place.metric(content)
            self._display.epoch(message)

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._display.close()
        if error is None:
            self._place.close()
        else:
            with suppress(PolylaneError):  # the exception that ended the run matters more
                self._place.close()


# Three ways to start -------------------------------------------------------------------------------------------------


def _start(request: TrainRequest, reporter: _Reporter) -> TrainingOutcome:
    """Start workers on this host: forked on the CPU, in new processes where there are accelerators."""
    from polylane.runtime.workers.world import accelerator_type

    plan = request.plan
    assert plan is not None and not isinstance(plan, str)
    if accelerator_type() is not None:
        from polylane.commands.training import run_spawned_worker
        from polylane.runtime.workers.spawn import spawn_workers

        return spawn_workers(partial(run_spawned_worker, request), plan.processes, reporter)[0]
    from polylane.commands.training import load_materials, prepare_once, run_forked_worker
    from polylane.inspection.memory_prediction import with_predicted_memory
    from polylane.runtime.workers.fork import fork_workers, limit_to_one_thread
    from polylane.runtime.workers.out_of_memory import OutOfMemory

    limit_to_one_thread()
    # Before the fork, so that workers share the memory of the data, and a wrong recipe is reported once.
    training = load_materials(request)
    prepared = prepare_once(training, plan)
    try:
        return fork_workers(partial(run_forked_worker, training, prepared), plan.processes, reporter)[0]
    except OutOfMemory as error:
        raise with_predicted_memory(error, prepared, training.problem.samples) from None


def _under_torchrun(request: TrainRequest, place: RunFolder) -> None:
    """Train in this process, which is one of torchrun's workers; rank 0 writes and prints."""
    import torch

    from polylane.commands.training import run_torchrun_worker
    from polylane.runtime.workers.failure import Failure
    from polylane.runtime.workers.fork import ECHO_GRACE_SECONDS, threads_per_worker
    from polylane.runtime.workers.world import World

    torch.set_num_threads(threads_per_worker(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    world = World.join()
    try:
        if world.rank != 0:
            outcome = run_torchrun_worker(request, world, lambda message: None)
            _raise_if_stopped(place, outcome)
            return
        with _Reporter(place, to_stderr=request.json) as reporter:
            outcome = run_torchrun_worker(request, world, partial(reporter, 0))
    except PolylaneError:
        raise
    except Exception as error:
        failure = Failure.of_exception(world.rank, error)
        # torchrun ends all workers as soon as one ends: an echo waits, so that the worker with the cause can print it.
        if failure.is_echo:
            time.sleep(ECHO_GRACE_SECONDS)
            sys.exit(1)
        told = failure.to_exception()
        if isinstance(told, PolylaneError):
            raise told from None
        print(f"polylane: {told}", file=sys.stderr, flush=True)
        sys.exit(1)
    _finish(request, place, outcome)


# The end -------------------------------------------------------------------------------------------------------------


def _raise_if_stopped(place: RunFolder, outcome: TrainingOutcome) -> None:
    if outcome.stopped is not None:
        cause = f"{outcome.cause}; " if outcome.cause else ""
        raise PolylaneError(
            f"{_describe_anomaly(outcome, outcome.stopped)}: training stopped, and no weights were saved; "
            f"{cause}the metrics are "
            f"in {place.metrics}, and --on-nan warn goes on instead"
        )


def _describe_anomaly(outcome: TrainingOutcome, at: tuple[int, int]) -> str:
    return f"the loss was {outcome.bad_loss} at step {at[0]} (epoch {at[1]})"


def _finish(request: TrainRequest, place: RunFolder, outcome: TrainingOutcome) -> None:
    place.timeline(outcome.timeline)
    _raise_if_stopped(place, outcome)
    if not outcome.saved:
        raise PolylaneError(
            f"the weights were not saved after {format_plural(outcome.steps, 'step')}: {outcome.cause}; "
            f"what else there is of the run is in {place.metrics.parent}"
        )
    if outcome.not_finite is not None:
        print(f"polylane: {_describe_anomaly(outcome, outcome.not_finite)}, and training went on", file=sys.stderr)
    # Only now, after everything that can fail, the earlier run's files are replaced.
    place.finish()
    files = place.files()
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
        "run": str(place.path),
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
    said = outcome.timeline.notes["step"]
    print(
        f"{outcome.samples_per_second:,.0f} samples/s; {'step' if said.isdecimal() else 'steps'} {said} kept the "
        f"workers busy {outcome.timeline.utilization():.1%} of the time{_describe_traffic(outcome)}, "
        f"see {place.path / 'swimlane.html'}"
    )
    for line in sync_traffic_lines(outcome.traffic, len(outcome.traffic) - outcome.servers):
        print(line)
    if outcome.staleness:
        print(_describe_staleness(outcome.staleness))
    print(f"{place.path}/: {', '.join(Path(file).name for file in files.values())}")


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
    for who, each in (("worker", traffic[:training]), ("server of its own", traffic[training:])):
        sent, theory = (sum(one[key] for one in each) / max(len(each), 1) for key in ("agreement", "theory"))
        if sent or theory:
            lines.append(
                f"for replicas to agree each {who} sent {format_count(sent, 'B')} a step (theory: "
                f"{format_count(theory, 'B')})"
            )
    return lines


def _describe_traffic(outcome: TrainingOutcome) -> str:
    sent = sum(outcome.timeline.sent())
    return f" and sent {format_count(sent, 'B')}" if sent else ""
