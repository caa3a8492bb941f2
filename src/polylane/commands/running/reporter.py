"""Reporter: what the workers tell, written into the run's folder and shown; and the watch over them."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polylane.commands.logs.file_names import GOODPUT, PREDICTED
from polylane.commands.logs.goodput import GoodputLedger, find_process_start
from polylane.commands.logs.verdict import advise_on_speed, describe_verdict
from polylane.commands.progress import Lines
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import PolylaneError, WorkerFailed, WorkerHung
from polylane.loggers.libraries import open_loggers
from polylane.loggers.logger import LoggerGroup, RunFacts
from polylane.output import say_at_once
from polylane.runtime.workers.stop_request import Stopped

if TYPE_CHECKING:
    from polylane.commands.logs.step_log import TrainingOutcome
    from polylane.commands.requests import FolderRequest
    from polylane.diagnosis.report import HangReport
    from polylane.runtime.progress_page import ProgressMemory

# Of a step's line what says where it is: loggers are told of that otherwise.
_POSITION = frozenset({"step"})
# A run that takes longer than this is told before its end that its steps are slow, once it has made some.
EARLY_SECONDS, EARLY_STEPS = 20.0, 10


class Reporter:
    """Receiver of rank 0's messages, which writes them into the run's folder and onto the screen.

    Args:
        folder: folder of the run.
        display: what shows the progress of the steps.
        loggers: receive the numbers of the run as well; None: there are none.
        options: the options of the command line that were given, for the loggers.

    Attributes:
        predicted: what is predicted of the run, see :func:`.predict_run`; None where nothing is.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: Lines,
        loggers: LoggerGroup | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._place = folder
        self._display = display
        self._loggers, self._options = loggers or LoggerGroup({}, say_at_once), options or {}
        self._ledger = GoodputLedger(find_process_start())
        self.predicted: dict[str, Any] | None = None
        self._early_seconds, self._loading, self._is_advised = list[float](), 0.0, False
        self._has_told_slow = False

    def __call__(self, rank: int, message: dict[str, Any]) -> None:
        content = {key: value for key, value in message.items() if key != "kind"}
        if message["kind"] == "begin":
            self._begin(message)
        elif message["kind"] == "predicted":
            self.predicted = message["run"]
        elif message["kind"] == "time":
            self._ledger.update(**content)
            slow = content["shares"].get("slow", {})
            self._place.write(GOODPUT, {**self._ledger.to_dict(), "slow": slow})
            if slow and not self._has_told_slow:
                self._has_told_slow = True
                say_at_once(slow["sentence"])
        elif message["kind"] == "testing":
            self._display.testing(message)
        elif message["kind"] == "warning":
            say_at_once(message["text"])
        elif message["kind"] == "audit":
            self._place.metric({"audit": content})
        elif message["kind"] == "batch":
            self._place.metric({"batch": {name: value for name, value in content.items() if name != "text"}})
            say_at_once(message["text"])
        elif message["kind"] == "step":
            self._place.metric(content)
            self._ledger.note_step(content["step"])
            self._loggers.log({n: v for n, v in content.items() if n not in _POSITION}, content["step"], "train")
            self._display.step(message)
            self._advise_early(content)
        else:
            self._place.metric(content)
            self._log_epoch(content)
            self._display.epoch(message)

    def _begin(self, message: dict[str, Any]) -> None:
        """Begin a run, or an attempt at it, whose workers are ready for their first step."""
        resumed_at, plan, self._workers = message["resumed_at"], message["spec"], int(message["workers"])
        earlier = self._place.begin(resumed_at, message["resumed_loss"], message["resumed_own"])
        self._place.plan(message["plan"], message.get("options"))
        if self.predicted is not None:
            self._place.write(PREDICTED, self.predicted)
        self._ledger.begin(plan, message["workers"], resumed_at, earlier)
        folder = self._place.path
        self._loggers.begin(RunFacts(folder.name, folder, plan, message["workers"], resumed_at, self._options))
        self._display.begin(message)

    def _advise_early(self, content: Mapping[str, Any]) -> None:
        """Say once, while a run trains that takes long, that its steps are slower than they should be.

        Args:
            content: the message of a step.
        """
        if self._is_advised or self.predicted is None:
            return
        self._loading = content.get("loading", self._loading)
        self._early_seconds.append(content["seconds"])
        if len(self._early_seconds) > EARLY_STEPS and sum(self._early_seconds[1:]) > EARLY_SECONDS:
            self._is_advised, typical = True, statistics.median(self._early_seconds[1:])
            shares = {"seconds": typical, "loading": self._loading}
            for sentence in advise_on_speed(shares, self._workers, *self._predicted_seconds()):
                say_at_once(sentence)

    def _predicted_seconds(self) -> tuple[float | None, float | None]:
        """Return the predicted seconds of a step on one device, and by the plan, as far as they are known."""
        predicted = self.predicted or {}
        return predicted.get("one_device_seconds"), predicted.get("step_seconds")

    def _log_epoch(self, content: Mapping[str, Any]) -> None:
        """Send the results of an epoch to the loggers: those of its test, and its mean loss."""
        tested = {"loss": content["test_loss"], **content.get("metrics", {})}
        self._loggers.log(tested, content["step"], "test")
        self._loggers.log({"epoch_loss": content["train_loss"]}, content["step"], "train")

    def judge(self, outcome: TrainingOutcome) -> dict[str, Any]:
        """Return where the time of the run went, with verdict and advice, and write it into the folder."""
        workers = len(outcome.traffic) - outcome.servers if outcome.traffic else outcome.timeline.ranks
        facts = outcome.shares, workers, *self._predicted_seconds()
        judgement = {"verdict": describe_verdict(*facts), "advice": advise_on_speed(*facts)}
        goodput = {**self._ledger.to_dict(), **judgement, "slow": outcome.shares.get("slow", {})}
        self._place.write(GOODPUT, goodput)
        return goodput

    def note_signal(self, number: int) -> None:
        """Note that a signal has ended the run."""
        self._ledger.note_signal(number)

    def pause(self) -> None:
        """Take the progress off the screen: workers are forked again, and a bar has a thread, as loggers have."""
        self._display.close()
        self._loggers.end()

    def keep_report(self, report: HangReport) -> None:
        """Keep a report of a hang or a failure in the run's folder."""
        with suppress(PolylaneError):  # what is reported matters more
            self._place.why(report)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._display.close()
        self._loggers.end()
        self._place.close()
        if isinstance(error, Stopped | KeyboardInterrupt):
            self.note_signal(error.number if isinstance(error, Stopped) else signal.SIGINT)
        # The exception that ended the run matters more than a file that cannot be written.
        with nullcontext() if error is None else suppress(PolylaneError):
            if self._ledger.has_begun:
                self._place.write(GOODPUT, self._ledger.to_dict())


