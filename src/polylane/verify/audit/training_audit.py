"""Training audit: between steps all workers agree which is audited, put their state on the board, and hear the verdict.

    step                 1        2    3 ... 4        8
    workers agree        audit    audit      audit    audit
    state on the board   | step | | step |   | step |
    auditor (rank 0)       replays   replays     replays

All workers exchange a message before a step in which something is decided; which steps these are, all know from the
message before. Nothing is exchanged at other steps. Who finds a difference stops the training on all workers, at the
latest before the next checkpoint, or before the weights are saved.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polylane.compile.sample_shares import Batch
from polylane.diagnosis.page_layout import Phase
from polylane.errors import AuditFailed, PolylaneError
from polylane.graph.batch import batch_structure, clone_leaves, flatten
from polylane.graph.sample_lists import ungroup_samples
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.checkpoint.state_board import BoardRecord, StateBoard, StateRefused
from polylane.runtime.job import Job
from polylane.runtime.plain_data.serialization import encode, serializable
from polylane.runtime.step_result import StepResult
from polylane.runtime.workers.world import affine_cores
from polylane.verify.audit.audit_report import AuditReport
from polylane.verify.audit.audit_settings import watch_settings
from polylane.verify.audit.audit_start import AuditStart
from polylane.verify.audit.auditor_process import StepOrder
from polylane.verify.audit.schedule import AuditSchedule
from polylane.verify.audit.step_replay import StepVerdict

SETTLE_SECONDS = 60.0  # bound on the wait for a verdict, before a checkpoint and at the end
STOPPED_SECONDS = 3.0  # the same where a signal has asked for a checkpoint within its grace


@serializable
@dataclass(frozen=True)
class _Decision:
    """What rank 0 decides between two steps, for all workers.

    Attributes:
        audits: whether the next step is audited.
        next_step: number of the next step, from 0, before which something is decided.
        is_judged: whether the verdict on the audited step is there.
        difference: what differs, as a sentence; "" for nothing.
        note: why no further step is audited; "" where some are.
    """

    audits: bool = False
    next_step: int = 0
    is_judged: bool = False
    difference: str = ""
    note: str = ""


def attach_audit(
    start: AuditStart, job: Job, tell: Callable[[StepVerdict], None] | None = None
) -> TrainingAudit | None:
    """Audit a job's steps from now on; a collective of all workers. None where nothing is audited.

    Args:
        start: what this worker has of audits.
        job: this worker's job, which has made no step in this run.
        tell: called on rank 0 with each verdict; default: a warning for each difference that stops nothing.
    """
    if start.mode == "off":
        return None
    note = job.worker.exchange(start.note)[0]
    audit = TrainingAudit(replace(start, note=note), job, tell or _warn_of_difference, says_end=tell is None)
    job.audit = audit
    return audit


def _warn_of_difference(verdict: StepVerdict) -> None:
    if verdict.difference:
        warnings.warn(verdict.difference, stacklevel=2)


@dataclass(frozen=True)
class _Given:
    """What the auditor is given for a step beside the plan's state.

    Attributes:
        leaves: leaves of the whole batch; None where it reads that itself.
        settings: what the user's Python holds, see :meth:`AuditSettings.read_values`.
    """

    leaves: Sequence[Any] | None
    settings: Mapping[str, Any]


class TrainingAudit:
    """One worker's part in the audits of its job, see :class:`polylane.runtime.job.StepAudit`.

    Args:
        start: what was there before the job.
        job: this worker's handle on the training, before its first step.
        tell: called on rank 0 with each verdict.
        says_end: whether rank 0 says on stderr at the end what was found.
    """

    def __init__(self, start: AuditStart, job: Job, tell: Callable[[StepVerdict], None], says_end: bool) -> None:
        self._says_end = says_end
        self._start, self._job, self._tell = start, job, tell
        self._auditor, self._worker = start.auditor, job.worker
        self._note, self._started = start.note, time.perf_counter()
        first_step = job.position.step
        cores = affine_cores()
        has_idle = cores > job.world.size * torch.get_num_threads()  # more hosts have more cores: a bound
        self._schedule = AuditSchedule(first_step, start.mode == "auto", 0.0 if has_idle else 1 / cores)
        self._next, self._epoch = first_step, -1
        self._awaits_verdict = False  # the same on all workers
        self._verdicts: list[StepVerdict] = []
        self._audits = Counter[str]()  # by objective; those that have made steps
        self._settings = {} if start.prepared is None else watch_settings(start.prepared, start.is_built_again)
        self._under_way: tuple[str, Position, _Given, BoardRecord] | None = None
        self._structure = batch_structure(start.example) if job.world.rank == 0 else None
        if not self._note:
            rank, files = job.world.rank, start.boards or (-1, -1)
            self._before, self._after = (StateBoard(rank, self._worker.exchange, file) for file in files)

    # ---- around a step -----------------------------------------------------------------------------------------------

    def before_step(self, batch: Any, objective: str, epoch: int, samples: int) -> None:
        """Decide with all workers whether this step is audited, and take the state that it begins with.

        Raises:
            AuditFailed: on all workers, if an earlier step differs, and that is to stop the training.
        """
        step = self._job.position.step
        begins_epoch = epoch != self._epoch
        self._audits.setdefault(objective, 0)
        if self._note or (step < self._next and not begins_epoch):
            return
        self._epoch, started = epoch, time.perf_counter()
        inputs, decision = _Given(None, {}), _Decision()
        with self._job.world.progress.during(Phase.AUDITING):
            if self._auditor is not None:
                decision = self._decide(step, begins_epoch, objective)
                if decision.audits:
                    inputs, note = self._take_given(batch, objective)
                    is_here = not note and (self._start.reads_data or inputs.leaves is not None)
                    next_step = (
                        self._schedule.begin_audit(step) if is_here else self._schedule.pass_over(step, begins_epoch)
                    )
                    decision = replace(decision, audits=is_here, next_step=next_step, note=note)
            decision = self._hear(decision)
            if decision.audits:
                self._audits[objective] += 1
                self._worker.complete_steps()  # what workers have read differently is no matter of this audit
                try:
                    old_state = self._before.record(self._worker.collect_state)
                    self._under_way = objective, Position(step, epoch, samples), inputs, old_state
                except StateRefused as refused:  # on all workers alike
                    self._end(str(refused))
        self._schedule.count_stall(time.perf_counter() - started, decision.audits)

    def after_step(self, result: StepResult) -> None:
        """Put the state after an audited step on the board, and have the step replayed."""
        if self._under_way is None:
            return
        started = time.perf_counter()
        (objective, position, inputs, old_state), self._under_way = self._under_way, None
        with self._job.world.progress.during(Phase.AUDITING):
            self._worker.complete_steps()
            try:
                new_state = self._after.record(lambda: self._worker.collect_step(objective))
            except StateRefused as refused:
                self._end(str(refused))
                return
            self._awaits_verdict = True
            if self._auditor is not None:
                at = position.step, objective, result.loss, position.epoch, position.samples
                self._auditor.send(StepOrder(*at, inputs.leaves, inputs.settings, old_state, new_state))
        self._schedule.count_stall(time.perf_counter() - started, True)

    def _take_given(self, batch: Any, objective: str) -> tuple[_Given, str]:
        """Return what the auditor is given for a step, and why no further step can be audited; "" where it can."""
        settings, leaves, note = self._settings[objective], None, ""
        values = settings.read_values()
        if (changed := settings.find_unreadable_change(values)) is not None:
            return _Given(None, {}), f"{changed} was changed since the start, which the audit's process does not see"
        if not self._start.reads_data:
            leaves, note = self._take_leaves(batch)
        inputs = _Given(leaves, values)
        try:
            encode([[leaf for leaf in leaves or () if type(leaf) is not Tensor], dict(inputs.settings)])
        except (PolylaneError, TypeError, ValueError) as refused:
            return _Given(None, {}), f"a value cannot be handed to another process: {refused}"
        return inputs, note

    def _take_leaves(self, batch: Any) -> tuple[Sequence[Any] | None, str]:
        """Return copies of a whole batch's leaves, for a step may write into them; or why no step has any.

        Of a step whose batch is here in part there are none.
        """
        if isinstance(batch, Batch):
            structure = self._structure if batch.form is None else batch.form.structure
            leaves, is_whole = batch.leaves, batch.is_whole
        else:
            structure, leaves, is_whole = batch_structure(batch), flatten(batch)[0], True
        if not is_whole:
            return None, ""
        if structure != self._structure:
            return None, "a batch has another form than the example"
        on_host = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in clone_leaves(leaves)]
        return [ungroup_samples(leaf) for leaf in on_host], ""

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, step: int, begins_epoch: bool, objective: str) -> _Decision:
        """Decide on rank 0 what comes before a step."""
        assert self._auditor is not None
        elapsed = time.perf_counter() - self._started
        is_judged, difference, note = False, "", ""
        if self._auditor.is_busy:
            verdict = self._auditor.poll(SETTLE_SECONDS if self._schedule.waits(step, begins_epoch) else 0.0)
            if verdict is None:
                return _Decision(next_step=self._schedule.look_again(step))
            is_judged, difference, note = True, *self._judge(verdict)
        if note or not self._schedule.is_due(step, begins_epoch, elapsed):
            return _Decision(False, self._schedule.next_step(step, elapsed), is_judged, difference, note)
        if self._audits[objective] > min(self._audits.values()):  # of several losses in turn each has its own
            return _Decision(False, step + 1, is_judged, difference)
        return _Decision(True, step + 1, is_judged, difference)

    def _judge(self, verdict: StepVerdict) -> tuple[str, str]:
        """Keep a verdict; return the sentence about a difference, and why no further step is audited."""
        self._schedule.count_replay(verdict.seconds)
        if verdict.refusal:
            return "", f"step {verdict.step} cannot be made by one process: {verdict.refusal}"
        if not verdict.is_compared:
            return "", ""
        if verdict.difference:
            agreed = [past_verdict.step for past_verdict in self._verdicts if not past_verdict.difference]
            agreement = f"; step {agreed[-1]} was the last that agreed" if agreed else ""
            # Of weights that were others from the start no step was compared.
            size = f" (largest relative difference {verdict.worst:.1e}, more than rounding)" if verdict.worst else ""
            sentence = (
                f"the plan {self._job.plan.spec} does not compute what one device computes: {verdict.difference}{size}"
                f"{agreement}"
            )
            verdict = replace(verdict, difference=sentence)
        self._verdicts.append(verdict)
        self._tell(verdict)
        return verdict.difference, ""

    def _hear(self, decision: _Decision) -> _Decision:
        """Return rank 0's decision, and follow it; a collective of all workers.

        Raises:
            AuditFailed: on all workers, if a step differs, and that is to stop the training.
        """
        heard = self._worker.exchange(decision)[0]
        assert isinstance(heard, _Decision)
        self._next = heard.next_step
        if heard.is_judged:
            self._awaits_verdict = False
        if heard.difference and self._start.mode != "warn":
            self._end("a step differed")
            option = "audit='warn'" if self._says_end else "--audit warn"
            raise AuditFailed(
                f"{heard.difference}; polylane verify shows the first operator that differs, and {option} continues"
            )
        if heard.note:
            self._end(heard.note)
        return heard

    def _end(self, note: str) -> None:
        """Audit no further step; the memory of states is given back."""
        self._note, self._awaits_verdict = note, False
        self._before.close()
        self._after.close()
        if self._auditor is not None:
            self._auditor.close()
            self._auditor.is_busy = False

    # ---- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the verdict on the audited step, if there is one; a collective of all workers.

        Raises:
            AuditFailed: on all workers, if the step differs, and that is to stop the training.
        """
        if not self._awaits_verdict:
            return
        started, decision = time.perf_counter(), _Decision(next_step=self._next)
        if self._auditor is not None:
            with self._job.world.progress.during(Phase.AUDITING):
                seconds = STOPPED_SECONDS if self._job.world.stop.is_set() else SETTLE_SECONDS
                verdict = self._auditor.poll(seconds)
            if verdict is None:
                note = f"the last audited step was not replayed within {seconds:.0f} s"
                decision = replace(decision, is_judged=True, note=note)
            else:
                difference, note = self._judge(verdict)
                due = self._schedule.next_step(self._job.position.step - 1, time.perf_counter() - self._started)
                decision = _Decision(False, due, True, difference, note)
        with self._job.world.progress.during(Phase.AUDITING):
            self._hear(decision)
        self._schedule.count_stall(time.perf_counter() - started, False)

    def report(self) -> AuditReport:
        """Return what was found; on rank 0."""
        verdicts = self._verdicts
        return AuditReport(
            tuple(verdict.step for verdict in verdicts),
            max((verdict.worst for verdict in verdicts if not verdict.difference), default=0.0),
            tuple(verdict.difference for verdict in verdicts if verdict.difference),
            all(verdict.of_own_code for verdict in verdicts),
            self._note,
            self._schedule.stall_seconds,
        )

    def close(self) -> None:
        """End the auditor, and give the memory back."""
        if self._auditor is not None:
            self._auditor.close()
        if self._says_end and self._job.world.rank == 0 and (self._verdicts or self._note):
            print(f"polylane: {self.report()}", file=sys.stderr)
        if not self._note:
            self._before.close()
            self._after.close()
