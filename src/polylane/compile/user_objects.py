"""Objects of a training loop in PyTorch (an optimizer, a criterion), as the functions that a training consists of.

given                                       taken as
torch.optim.SGD(model.parameters(), ...)    a function that builds its like on other parameters, by their names
nn.CrossEntropyLoss(), loss(output, y)      loss(model, (x, y)) = criterion(model(x), y)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from polylane.compile.optimizer_parts import find_tensors
from polylane.errors import PolylaneError
from polylane.graph.capture.export import Loss, python_kept

# ---- optimizers ------------------------------------------------------------------------------------------------------


class OptimizerObject:
    """The user's optimizer object, as a function from (name, parameter) pairs to an optimizer like it.

    Args:
        optimizer: the user's, on parameters of the model.
        named: (name, parameter) of all parameters of the model and its losses.

    Raises:
        PolylaneError: it has a parameter that is none of these.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.optimizer, self._names = optimizer, {id(parameter): name for name, parameter in named}
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in self._parameters:
            if id(parameter) not in self._names:
                raise PolylaneError(
                    f"the optimizer, a {type(optimizer).__name__}, has a parameter of shape {tuple(parameter.shape)} "
                    "that is not the model's: build it on model.parameters(), after the model has its last layer, or "
                    f"pass a function: optimizer=lambda parameters: {type(optimizer).__name__}(parameters, ...)"
                )

    def take(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the user's object itself where it has these parameters, so that their scheduler is its; else a copy.

        Args:
            parameters: (name, parameter) of all parameters of the model on this worker.
        """
        parameter_ids = {id(parameter) for _, parameter in parameters}
        return self.optimizer if parameter_ids.issuperset(map(id, self._parameters)) else self(parameters)

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return a copy of the optimizer, with all that it keeps, that has other parameters of the same names."""
        new_parameters, shapes, types = dict(parameters), dict[Any, Any](), dict[Any, Any]()
        memo: dict[int, Any] = {}
        for parameter in self._parameters:
            memo[id(parameter)] = new_parameter = new_parameters[self._names[id(parameter)]]
            shapes[parameter.shape] = new_parameter.shape
            types[parameter.shape, parameter.dtype] = new_parameter.dtype
        # Where trials have small parameters in float64, what is kept for these has their shapes and types.
        for value in find_tensors(self.optimizer):
            shape, dtype = shapes.get(value.shape, value.shape), types.get((value.shape, value.dtype), value.dtype)
            if id(value) not in memo and shape != value.shape:
                memo[id(value)] = value.new_full(shape, value.flatten()[0].item(), dtype=dtype)
            elif id(value) not in memo and dtype != value.dtype:
                memo[id(value)] = value.to(dtype)
        # torch's own way of copying leaves out whatever a class of the user's has set.
        with patch.object(torch.optim.Optimizer, "__deepcopy__", _copy_attributes, create=True):
            copied: torch.optim.Optimizer = copy.deepcopy(self.optimizer, memo)
        return copied


def _copy_attributes(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    copied = memo[id(optimizer)] = object.__new__(type(optimizer))
    # A scheduler of the user's has put a function around step() that steps the original; so has a prepared script.
    wrapped = "step", "zero_grad", "state_dict", "load_state_dict"
    attributes = {key: value for key, value in vars(optimizer).items() if key not in wrapped}
    vars(copied).update((key, copy.deepcopy(value, memo)) for key, value in attributes.items())
    return copied


# ---- losses ----------------------------------------------------------------------------------------------------------


class CriterionLoss(nn.Module):
    """A module that takes an output and a target, as a loss of (model, batch)."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return _apply_criterion(self.criterion, model, batch)


def _apply_criterion(criterion: Any, model: nn.Module, batch: Any) -> Any:
    inputs, target = batch
    return criterion(model(inputs), target)


class _UsedAsModel(BaseException):  # which the user's own ``except Exception`` passes on
    """A stand-in for a model was used as a model."""


class _StandInForModel:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _UsedAsModel

    def __getattr__(self, name: str) -> Any:
        is_models, is_tensors = hasattr(vars(self)["_model"], name), hasattr(Tensor, name)
        if is_models and not is_tensors:
            raise _UsedAsModel
        if is_models:  # float(), to(): of either
            return lambda *args, **kwargs: self
        raise AttributeError(f"{type(self).__name__} has no {name}")


def take_loss(loss: Loss, model: nn.Module, example: Any) -> Loss:
    """Return a loss of (model, batch): the user's own, or one that calls their criterion of (output, target).

    Which of the two it is shows in what it does with its first argument, for which something stands that is no tensor:
    a loss calls it, or takes a parameter of it; a criterion computes with it.

    Raises:
        PolylaneError: it is a criterion, and a batch is no pair of inputs and target.
    """
    function: Any = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        first_name = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        first_name = ""
    if first_name == "model":
        return loss
    is_pair = isinstance(example, (list, tuple)) and len(example) == 2
    if not _is_criterion(loss, model, example[1] if is_pair else example):
        return loss
    if not is_pair:
        name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "criterion")
        raise PolylaneError(
            f"the loss is called as loss(model, batch), and {name} takes an output and a target, which this batch "
            f"({describe_batch(example)}) does not name: write a function def loss(model, batch) that returns "
            f"{name}(model(...), ...)"
        )
    return CriterionLoss(loss) if isinstance(loss, nn.Module) else partial(_apply_criterion, loss)


def describe_batch(batch: Any) -> str:
    """Return what a batch is, in words: "a list of 3", "a dict of image, label"."""
    if isinstance(batch, dict):
        return f"a dict of {', '.join(map(str, batch))}"
    return (
        f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (list, tuple)) else f"a {type(batch).__name__}"
    )


def _is_criterion(loss: Loss, model: nn.Module, target: Any) -> bool:
    """Return whether a loss computes with what should be a model."""
    with python_kept(model, loss):
        try:
            loss(_StandInForModel(model), target)  # type: ignore[arg-type]
        except _UsedAsModel:
            return False
        except Exception as error:
            return _StandInForModel.__name__ in str(error)
    return False
