"""States of a metric object (torchmetrics): updated on each worker's samples, and reduced as the metric itself says.

A metric of torchmetrics declares for each of its states how those of several processes become one: by a sum, a
concatenation, a maximum or a minimum. Here each part of a batch gives a contribution, the state that one ``update``
with it leaves behind; concatenated ones are put into the order of the data. Three ways of being updated must agree for
this, which is looked at while evaluating (batches 1, 2, 4, 8, ...):

    the part at once  =  its two halves, one after the other  =  the halves' contributions, reduced

A metric for which that does not hold (a mean of means over batches), or whose states have another reduction, is updated
by rank 0 with all samples of every batch, as in a loop on one device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError, describe_error
from polylane.graph.capture.output_request import MetricForm
from polylane.runtime.pipeline.step_outputs import SampleCut, StepOutputs
from polylane.runtime.transport.protocol import Transport
from polylane.samples.batch_layout import BatchLayout

State = dict[str, Tensor]

# The reductions of torchmetrics that a state's contributions can be put together by, by the names of its functions.
_REDUCTIONS = {"dim_zero_sum": "sum", "dim_zero_cat": "cat", "dim_zero_max": "max", "dim_zero_min": "min"}
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative, of sums in another order; others: a hundredth


@dataclass(frozen=True)
class Contribution:
    """What one part of a batch adds to a metric's states.

    Attributes:
        batch: number of the batch in the dataset.
        position: place of the part's first sample in the batch.
        state: the states after one update, from the default ones.
    """

    batch: int
    position: int
    state: State


class ObjectStates:
    """One worker's part in computing a metric object over a dataset.

    Args:
        form: the metric, which is copied, and its arguments.
        transport: connects all workers that train.
        device: device of this worker.
        in_float64: whether sums are kept in float64 (for proofs).
    """

    def __init__(self, form: MetricForm, transport: Transport, device: torch.device, in_float64: bool) -> None:
        self._name, self._transport, self._device = form.name, transport, device
        self._metric = copy_metric(form.metric, device, in_float64)
        self._reductions = _find_reductions(self._metric)
        self._is_by_parts = self._reductions is not None
        self._state = State()  # sums, maxima and minima of this worker's contributions
        self._rows = list[Contribution]()  # of states that are concatenated
        self._pending = list[Contribution]()  # of the latest batch
        self._batch, self._has_updated = 0, False

    def update(self, form: MetricForm, outputs: StepOutputs) -> bool:
        """Take this worker's parts of a batch; return whether the metric must be given all of the batch instead.

        Args:
            form: the metric's arguments among the outputs.
            outputs: what the batch's pass has computed beside its loss.
        """
        self._batch += 1
        self._pending.clear()
        if not self._is_by_parts:
            return False
        cuts = [outputs.find_sample_cut(i) for i in form.positions]
        common = [outputs.layout(i) is BatchLayout.REPLICATED for i in form.positions]
        if not all(cut is not None or is_common for cut, is_common in zip(cuts, common, strict=True)):
            return True
        is_checked = self._batch & (self._batch - 1) == 0
        for part, values in outputs.parts:
            arguments = [values[i] for i in form.positions]
            try:
                state = self._contribute(form, arguments)
                if is_checked and not self._agrees(form, arguments, cuts, part.samples, state):
                    return True
            except Exception:  # of the metric's own code: where all samples are no better, all workers raise
                return True
            self._pending.append(Contribution(self._batch, part.first, state))
        return False

    def settle(self, form: MetricForm, outputs: StepOutputs, is_refused: bool) -> None:
        """Keep the latest batch's contributions, or update the metric with all of the batch on rank 0; collective.

        Args:
            form: the metric's arguments among the outputs.
            outputs: what the batch's pass has computed beside its loss.
            is_refused: whether some worker's :meth:`update` has returned True.

        Raises:
            PolylaneError: on every worker, if an argument has no row for each sample, or ``update`` fails.
        """
        if self._is_by_parts and is_refused:
            self._join_states()
            self._is_by_parts = False
        elif self._is_by_parts:
            for contribution in self._pending:
                self._add(contribution)
            self._pending.clear()
        if not self._is_by_parts:
            self._update_with_all(form, outputs)

    def compute(self) -> dict[str, float]:
        """Return the metric's value, or values, by name, the same on every worker; collective.

        Raises:
            PolylaneError: on every worker, if it cannot be computed.
        """
        computing_rank = self._join_states() if self._is_by_parts else 0
        report: Any = None
        if self._transport.rank == computing_rank:
            try:
                with torch.no_grad():
                    report = list_numbers(self._name, self._metric.compute())
            except PolylaneError as error:
                report = str(error)
            except Exception as error:  # of the metric's own code
                report = f"metrics: {self._name}.compute() raised {describe_error(error)}"
        report = self._transport.all_gather_object(report)[computing_rank]
        if isinstance(report, str):
            raise PolylaneError(report)
        return dict(report)

    # ---- by parts ----------------------------------------------------------------------------------------------------

    def _contribute(self, form: MetricForm, *updates: Sequence[Tensor]) -> State:
        """Return the states after some updates, from the default ones."""
        self._metric.reset()
        for arguments in updates:
            self._update_metric(form, arguments)
        return self._read_state()

    def _read_state(self) -> State:
        assert self._reductions is not None
        state = State()
        for name in self._reductions:
            value = getattr(self._metric, name)
            if isinstance(value, list):
                tensors = [tensor if tensor.dim() else tensor.unsqueeze(0) for tensor in value]
                if tensors:
                    state[name] = torch.cat(tensors).clone()
            else:
                state[name] = value.detach().clone()
        return state

    def _agrees(
        self,
        form: MetricForm,
        arguments: Sequence[Tensor],
        cuts: Sequence[SampleCut | None],
        samples: int,
        state: State,
    ) -> bool:
        """Return whether two halves of a part, or a single sample twice, give what the whole of it does."""

        def take(start: int, count: int) -> list[Tensor]:
            return [
                value if cut is None else cut.take(value, samples, start, count)
                for value, cut in zip(arguments, cuts, strict=True)
            ]

        half = samples // 2
        if half:
            halves = take(0, half), take(half, samples - half)
        else:
            halves = take(0, 1), take(0, 1)
            twice = [
                value if cut is None else cut.join([value, value], [1, 1])
                for value, cut in zip(arguments, cuts, strict=True)
            ]
            state = self._contribute(form, twice)
        in_turn = self._contribute(form, *halves)
        reduced = self._reduce([self._contribute(form, half_arguments) for half_arguments in halves])
        return _are_close(state, in_turn) and _are_close(in_turn, reduced)

    def _reduce(self, states: Sequence[State]) -> State:
        """Return the states of several contributions as one, in the order that they are given in."""
        assert self._reductions is not None
        result = State()
        for name, reduction in self._reductions.items():
            values = [state[name] for state in states if name in state]
            if not values:
                continue
            if reduction == "cat":
                result[name] = torch.cat([value if value.dim() else value.unsqueeze(0) for value in values])
            elif reduction == "sum":
                default = self._metric._defaults[name].to(values[0].device)
                result[name] = default + sum(value - default for value in values)
            else:
                stacked = torch.stack(values)
                result[name] = stacked.amax(0) if reduction == "max" else stacked.amin(0)
        return result

    def _add(self, contribution: Contribution) -> None:
        assert self._reductions is not None
        self._has_updated = True
        numbers = {n: value for n, value in contribution.state.items() if self._reductions[n] != "cat"}
        rows = {n: value for n, value in contribution.state.items() if self._reductions[n] == "cat"}
        self._state = self._reduce([self._state, numbers]) if self._state else numbers
        if rows:
            self._rows.append(Contribution(contribution.batch, contribution.position, rows))

    def _join_states(self) -> int:
        """Give the metric the states of all workers; return the first rank that has updated it; collective."""
        numbers = {name: value.cpu() for name, value in self._state.items()}
        rows = [(row.batch, row.position, {n: v.cpu() for n, v in row.state.items()}) for row in self._rows]
        reports = self._transport.all_gather_object((self._has_updated, numbers, rows))
        ordered = sorted((row for report in reports for row in report[2]), key=lambda row: (row[0], row[1]))
        states = [*(report[1] for report in reports if report[1]), *(row[2] for row in ordered)]
        self._metric.reset()  # it has those of the latest part
        self._metric._update_count = int(self._has_updated)  # torchmetrics warns of a value without an update
        for name, value in self._reduce(states).items():
            on_device = value.to(self._device)
            is_list = isinstance(self._metric._defaults[name], list)
            setattr(self._metric, name, [on_device] if is_list else on_device)
        return next((rank for rank, report in enumerate(reports) if report[0]), 0)

    # ---- of all samples ----------------------------------------------------------------------------------------------

    def _update_with_all(self, form: MetricForm, outputs: StepOutputs) -> None:
        """Update the metric with all samples of a batch, on rank 0; collective."""
        arguments, error = _gather_arguments(form, outputs), ""
        if self._transport.rank == 0:
            try:
                self._update_metric(form, [argument.to(self._device) for argument in arguments])
            except Exception as raised:  # of the metric's own code, which checks what it is given
                error = f"metrics: {self._name}.update(...) raised {describe_error(raised)}"
        if error := self._transport.all_gather_object(error)[0]:
            raise PolylaneError(error)

    def _update_metric(self, form: MetricForm, arguments: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self._metric.update(*form.nest(arguments))


def copy_metric(metric: Any, device: torch.device, in_float64: bool) -> Any:
    """Return a metric in its first state, that does not look for other processes by itself.

    Args:
        metric: the user's object, which is not changed.
        device: where the copy keeps its states.
        in_float64: whether it keeps sums in float64, as all else in a proof, if it can (torchmetrics).
    """
    result = copy.deepcopy(metric)
    if in_float64 and hasattr(result, "set_dtype"):
        result = result.set_dtype(torch.float64)
    result.reset()
    dtype = getattr(result, "_dtype", None)
    if hasattr(result, "to"):
        result = result.to(device)
    if dtype is not None:  # torchmetrics takes that of a dummy tensor when it moves a metric
        result._dtype = dtype
    result.distributed_available_fn = lambda: False  # of torchmetrics: its states are put together here
    return result


def _find_reductions(metric: Any) -> Mapping[str, str] | None:
    """Return how each state of a metric is reduced; None where it has others, or none, or further metrics inside."""
    reductions, defaults = getattr(metric, "_reductions", None), getattr(metric, "_defaults", {})
    inner_metrics = [module for module in metric.children() if hasattr(module, "_reductions")] if reductions else []
    if not reductions or inner_metrics:
        return None
    names = dict[str, str]()
    for name, reduction in reductions.items():
        is_list = isinstance(defaults.get(name), list)
        kind = _REDUCTIONS.get(getattr(reduction, "__name__", ""), "")
        kind = "cat" if is_list and reduction is None else kind  # a list that the metric itself puts together
        if not kind or (is_list and kind != "cat"):
            return None
        names[name] = kind
    return names


def _gather_arguments(form: MetricForm, outputs: StepOutputs) -> list[Tensor]:
    """Return a metric's arguments for all samples of a batch, in order, on every worker; collective.

    Raises:
        PolylaneError: one of them has no row for each sample.
    """
    parts = outputs.gather_parts(form.positions)
    arguments = list[Tensor]()
    for number, position in enumerate(form.positions):
        values, cut = [values[number] for _, values in parts], outputs.find_sample_cut(position)
        if len(parts) == 1 or outputs.layout(position) is BatchLayout.REPLICATED:
            arguments.append(values[0])
        elif cut is not None:
            arguments.append(cut.join(values, [part.samples for part, _ in parts]))
        else:
            raise PolylaneError(
                f"metrics: {form.name} is updated with a value that is not known to have a row for each sample: give "
                "it values that have one, such as predictions and targets"
            )
    return arguments


def _are_close(state: State, other_state: State) -> bool:
    """Return whether two states are equal but for the rounding of sums in another order."""
    if state.keys() != other_state.keys():
        return False
    for name, value in state.items():
        expected = other_state[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return False
        tolerance = _TOLERANCES.get(value.dtype, 1e-2) if value.is_floating_point() or value.is_complex() else 0.0
        scale = float(expected.abs().max()) if expected.numel() and tolerance else 0.0
        scale = scale if math.isfinite(scale) else 0.0
        if not torch.allclose(value, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return False
    return True


def list_numbers(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value as numbers by name: of a vector, "name.0", "name.1", ...

    Raises:
        PolylaneError: it is made of something else.
    """
    if isinstance(value, Mapping):
        return {key: number for n, v in value.items() for key, number in list_numbers(f"{name}.{n}", v).items()}
    if isinstance(value, Tensor) and value.dim() and not value.is_complex():
        return {f"{name}.{i}": float(number) for i, number in enumerate(value.flatten().tolist())}
    if isinstance(value, Tensor | int | float) and not (isinstance(value, Tensor) and value.is_complex()):
        return {name: float(value)}
    raise PolylaneError(
        f"metrics: {name} computes a {type(value).__name__}, and only numbers are reported: take a metric of one value"
    )
