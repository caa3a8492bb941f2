"""Progress of a training: a live bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from polylane.commands.printing import format_name, format_seconds
from polylane.commands.running.option_groups import LOG_SECONDS
from polylane.errors import format_plural

RATE_STEPS = 20  # number of the last steps over which samples/s are averaged
_WORDS = ("step", "loss", "metric", "rate", "waiting", "left")


class _Pace:
    """Throughput over the last steps, and the time left at the mean pace since the first step, tests included."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)
        self._first: tuple[int, float] | None = None  # number of the first step, and when its message came
        self._waiting = ""  # share of the workers' time, for data or each other, when a step was observed last
        self.metric = ""  # of the latest test

    def words(self, step: dict[str, Any]) -> dict[str, str]:
        """Return the step as words: number, loss, latest metric, samples or tokens a second, waiting, time left."""
        counted = "tokens" if "tokens" in step else "samples"
        self._recent.append((step[counted], step["seconds"]))
        if "computing" in step:
            loading = step.get("loading", 0.0)
            waiting = loading + (1 - loading) * step.get("waiting", step.get("communicating", 0.0))
            self._waiting = f"{waiting:.0%} waiting"
        samples, elapsed = (sum(column) for column in zip(*self._recent, strict=True))
        return {
            "step": _number_of_total("step", step["step"], self._steps),
            "loss": f"loss {step['loss']:.4f}",
            "metric": self.metric,
            "rate": f"{samples / elapsed:,.0f} {counted}/s",
            "waiting": self._waiting,
            "left": self._left(step["step"]),
        }

    def _left(self, step: int) -> str:
        now = time.monotonic()
        first_step, since = self._first = self._first or (step, now)
        # There is no pace after a single step, and nothing left after the last one.
        if self._steps is None or step in (first_step, self._steps):
            return ""
        return f"{format_seconds((now - since) / (step - first_step) * (self._steps - step))} left"


class Lines:
    """Progress as lines for a log: the first step, one every few seconds, and one an epoch.

    Args:
        stream: the lines are printed into it.
        seconds: least time between two of them.
    """

    def __init__(self, stream: IO[str], seconds: float = LOG_SECONDS) -> None:
        self._stream, self._seconds = stream, seconds
        self._last = -math.inf

    def begin(self, message: dict[str, Any]) -> None:
        """Print the headline: the workers have started."""
        self._epochs = message["epochs"]
        self._pace = _Pace(message["steps"])
        self.say(_format_headline(message))

    def step(self, message: dict[str, Any]) -> None:
        """Print a step, if the last line is long enough ago."""
        words = self._pace.words(message)
        if time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self.say(
                "  ".join(filter(None, [_number_of_total("epoch", message["epoch"], self._epochs), *words.values()]))
            )

    def testing(self, message: dict[str, Any]) -> None:
        """Do nothing: tests have no line of their own."""

    def epoch(self, message: dict[str, Any]) -> None:
        """Print the result of an epoch."""
        tested = {"test loss": message["test_loss"], **message.get("metrics", {})}
        name, value = list(tested.items())[len(tested) > 1]
        self._pace.metric = "" if value is None else f"{format_name(name)} {value:.4f}"
        self.say(_epoch_line(message, self._epochs))

    def say(self, line: str) -> None:
        """Print a line at once."""
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: there is no bar to be removed."""


class NoLines(Lines):
    """No progress: of a script, which prints its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def begin(self, message: dict[str, Any]) -> None:
        """Do nothing: the workers say what they train."""

    def step(self, message: dict[str, Any]) -> None:
        """Do nothing: the script prints what it wants to."""


class Bar(Lines):
    """Progress as a live bar. It has a thread, and so starts with the first message: after the workers were forked."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self._console = console
        self._progress: Progress | None = None

    def begin(self, message: dict[str, Any]) -> None:
        """Print the headline and start the bar: the workers have started."""
        super().begin(message)
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=24)]
        columns += [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in _WORDS]
        self._progress = Progress(*columns, console=self._console, transient=True)
        empty: dict[str, Any] = dict.fromkeys(_WORDS, "")
        self._task: TaskID = self._progress.add_task("starting", total=message["steps"], **empty)
        self._progress.start()

    def step(self, message: dict[str, Any]) -> None:
        """Show a step in the bar."""
        self._update(
            _number_of_total("epoch", message["epoch"], self._epochs), message["step"], self._pace.words(message)
        )

    def testing(self, message: dict[str, Any]) -> None:
        """Show in the bar that the test data is next."""
        self._update(f"testing after {_number_of_total('epoch', message['epoch'], self._epochs)}", None, {})

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._progress is not None:
            self._progress.stop()

    def _update(self, description: str, completed: int | None, words: dict[str, Any]) -> None:
        assert self._progress is not None
        self._progress.update(self._task, description=description, completed=completed, **words)


def display(to_stderr: bool, seconds: float = LOG_SECONDS) -> Lines:
    """Return a bar for a terminal, lines for anything else.

    Args:
        to_stderr: use stderr, since stdout is for the result as JSON.
        seconds: least time between two lines.
    """
    console = Console(stderr=to_stderr)
    return Bar(console) if console.is_terminal else Lines(sys.stderr if to_stderr else sys.stdout, seconds)


def _number_of_total(word: str, number: int, total: int | None) -> str:
    return f"{word} {number}" + ("" if total is None else f"/{total}")


def _format_headline(message: dict[str, Any]) -> str:
    notes = [f"note: {note}" for note in message["notes"]]
    return "\n".join(
        [f"{format_plural(message['workers'], 'worker')} on {message['device']}, {message['spec']}", *notes]
    )


def describe_test(loss: float | None, metrics: Mapping[str, float]) -> str:
    """Return the loss and the metrics of a test, as the continuation of a line; empty where nothing was tested."""
    if loss is None:
        return ""
    return "".join(f", {format_name(name)} {value:.4f}" for name, value in {"test loss": loss, **metrics}.items())


def _epoch_line(message: dict[str, Any], epochs: int | None) -> str:
    test = describe_test(message["test_loss"], message.get("metrics", {}))
    head = f"{_number_of_total('epoch', message['epoch'], epochs)}: mean loss {message['train_loss']:.4f}{test}"
    return f"{head}, {format_seconds(message['seconds'])}"
