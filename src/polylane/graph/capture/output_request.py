"""Outputs that a user's function asks for beside a loss: a metric's values, or predictions, flat and with their form.

A function of (model, batch) returns Python: a mapping of metrics, or a tuple of predictions. Of what it returns the
tensors become outputs of the captured graph, in order; what they are is the form, which is no part of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polylane.errors import PolylaneError
from polylane.recipe import Mean

Function = Callable[[nn.Module, Any], Any]

# Names of results that are there without metrics.
LOSSES = ("loss", "train_loss", "test_loss")


@dataclass(frozen=True)
class LossWithOutputs:
    """A loss, and what else of its computation is asked for.

    Attributes:
        loss: what a loss returns, a scalar mean or a ``polylane.Mean``.
        outputs: further values of the computation, through which no gradient flows.
        is_undivided: whether the batch is one sample, whose parts are not known.
    """

    loss: Any
    outputs: Sequence[Tensor]
    is_undivided: bool = False


class BadOutputs(PolylaneError):
    """A function of (model, batch) returns something else than it should."""


@dataclass(frozen=True)
class MetricForm:
    """What one metric's outputs are.

    Attributes:
        name: the name under which the metric is reported.
        kind: "mean": a total and a count; "values": a tensor whose elements' mean is the metric; "scalar": the mean of
            a batch; "object": arguments of an ``update``.
        positions: numbers of the outputs, in order.
        metric: the object that is updated and computes the metric, such as one of torchmetrics; None for other kinds.
        arguments: its arguments, flat: None for each tensor, in the order of ``positions``, and constants.
        spec: how the arguments are nested.
    """

    name: str
    kind: Literal["mean", "values", "scalar", "object"]
    positions: tuple[int, ...]
    metric: Any = None
    arguments: tuple[Any, ...] = ()
    spec: Any = None

    def nest(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the arguments of an ``update``, with these tensors."""
        values = iter(tensors)
        leaves = [next(values) if leaf is None else leaf for leaf in self.arguments]
        arguments: tuple[Any, ...] = pytree.tree_unflatten(leaves, self.spec)
        return arguments


@dataclass(frozen=True)
class PredictionForm:
    """How the tensors of predictions are nested.

    Attributes:
        spec: the nesting, as torch's pytrees describe it.
        positions: numbers of the outputs, in order.
    """

    spec: Any
    positions: tuple[int, ...]

    def nest(self, tensors: Sequence[Tensor]) -> Any:
        """Return predictions with these tensors, nested as the function's result."""
        return pytree.tree_unflatten(list(tensors), self.spec)


@dataclass(frozen=True)
class OutputRequest:
    """A user's function of (model, batch) whose results are outputs of a graph.

    Attributes:
        kind: "metrics" beside a loss, or "predict" without one.
        function: the user's function of (model, batch).
    """

    kind: Literal["metrics", "predict"]
    function: Function

    @property
    def call(self) -> str:
        """How the function is called, for messages."""
        return f"{self.kind}(model, batch)"

    @property
    def has_loss(self) -> bool:
        """Whether a loss is computed in the same pass."""
        return self.kind == "metrics"

    def compute(self, model: nn.Module, batch: Any) -> tuple[list[Tensor], Any]:
        """Return what the function asks for, as flat tensors, and their form.

        Args:
            model: the user's model, in evaluation mode.
            batch: a batch in the form of the user's data.

        Raises:
            BadOutputs: the function returns something else than it should.
        """
        result = self.function(model, batch)
        return _flatten_metrics(result) if self.kind == "metrics" else _flatten_predictions(result)


def stand_in_loss(outputs: Sequence[Tensor]) -> Tensor:
    """Return a mean over samples that serves as the loss of a program in which nothing is differentiated."""
    values = next((output for output in outputs if output.is_floating_point()), None)
    return outputs[0].to(torch.float32).mean() if values is None else values.mean()