def open_reporter(folder: RunFolder, display: Lines, request: FolderRequest, is_first: bool) -> Reporter:
    """Return the reporter of a run, with the loggers that its command line names.

    Args:
        folder: folder of the run.
        display: what shows the progress of the steps.
        request: the options of the command line.
        is_first: whether this process receives messages: others need no loggers.

    Raises:
        PolylaneError: a logger is not known, or its library is not installed.
    """
    loggers = open_loggers(request.watch.log) if is_first else {}
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    facts = {name: value for name, value in values.items() if isinstance(value, int | float | str) and value != ""}
    settings = (text.partition("=") for text in getattr(request, "settings", ()))
    return Reporter(folder, display, LoggerGroup(loggers, say_at_once), {**facts, **{n: v for n, _, v in settings}})


@contextmanager
def watching(
    pages: Mapping[int, ProgressMemory], request: FolderRequest, reporter: Reporter
) -> Iterator[Callable[[], None]]:
    """Context manager: the watch over workers with these pages, to be called while they run.

    A failure that it has not found itself is reported to the run's folder, from what the workers have left.
    """
    from polylane.runtime.progress.watch import HangWatch

    watch = HangWatch(pages, request.trouble.on_hang, request.trouble.hang_after, reporter.keep_report)
    try:
        yield watch.check
    except WorkerFailed as error:
        if not isinstance(error, WorkerHung):
            reporter.keep_report(watch.report_failure(error.rank, error.sentence))
        raise
    finally:
        watch.close()
