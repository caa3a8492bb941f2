"""Quiet tracing: torch's warnings and logs of unfinished traces are held back, for failing is a normal event there."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

_TALKATIVE = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export",
    "torch.fx",
    "torch._subclasses",
    "torch.utils._sympy",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: silence torch's warnings, logs and prints to stderr, of the whole process."""
    with redirect_stderr(io.StringIO()), warnings.catch_warnings(), loggers_silenced(*_TALKATIVE):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def loggers_silenced(*names: str) -> Iterator[None]:
    """Context manager: have loggers report nothing below what is critical, then what they did before.

    Args:
        names: dotted names of the loggers, as of :func:`logging.getLogger`.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
