"""Errors of samples: a dataset that raises, and samples that make no batch, in one sentence that names the sample."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from polylane.errors import PolylaneError, describe_error
from polylane.graph.python_state.own_objects import is_users

RAISED = (Exception, SystemExit)  # what a user's dataset may raise; an interrupt is none of its errors


def explain_batch(
    label: str,
    load: Callable[[int], Any],
    indices: Sequence[int],
    collate: Callable[[list[Any]], Any],
    error: BaseException,
) -> BaseException:
    """Return the error to raise for a batch that could not be loaded: its samples are loaded again, one by one.

    Args:
        label: which batch it was, as the begin of a sentence.
        load: returns one sample of the dataset.
        indices: indices of the samples of the batch.
        collate: function from samples to a batch.
        error: what was raised when the batch was loaded.
    """
    if isinstance(error, PolylaneError | MemoryError):
        return error
    samples = []
    for index in indices:
        try:
            samples.append(load(index))
        except PolylaneError as failure:
            return failure
        except RAISED as failure:
            return sample_error(f"{label}: sample {index}", failure)
    try:
        collate(samples)
    except PolylaneError as failure:
        return failure
    except RAISED as failure:
        return misfit_error(label, indices, samples, failure)
    return PolylaneError(f"{label} cannot be loaded: {_describe(error)}")  # not a second time


def sample_error(sample: str, error: BaseException) -> PolylaneError:
    """Return the error of a dataset that raised.

    Args:
        sample: which batch and sample it was, as the begin of a sentence.
        error: exception that the dataset raised for the sample.
    """
    return PolylaneError(f"{sample} of the dataset raised {_describe(error)}")


def misfit_error(label: str, indices: Sequence[int], samples: Sequence[Any], error: BaseException) -> PolylaneError:
    """Return the error of samples that do not make a batch: the first that differs from the one at the batch's begin.

    Args:
        label: which batch it was, as the begin of a sentence.
        indices: indices of the samples in the dataset.
        samples: what the dataset gave for these indices.
        error: what collating them raised.
    """
    for index, sample in zip(indices[1:], samples[1:], strict=True):
        difference = find_difference(samples[0], sample, "")
        if difference is not None:
            path, form, other_form = difference
            return PolylaneError(
                f"{label}: its samples do not make a batch: {path or 'all of it'} of sample {indices[0]} is {form}, "
                f"and of sample {index} {other_form}; give samples of one form, or a collate(samples) that pads them"
            )
    return PolylaneError(f"{label}: its samples do not make a batch: {_describe(error)}")


def _describe(error: BaseException) -> str:
    """Return an exception on one line, with the deepest line of the user's own code."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    location = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
    return f"{describe_error(error)}{location}"


def find_difference(value: Any, twin: Any, path: str) -> tuple[str, str, str] | None:
    """Return where two samples differ in form, and how each is there; None if they do not."""
    if isinstance(value, Mapping) and isinstance(twin, Mapping):
        for key in [*value, *(key for key in twin if key not in value)]:
            if key not in value or key not in twin:
                first, second = ("there" if key in side else "not there" for side in (value, twin))
                return f"{path}[{key!r}]", first, second
        pairs: list[tuple[str, Any, Any]] = [(f"{path}[{key!r}]", value[key], twin[key]) for key in value]
    elif isinstance(value, list | tuple) and isinstance(twin, list | tuple) and len(value) == len(twin):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(value, twin, strict=True))]
    else:
        first, second = _form(value), _form(twin)
        return None if first == second else (path, first, second)
    return next((difference for name, a, b in pairs if (difference := find_difference(a, b, name)) is not None), None)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"
