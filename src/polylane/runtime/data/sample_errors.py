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
    where: str,
    load: Callable[[int], Any],
    indices: Sequence[int],
    collate: Callable[[list[Any]], Any],
    error: BaseException,
) -> BaseException:
    """Return the error to raise for a batch that could not be loaded: its samples are loaded again, one by one.

    Args:
        where: which batch it was, as the begin of a sentence.
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
        except PolylaneError as own:
            return own
        except RAISED as own:
            return sample_error(f"{where}: sample {index}", own)
    try:
        collate(samples)
    except PolylaneError as own:
        return own
    except RAISED as own:
        return misfit_error(where, indices, samples, own)
    return PolylaneError(f"{where} cannot be loaded: {_describe(error)}")  # not a second time


def sample_error(sample: str, error: BaseException) -> PolylaneError:
    """Return the error of a dataset that raised.

    Args:
        sample: which batch and sample it was, as the begin of a sentence.
        error: exception that the dataset raised for the sample.
    """
    return PolylaneError(f"{sample} of the dataset raised {_describe(error)}")


def misfit_error(where: str, indices: Sequence[int], samples: Sequence[Any], error: BaseException) -> PolylaneError:
    """Return the error of samples that do not make a batch: the first that differs from the one at the batch's begin.

    Args:
        where: which batch it was, as the begin of a sentence.
        indices: indices of the samples in the dataset.
        samples: what the dataset gave for these indices.
        error: what collating them raised.
    """
    for index, sample in zip(indices[1:], samples[1:], strict=True):
        difference = find_difference(samples[0], sample, "")
        if difference is not None:
            place, first, other = difference
            return PolylaneError(
                f"{where}: its samples do not make a batch: {place or 'all of it'} of sample {indices[0]} is {first}, "
                f"and of sample {index} {other}; give samples of one form, or a collate(samples) that pads them"
            )
    return PolylaneError(f"{where}: its samples do not make a batch: {_describe(error)}")


def _describe(error: BaseException) -> str:
    """Return an exception on one line, with the deepest line of the user's own code."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    where = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
    return f"{describe_error(error)}{where}"


def find_difference(one: Any, other: Any, place: str) -> tuple[str, str, str] | None:
    """Return where two samples differ in form, and how each is there; None if they do not."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                first, second = ("there" if key in each else "not there" for each in (one, other))
                return f"{place}[{key!r}]", first, second
        pairs: list[tuple[str, Any, Any]] = [(f"{place}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = [(f"{place}[{i}]", *both) for i, both in enumerate(zip(one, other, strict=True))]
    else:
        first, second = _form(one), _form(other)
        return None if first == second else (place, first, second)
    return next((found for name, a, b in pairs if (found := find_difference(a, b, name)) is not None), None)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"of type {type(value).__name__}"
