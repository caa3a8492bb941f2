"""Logger: the interface of what receives a run's numbers while it trains, and all loggers of a run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from polylane.errors import INTERRUPTIONS, describe_error


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told of a run when it begins.

    Attributes:
        name: name of the run: that of its folder.
        folder: folder of the run's files, which exists.
        plan: the plan, in one line.
        workers: number of workers that the plan takes.
        resumed_at: step of the checkpoint that it goes on from; None: it begins.
        options: the options of the command line that were given, by name, as text or numbers.

    Examples:
        >>> from pathlib import Path
        >>> from polylane.loggers.logger import RunFacts
        >>> run = RunFacts("digits", Path("run/digits"), "data=2", workers=2, resumed_at=None, options={"batch": 64})
        >>> run.name
        'digits'
    """

    name: str
    folder: Path
    plan: str
    workers: int
    resumed_at: int | None
    options: Mapping[str, Any]


class Logger(Protocol):
    """Receives the numbers of a run, in the process that writes its folder.

    A class with these three methods is a logger: ``--log mymodule:MyLogger`` makes one, without arguments. What it
    raises is a warning, and it receives no more.

    Examples:
        A logger that writes a line for each step:

        >>> from pathlib import Path
        >>> from polylane.loggers.logger import Logger, RunFacts
        >>> class Lines:
        ...     def begin(self, run):
        ...         self.file = open(run.folder / "lines.txt", "a")
        ...
        ...     def log(self, values, step):
        ...         self.file.write(f"{step} {values.get('train/loss')}\\n")
        ...
        ...     def end(self):
        ...         self.file.close()
        >>> logger: Logger = Lines()
    """

    def begin(self, run: RunFacts) -> None:
        """Begin, or go on after ``run.resumed_at`` steps.

        Args:
            run: the run; its folder exists.

        Examples:
            >>> logger.begin(RunFacts("digits", Path("."), "data=2", workers=2, resumed_at=None, options={}))
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Receive numbers of a step, by name: ``train/loss``, ``test/accuracy``; only finite ones.

        Args:
            values: finite numbers, by names such as ``train/loss``.
            step: number of the step, from 1.

        Examples:
            >>> logger.log({"train/loss": 0.5}, step=1)
        """

    def end(self) -> None:
        """Write what has not been written; no more numbers come, or the run begins again after a failure.

        Examples:
            >>> logger.end()
            >>> Path("lines.txt").read_text()
            '1 0.5\\n'
        """


class LoggerGroup:
    """All loggers of a run.

    Args:
        loggers: by the names by which they were asked for.
        warn: called with a sentence when a logger has raised, and receives no more.
    """

    def __init__(self, loggers: Mapping[str, Logger], warn: Callable[[str], None]) -> None:
        self._loggers, self._warn, self._open = dict(loggers), warn, set[str]()

    def begin(self, run: RunFacts) -> None:
        """Begin a run, or go on with it."""
        for name in list(self._loggers):
            if self._attempt(name, lambda logger: logger.begin(run)):
                self._open.add(name)

    def log(self, values: Mapping[str, Any], step: int, group: str) -> None:
        """Send on a line of the metrics.

        Args:
            values: the line; of nested ones, the numbers in them.
            step: number of the step.
            group: first part of the names: "train" or "test".
        """
        if self._open:
            numbers = {f"{group}/{name}": number for name, number in flatten_numbers(values)}
            for name in list(self._open):
                self._attempt(name, lambda logger: logger.log(numbers, step))

    def end(self) -> None:
        """End all of them; they may begin again."""
        for name in list(self._open):
            self._attempt(name, lambda logger: logger.end())
        self._open.clear()

    def _attempt(self, name: str, act: Callable[[Logger], None]) -> bool:
        """Call a logger, and return whether that went well; one that raises is left out from then on."""
        try:
            act(self._loggers[name])
            return True
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            del self._loggers[name]
            self._open.discard(name)
            self._warn(f"--log {name}: {describe_error(error)}; training continues without it")
            return False


def flatten_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a line of metrics, nested ones as ``memory/0``; what is no number is left out."""
    for name, value in values.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            if math.isfinite(value):
                yield name, float(value)
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in flatten_numbers(value))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((f"{name}/{at}", number) for at, number in flatten_numbers(dict(enumerate(value))))  # type: ignore[arg-type]
