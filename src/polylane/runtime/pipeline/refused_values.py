"""Refused values: an operator that has nothing for an index of a batch (a label past the classes), in one sentence."""

from __future__ import annotations

import traceback

from polylane.errors import ActionFailed, PolylaneError, describe_place
from polylane.graph.python_state.own_objects import is_users

_WORDS = ("out of bounds", "out of range")
_OF_SIZES = "Dimension out of range"  # no value of a batch is past anything: an operator is given a wrong dimension


def blame_on_values(batch: str, failed: ActionFailed) -> Exception:
    """Return one sentence for an operator's error about an index of the user's batch.

    Errors inside of the user's own Python keep their traceback, and so do all other ones: these are returned as given.

    Args:
        batch: which batch it is, as the begin of a sentence.
        failed: what ended the pass.
    """
    cause = failed.cause
    if cause is None or not _is_about_values(cause):
        return failed
    site = describe_place(failed.stage, failed.microbatch, failed.module, failed.source)
    text = " ".join(str(cause).split()).rstrip(".")
    error = PolylaneError(
        f"{batch}: a number of the batch is past what the model has{site}: {type(cause).__name__}: {text}; see labels "
        "and indices of this batch against the number of classes, or of rows"
    )
    error.__cause__ = cause
    return error


def _is_about_values(error: BaseException) -> bool:
    if not isinstance(error, IndexError | RuntimeError) or not any(words in str(error) for words in _WORDS):
        return False
    if _OF_SIZES in str(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not any(is_users(frame.filename) and not frame.filename.startswith("<") for frame in frames)
