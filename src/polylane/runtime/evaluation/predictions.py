"""Predictions: what a function returns for each sample of a batch, in the order of the batch, on every worker."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.capture.output_request import PredictionForm
from polylane.runtime.pipeline.step_outputs import SampleCut, StepOutputs


def gather_predictions(outputs: StepOutputs) -> list[Any]:
    """Return what each sample of a batch has, in order, on every worker's CPU; collective.

    Args:
        outputs: the outputs of the pass, each with a row for each sample.

    Raises:
        PolylaneError: a tensor is not known to have a row for each sample.
    """
    form = outputs.form
    assert isinstance(form, PredictionForm)
    cuts = [outputs.find_sample_cut(i) for i in form.positions]
    results = list[Any]()
    for part, values in outputs.gather_parts(form.positions):
        rows = [_list_rows(value, cut, part.samples, outputs.is_whole) for value, cut in zip(values, cuts, strict=True)]
        results += [form.nest(sample) for sample in zip(*rows, strict=True)]
    return results


def _list_rows(value: Tensor, cut: SampleCut | None, samples: int, is_whole: bool) -> list[Tensor]:
    """Return a tensor's elements of each sample.

    Raises:
        PolylaneError: it is not known where these are.
    """
    if cut is None and is_whole and value.dim() and len(value) == samples:
        cut = SampleCut(0, 1, 1)  # nothing was divided, and nothing is to be put together
    if cut is None:
        raise PolylaneError(
            f"predict(model, batch) returns a tensor of shape {list(value.shape)} for {samples} samples, and it is not "
            "known which of its elements belong to which sample: return tensors with a row for each sample"
        )
    if (cut.runs, cut.width) == (1, 1):
        return list(value.unbind(cut.dim))
    return [cut.take(value, samples, i, 1) for i in range(samples)]
