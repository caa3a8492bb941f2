"""Metrics over a dataset: added up on the workers that have the values, and put together once, at its end.

    polylane.Mean       sum of totals over sum of counts, each proven to be a sum over samples
    a tensor            sum of its elements over their number: each belongs to a sample, or is the same on all parts
    a metric object     see :mod:`.object_states`

Nothing is counted twice: of the workers that compute the same samples one has the outputs, and padding has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.capture.output_request import MetricForm
from polylane.runtime.evaluation.object_states import ObjectStates
from polylane.runtime.pipeline.step_outputs import StepOutputs
from polylane.runtime.transport.protocol import Transport
from polylane.samples.batch_layout import BatchLayout


class MetricStates:
    """One worker's metrics of the batches of a dataset so far.

    Args:
        transport: connects all workers that train.
        device: device of this worker.
        in_float64: whether metric objects keep sums in float64 (for proofs).
    """

    def __init__(self, transport: Transport, device: torch.device, in_float64: bool = False) -> None:
        self._transport, self._device, self._in_float64 = transport, device, in_float64
        self._sums = dict[str, Tensor]()  # by name, [total, count] of this worker, in float64
        self._objects = dict[str, ObjectStates]()
        self._names = dict[str, None]()  # of all metrics, in the order that the user gives them in
        self._checked_forms = list[Any]()  # forms of graphs whose outputs were seen to be what they should

    def update(self, outputs: StepOutputs) -> list[float]:
        """Add a batch; return for each metric object 1.0 where it cannot be computed part by part, see :meth:`settle`.

        Args:
            outputs: what the batch's pass has computed beside its loss.

        Raises:
            PolylaneError: a metric is not known to be a mean over samples, or its ``update`` fails.
        """
        forms: Sequence[MetricForm] = outputs.form or ()
        if not any(form is checked_form for form in forms for checked_form in self._checked_forms):
            for form in forms:
                _check_sums(form, outputs)
            self._checked_forms.extend(forms)
        flags = []
        for form in forms:
            self._names.setdefault(form.name)
            if form.kind != "object":
                sums = self._sums.setdefault(form.name, torch.zeros(2, dtype=torch.float64, device=self._device))
                for part, values in outputs.parts:
                    sums += _sum_part(form, values, part.samples)
                continue
            if form.name not in self._objects:
                self._objects[form.name] = ObjectStates(form, self._transport, self._device, self._in_float64)
            flags.append(float(self._objects[form.name].update(form, outputs)))
        return flags

    def settle(self, outputs: StepOutputs, flags: Sequence[float]) -> None:
        """Compute a batch's metrics anew from all of its samples where a worker asks for it; collective.

        Args:
            outputs: those that :meth:`update` was given.
            flags: sums over all workers of what it returned.
        """
        forms = [form for form in outputs.form or () if form.kind == "object"]
        for form, flag in zip(forms, flags, strict=True):
            self._objects[form.name].settle(form, outputs, is_refused=flag > 0)

    def compute(self) -> dict[str, float]:
        """Return all metrics, the same on every worker; collective.

        Raises:
            PolylaneError: on every worker, if a metric object cannot compute its value.
        """
        rows = self._transport.all_gather_object({name: sums.tolist() for name, sums in self._sums.items()})
        values = dict[str, float]()
        for name in self._names:
            if name in self._objects:
                values.update(self._objects[name].compute())
                continue
            total, count = (math.fsum(row[name][i] for row in rows) for i in (0, 1))
            values[name] = total / count if count else math.nan
        return values


def _sum_part(form: MetricForm, values: dict[int, Tensor], samples: int) -> Tensor:
    """Return [total, count] of one part of a batch, as float64 tensor."""
    if form.kind == "mean":
        return torch.stack([values[i].double() for i in form.positions])
    (position,) = form.positions
    value = values[position].double()
    count = samples if form.kind == "scalar" else value.numel()
    total = value * samples if form.kind == "scalar" else value.sum()
    return torch.stack([total, total.new_tensor(float(count))])


def _check_sums(form: MetricForm, outputs: StepOutputs) -> None:
    """Check that a metric's totals and counts may be added up over the parts of a batch, and over batches.

    Raises:
        PolylaneError: this is not known.
    """
    for position in form.positions if form.kind != "object" else ():
        layout = outputs.layout(position)
        if form.kind == "mean":
            if layout is not BatchLayout.SUM and not outputs.is_whole:
                raise PolylaneError(
                    f"metrics(model, batch): total and count of {form.name} must be sums over the samples, and this is "
                    "not known of one of them: sum what each sample gives, or return a tensor with a value per sample"
                )
        elif form.kind == "scalar":
            if layout not in (BatchLayout.MEAN, BatchLayout.REPLICATED):
                raise PolylaneError(
                    f"metrics(model, batch): {form.name} is a scalar that is not known to be a mean over the samples "
                    "of a batch: return polylane.Mean(total, count), or a tensor with a value for each sample"
                )
        elif not outputs.is_whole and layout not in (BatchLayout.SHARDED_BY_SAMPLE, BatchLayout.REPLICATED):
            raise PolylaneError(
                f"metrics(model, batch): it is not known that each element of {form.name} belongs to one sample: "
                "return polylane.Mean(total, count), with sums over the samples"
            )
