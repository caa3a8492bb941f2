"""Training loop on a worker: its steps, tests and epochs, its checkpoints, and the messages about them."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polylane.checkpoint.commit import MANIFEST
from polylane.checkpoint.store import name_another
from polylane.commands import user_inputs as inputs
from polylane.commands.learning.batch_follower import BatchFollower, open_follower
from polylane.commands.logs.goodput import PhaseClock
from polylane.commands.logs.step_columns import StepColumns, find_product_dtype
from polylane.commands.logs.step_log import StepLog, Tell, TestResult, TrainingOutcome, last_steps
from polylane.commands.requests import TrainRequest
from polylane.commands.running.open_callbacks import open_callbacks
from polylane.commands.running.recipe_data import limit_batches
from polylane.commands.running.recipe_training import RecipeTraining
from polylane.commands.running.resume import NothingLeft, check_same_run, describe_run, refuse_if_done
from polylane.commands.running.start_message import begin_message
from polylane.compile.compiled_training import CompiledTraining
from polylane.diagnosis.page_layout import Phase
from polylane.errors import AuditFailed, NotFinite, PolylaneError, format_plural
from polylane.graph.nodes.token_leaves import count_tokens, find_token_leaves
from polylane.plan.plan import Plan
from polylane.plan.plan_file import parse_plan
from polylane.runtime.callbacks.callback_runner import CallbackRunner
from polylane.runtime.checkpoint.load import LoadedCheckpoint
from polylane.runtime.checkpoint.run_control import RunControl, parse_interval
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.job import Job
from polylane.runtime.pipeline.anomalies import AnomalyDetector, NonFiniteValue, earliest_fault
from polylane.runtime.server_role import ServingRole
from polylane.runtime.sync.parameter_server.update_log import count_staleness
from polylane.runtime.telemetry.matmul_rate import measure_matmul_rate
from polylane.runtime.telemetry.noise_log import NoiseLog
from polylane.runtime.workers.stop_request import StopRequest
from polylane.verify.audit import AuditMode
from polylane.verify.audit.audit_start import AuditStart
from polylane.verify.audit.step_replay import StepVerdict
from polylane.verify.audit.training_audit import attach_audit


class RecipeLoop:
    """The loop of one worker: as long as was asked for, with a test after each epoch.

    Args:
        job: this worker's part in the training.
        training: the recipe's model and data, with the options.
        prepared: the training, compiled for the plan.
        tell: called with a "begin" message, a "step" for each step, a "testing" and an "epoch" after each epoch, and
            now and then with a "time" message.
        stop: whether a signal asks the training to end.
        audits: makes some steps a second time, and compares.
    """

    def __init__(
        self,
        job: Job,
        training: RecipeTraining,
        prepared: CompiledTraining,
        tell: Tell,
        stop: StopRequest,
        audits: AuditStart,
    ) -> None:
        self._job, self._training, self._prepared, self._tell = job, training, prepared, tell
        request = training.request
        columns = _open_columns(job, prepared)
        self._callbacks = open_callbacks(job, training, prepared, tell, self._describe)
        tell = self._callbacks.listen(tell)
        self._log = StepLog(tell, lambda: job.worker.slack, columns, NoiseLog(training.population))
        self._follower = open_follower(job, request.rates, training.population, self._log.noise, tell)
        self._stops = request.on_nan == "stop"
        self._token_leaves = find_token_leaves(prepared.main_partition.graph.code.fx)
        resumes = request.resume_from is not None
        takers = self._log, self._callbacks, self._follower
        saved, changed = _load_checkpoint(job, training, *takers) if resumes else (None, [])
        tell(begin_message(job, training, prepared, saved, self._log.loss, changed))
        self._audit = attach_audit(audits, job, partial(_tell_verdict, tell, request.audit))
        self._control = _open_control(job, request, self._describe_with_callbacks, stop, tell)
        if columns is not None and (control := self._control) is not None:
            columns.stall_seconds = lambda: control.stall_seconds
        # To find the first operator, the detector runs a pass again; a run that goes on must not do that.
        job.anomalies = AnomalyDetector() if self._stops else None
        self._all_know = _all_know_losses(job, self._control)
        self._phases = PhaseClock(job.world.progress, tell, dict if columns is None else columns.means)
        self._start = job.position
        self._test = TestResult()

    def run(self) -> TrainingOutcome:
        """Train, save the weights, and close the job; return the outcome, the same on every worker but for times.

        Raises:
            NothingLeft: on all workers, if a stream is over before the first step.
        """
        job, log, epochs, control = self._job, self._log, self._training.epochs, self._control
        begin = self._start.epoch + 1
        job.world.progress.enter(Phase.TRAINING)
        self._callbacks.start()
        if self._callbacks.reason and self._training.request.resume_from is None:
            raise PolylaneError(f"a callback has ended the training before its first step: {self._callbacks.reason}")
        for epoch in itertools.count(begin) if epochs is None else range(begin, epochs + 1):
            if self._callbacks.reason or self._run_epoch(epoch) or log.launched == self._training.request.steps:
                break
        _refuse_no_steps(log, self._training.request, job)
        outcome = log.outcome(self._prepared.plan.spec, self._test.loss, stopped=self._stops)
        outcome = replace(outcome, test_metrics=self._test.metrics, stop_reason=self._callbacks.reason)
        outcome = outcome if control is None else _save_last(control, outcome)
        outcome = _finish_outcome(job, self._training, self._prepared, log, outcome)
        self._callbacks.end()  # behind the weights, which are there whatever it raises
        job.world.progress.enter(Phase.ENDING)
        job.close()
        self._phases.tell(log.launched)
        return replace(outcome, audit=None if self._audit is None else self._audit.report())

    def _run_epoch(self, epoch: int) -> bool:
        """Train for an epoch, and test; return whether the training is over before its end."""
        log, job = self._log, self._job
        self._train_epoch(epoch)
        log.complete()
        # With servers a worker may have the losses of its own replica only, and a dedicated server has none.
        if job.plan.sync.has_servers:
            log.merge_epoch(job.gathered(log.epoch_losses()))
        if (self._stops and log.stopped) or self._is_over:
            return True
        if self._training.test is not None:
            self._tell({"kind": "testing", "epoch": epoch})
            self._test = _evaluate_test(job, self._training, self._control)
            if self._is_over:  # the run that goes on tests again, from the first batch
                return True
        means = log.epoch_means()
        self._tell({"kind": "epoch", "epoch": epoch, "step": log.launched, **means, **self._test.to_dict()})
        return self._callbacks.evaluate(epoch, {"train_loss": means["train_loss"], **self._test.list_results()})

    def _train_epoch(self, epoch: int) -> None:
        """Make the steps of an epoch, or as many as are left of the training."""
        self._log.begin_epoch()
        start: Position | None = self._start
        while start is not None:  # the batch has changed: the epoch goes on behind its last sample
            start = self._make_steps(epoch, start)

    def _make_steps(self, epoch: int, start: Position) -> Position | None:
        """Make steps of an epoch, from a position on; return that from which it goes on with another batch."""
        log, job, request = self._log, self._job, self._training.request
        size = request.batch if self._follower is None else self._follower.batch
        for batch in self._training.batches(job, epoch, start, size):
            rates = _list_rates(job)
            result, staleness = job.step(batch), job.worker.staleness if job.apart else None
            log.add(result, epoch, rates, staleness, count_tokens(batch.leaves, self._token_leaves, batch.samples))
            self._phases.note_step(log.launched)
            if (self._stops and log.stopped and self._all_know) or log.launched == request.steps:
                break
            if (self._control is not None and self._control.agree()) or self._callbacks.agree():
                break
            if self._follower is not None and self._follower.follow():
                return self._follower.next_position
        return None

    def _describe(self) -> dict[str, Any] | None:
        """Return facts about the run for a checkpoint; None where nobody should go on from this step."""
        request, log = self._training.request, self._log
        log.complete()
        if request.on_nan == "stop" and log.stopped:
            return None  # the weights have had an update by gradients that are not finite
        growth = {} if self._follower is None else {"growth": self._follower.state()}
        return {**describe_run(request, sum(self._training.batch_sizes) or None), "log": log.state(), **growth}

    def _describe_with_callbacks(self) -> dict[str, Any] | None:
        facts = self._describe()
        return None if facts is None else {**facts, "callbacks": self._callbacks.state_dict()}

    @property
    def _is_over(self) -> bool:
        """Whether all have agreed to end."""
        return self._control is not None and self._control.is_over


def _open_columns(job: Job, prepared: CompiledTraining) -> StepColumns | None:
    """Return what describes observed steps, on rank 0; None on the others, which have no messages to write."""
    worker = job.worker
    if job.world.rank != 0 or isinstance(worker, ServingRole):
        return None
    graph = prepared.main_partition.graph
    rate = measure_matmul_rate(job.world.device, find_product_dtype(prepared.plan, job.model))
    return StepColumns(prepared.plan, lambda: graph, rate, worker.telemetry.timing, job.world.host_names)


def _tell_verdict(tell: Tell, mode: AuditMode, verdict: StepVerdict) -> None:
    agrees = not verdict.difference
    tell({"kind": "audit", "step": verdict.step, "agrees": agrees, "largest_difference": verdict.worst})
    if not agrees and mode == "warn":  # else it is an error
        tell({"kind": "warning", "text": verdict.difference})


def _all_know_losses(job: Job, control: RunControl | None) -> bool:
    """Return whether every process knows at once of a loss that is not finite.

    Who does not would wait for those that stop: asynchronous replicas, and dedicated servers where checkpoints are
    agreed on. All stop at the end of the epoch then.
    """
    return not job.apart and (control is None or job.plan.processes == job.plan.workers)


def _refuse_no_steps(log: StepLog, request: TrainRequest, job: Job) -> None:
    """Refuse to end without a step: a stream was over, of whose end the checkpoint says nothing.

    Raises:
        NothingLeft: no step was made.
    """
    if not log.has_made_steps:
        assert request.resume_from is not None
        raise NothingLeft(request.resume_from, job.position.step)


def _save_last(control: RunControl, outcome: TrainingOutcome) -> TrainingOutcome:
    """Return the outcome with what there is of checkpoints; a collective.

    The last one is saved first, unless a loss was not finite.
    """
    if outcome.stopped is None:
        control.save(wait=True)
    else:
        control.finish()
    control.tell_failed()
    newest, stall = str(control.newest or ""), control.stall_seconds
    return replace(outcome, ended_early=control.is_over, checkpoint=newest, stall_seconds=stall)


def _finish_outcome(
    job: Job, training: RecipeTraining, prepared: CompiledTraining, log: StepLog, outcome: TrainingOutcome
) -> TrainingOutcome:
    """Return the outcome with what all workers know together, and save the weights; a collective of all workers."""
    servers = prepared.plan.processes - prepared.plan.workers
    # Collective, and so before any worker may raise or leave.
    outcome = replace(outcome, traffic=tuple(job.traffic()), servers=servers)
    if job.apart:
        staleness = count_staleness(update for server in job.worker.updates() for update in server)
        outcome = replace(outcome, timeline=last_steps(job, log.launched), staleness=staleness)
    elif job.plan.is_asynchronous:  # a batch is under way in several steps, and stages are at different ones
        outcome = replace(outcome, timeline=last_steps(job, log.launched))
    if outcome.stopped is not None:
        # Every worker looked at its own stage: the earliest of their findings is where it began.
        fault = earliest_fault(job.gathered(None if job.anomalies is None else job.anomalies.fault))
        return replace(outcome, cause="" if fault is None else _describe_cause(fault, outcome))
    if outcome.ended_early:
        return outcome
    with job.world.progress.during(Phase.SAVING):
        return _save_weights(job, training.request, outcome)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def _load_checkpoint(
    job: Job, training: RecipeTraining, log: StepLog, callbacks: CallbackRunner, follower: BatchFollower | None
) -> tuple[Plan, list[str]]:
    """Go on from the checkpoint that was found; a collective of all workers.

    Args:
        job: this worker's part in the training.
        training: the recipe's model and data, with the options.
        log: goes on with the checkpoint's losses.
        callbacks: take over what the checkpoint keeps of them.
        follower: goes on with the checkpoint's batch; None where that is fixed.

    Returns:
        The plan that it is of; and on rank 0 notes on what is another choice than in the checkpoint's run.

    Raises:
        PolylaneError: it is damaged, or of another model or run.
        NothingLeft: it is that of the last step, or of a later one.
    """
    request = training.request
    assert request.resume_from is not None
    changed = list[str]()
    loaded = job.load_checkpoint(request.resume_from, warn=changed.append)
    check_same_run(loaded.manifest.run, describe_run(request, sum(training.batch_sizes) or None), loaded.folder)
    resume_log(log, loaded)
    callbacks.load_state_dict(loaded.manifest.run.get("callbacks") or {})
    if follower is not None:
        follower.resume(loaded.manifest.run.get("growth") or {})
    refuse_if_done(loaded.folder, loaded.position, request.steps, training.epochs, sum(training.batch_sizes))
    return parse_plan(loaded.manifest.plan, "of the checkpoint"), changed


def resume_log(log: StepLog, loaded: LoadedCheckpoint) -> None:
    """Let a log go on after the steps of a checkpoint, where that is of a run that kept one.

    Args:
        log: of the run that goes on, without steps yet.
        loaded: the checkpoint that it goes on from.

    Raises:
        PolylaneError: the manifest says of the log what no run does.
    """
    state = loaded.manifest.run.get("log")
    if state is None:  # a script has saved it
        return
    try:
        log.resume(state)
        is_alike = log.launched == loaded.position.step
    except (LookupError, TypeError, ValueError, OverflowError):
        is_alike = False
    if not is_alike:
        raise PolylaneError(
            f"checkpoint {loaded.folder / MANIFEST}: run.log is not the one of a run that made "
            f"{format_plural(loaded.position.step, 'step')}: it was edited; {name_another(loaded.folder)}"
        )


def _open_control(
    job: Job, request: TrainRequest, describe: Callable[[], dict[str, Any] | None], stop: StopRequest, tell: Tell
) -> RunControl | None:
    """Return this worker's part in agreeing on saves and the end; None where no checkpoints are asked for."""
    if request.saving.save_every is None or request.checkpoints is None:
        return None

    def warn(sentence: str) -> None:
        tell({"kind": "warning", "text": sentence})

    return RunControl(
        job,
        request.checkpoints,
        parse_interval(request.saving.save_every),
        request.saving.keep,
        stop,
        warn if request.trouble.on_disk_error == "warn" else None,
        describe,
    )