def _flatten_metrics(result: Any) -> tuple[list[Tensor], tuple[MetricForm, ...]]:
    if not isinstance(result, Mapping):
        raise BadOutputs(
            f"metrics(model, batch) must return a dict from names to values, not a {type(result).__name__}"
        )
    tensors, forms = list[Tensor](), list[MetricForm]()

    def add(values: Sequence[Tensor]) -> tuple[int, ...]:
        tensors.extend(values)
        return tuple(range(len(tensors) - len(values), len(tensors)))

    for name, value in result.items():
        if not isinstance(name, str):
            raise BadOutputs(f"metrics(model, batch) must return a dict whose keys are strings, and one is {name!r}")
        if isinstance(value, Mean):
            forms.append(MetricForm(name, "mean", add(_total_and_count(name, value))))
        elif isinstance(value, Tensor) and not value.is_complex():
            forms.append(MetricForm(name, "values" if value.dim() else "scalar", add([value])))
        elif isinstance(value, tuple) and value and is_metric(value[0]):
            leaves, spec = pytree.tree_flatten(value[1:])
            positions = add([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)  # None is no leaf
            if not positions:
                raise BadOutputs(f"metrics(model, batch): {name} has a metric that is updated with no tensor")
            for member, metric in _list_members(name, value[0]):
                forms.append(MetricForm(member, "object", positions, metric, constants, spec))
        else:
            raise BadOutputs(_describe_wrong_value(name, value))
    names = [form.name for form in forms]
    if twice := next((name for name in names if name in LOSSES or names.count(name) > 1), None):
        raise BadOutputs(f"metrics(model, batch): {twice} is the name of two values, or of a loss: rename one")
    return tensors, tuple(forms)


def _total_and_count(name: str, value: Mean) -> list[Tensor]:
    """Return total and count of a mean as scalar tensors.

    Raises:
        BadOutputs: they are none.
    """
    total, count = value.total, value.count
    if not isinstance(total, Tensor) or total.dim() or total.is_complex():
        raise BadOutputs(f"metrics(model, batch): the total of {name} must be a real scalar tensor: sum what counts")
    if isinstance(count, int | torch.SymInt):  # as a sum over what is counted, it is known to be one over samples
        count = torch.ones((count,), dtype=torch.float64, device=total.device).sum()
    if not isinstance(count, Tensor):
        count = total.detach().new_ones((), dtype=torch.float64) * count
    if count.dim():
        raise BadOutputs(f"metrics(model, batch): the count of {name} must be a scalar: sum what counts")
    return [total, count]


def is_metric(value: Any) -> bool:
    """Return whether a value has the methods of a metric of torchmetrics: update, compute and reset."""
    return all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset"))


def _list_members(name: str, metric: Any) -> list[tuple[str, Any]]:
    """Return the metrics of a collection by their own names, or a single metric under the name that it was given."""
    # Of torchmetrics: its members are updated one by one, with the same arguments.
    if isinstance(metric, nn.ModuleDict):
        return [(str(key), member) for key, member in metric.items()]
    return [(name, metric)]


def _describe_wrong_value(name: str, value: Any) -> str:
    forms = (
        "polylane.Mean(total, count), a tensor with a value for each sample, or a metric object with what it is "
        f"updated with, as in {{{name!r}: (metric, predictions, targets)}}"
    )
    if is_metric(value):
        return f"metrics(model, batch): {name} is a metric without what it is updated with: return {forms}"
    return f"metrics(model, batch): {name} is of type {type(value).__name__}: return {forms}"


def _flatten_predictions(result: Any) -> tuple[list[Tensor], PredictionForm]:
    leaves, spec = pytree.tree_flatten(result)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})
        raise BadOutputs(
            "predict(model, batch) must return tensors with a row for each sample, or a tuple, list or dict of them, "
            f"not {', '.join(kinds) or 'nothing'}"
        )
    return leaves, PredictionForm(spec, tuple(range(len(leaves))))
