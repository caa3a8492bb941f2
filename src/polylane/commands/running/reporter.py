"""Reporter: what the workers tell, written into the run's folder and shown; and the watch over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polylane.commands.progress import Lines
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import PolylaneError, WorkerFailed, WorkerHung
from polylane.output import say_at_once

if TYPE_CHECKING:
    from polylane.commands.requests import FolderRequest
    from polylane.diagnosis.report import HangReport
    from polylane.runtime.progress_page import ProgressMemory


class Reporter:
    """Receiver of rank 0's messages, which writes them into the run's folder and onto the screen.

    Args:
        folder: folder of the run.
        display: what shows the progress of the steps.
    """

    def __init__(self, folder: RunFolder, display: Lines) -> None:
        self._place = folder
        self._display = display

    def __call__(self, rank: int, message: dict[str, Any]) -> None:
        content = {key: value for key, value in message.items() if key != "kind"}
        if message["kind"] == "begin":
            self._place.begin(message["resumed_at"], message["resumed_loss"], message["resumed_own"])
            self._place.plan(message["plan"])
            self._display.begin(message)
        elif message["kind"] == "testing":
            self._display.testing(message)
        elif message["kind"] == "warning":
            say_at_once(message["text"])
        elif message["kind"] == "audit":
            self._place.metric({"audit": content})
        elif message["kind"] == "step":
            self._place.metric(content)
            self._display.step(message)
        else:
            self._place.metric(content)
            self._display.epoch(message)

    def pause(self) -> None:
        """Take the progress off the screen: workers are forked again, and a bar has a thread."""
        self._display.close()

    def keep_report(self, report: HangReport) -> None:
        """Keep a report of a hang or a failure in the run's folder."""
        with suppress(PolylaneError):  # what is reported matters more
            self._place.why(report)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._display.close()
        if error is None:
            self._place.close()
        else:
            with suppress(PolylaneError):  # the exception that ended the run matters more
                self._place.close()


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
            reporter.keep_report(watch.report_failure(error.rank, str(error).partition("\n")[0]))
        raise
    finally:
        watch.close()