def _describe_cause(fault: NonFiniteValue, outcome: TrainingOutcome) -> str:
    """Describe where the non-finite value began, with the step if it is not the one whose loss was seen."""
    step = fault.position[0] + 1
    when = "" if outcome.stopped is not None and outcome.stopped[0] == step else f" of step {step}"
    return f"{fault.description}{when}, on stage {fault.position[2]}"


def _save_weights(job: Job, request: TrainRequest, outcome: TrainingOutcome) -> TrainingOutcome:
    """Save the weights, unless some are not finite, and return the outcome."""
    assert request.model_path is not None
    try:
        error = _try_to_save(job, request.model_path)
        if error:
            spare = Path(tempfile.gettempdir()) / f"polylane-{os.getpid()}" / request.model_path.name
            note = f"they are in {spare} instead" if not _try_to_save(job, spare) else "nor to the temporary folder"
            return replace(outcome, saved=False, cause=f"{error}; {note}")
    except NotFinite as not_finite:
        return replace(outcome, saved=False, cause=str(not_finite))
    return outcome


def _try_to_save(job: Job, path: Path) -> str:
    """Save the weights; return on every worker why rank 0 could not write them, empty where it could.

    Raises:
        NotFinite: on every worker, where weights are not finite.
    """
    error = ""
    try:
        job.save(path)
    except (NotFinite, AuditFailed):
        raise
    except PolylaneError as failed:
        error = str(failed)
    return next(filter(None, job.gathered(error)), "")


def _list_rates(job: Job) -> list[float]:
    """Return the learning rate of every group of the optimizer, or of all optimizers, in order."""
    optimizers = job.optimizer if isinstance(job.optimizer, list) else [job.optimizer]
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]


def _evaluate_test(job: Job, training: RecipeTraining, control: RunControl | None) -> TestResult:
    """Return loss and metrics over all test samples.

    Where all agree to end in the midst of it, they are those of the batches so far.
    """
    test, request, start = training.test, training.request, time.perf_counter()
    if isinstance(test, Iterator):
        test = limit_batches(inputs.open_data(training.recipe, "test"), training.request)
    options: dict[str, Any] = {"workers": request.data.loader_workers, "prefetch": request.data.prefetch}
    size = request.batch // request.data.accumulate
    batches = job.batches(test, size, shuffle=False, collate=training.recipe.collate, **options)
    with job.world.progress.during(Phase.EVALUATING):
        values = job.evaluate_batches(batches if control is None else control.test_batches(batches))
    return TestResult(values.pop("loss"), values, time.perf_counter() - start)
