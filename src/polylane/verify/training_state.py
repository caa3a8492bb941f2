"""Training state: weights, buffers and optimizer state by name; copied, written into a worker's parts, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.batch import flatten_nested
from polylane.graph.rounding_noise import max_difference, max_magnitude

# (name, whole tensor) -> the part that a worker has of this parameter or buffer; None where it has none of it.
Cut = Callable[[str, Tensor], Tensor | None]


@dataclass(frozen=True)
class OptimizerMemory:
    """The state of one optimizer.

    Attributes:
        entries: by parameter name, then by the optimizer's own key: tensors, numbers, or containers of them.
        options: for each parameter group, its options that are numbers, such as a learning rate.
    """

    entries: Mapping[str, Mapping[str, Any]]
    options: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TrainingState:
    """All that a step begins with.

    Attributes:
        tensors: weights and buffers by name, those of a loss module under "loss.".
        memories: the state of the optimizer, and of optimizers that it wraps.
    """

    tensors: Mapping[str, Tensor]
    memories: Sequence[OptimizerMemory]


def read_state(
    tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> TrainingState:
    """Return a copy of the state.

    Args:
        tensors: weights and buffers by name.
        optimizer: the optimizer of these weights.
        names: parameter names by ``id`` of the parameter.
    """
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return TrainingState(copies, [_read_memory(member, names) for member in _find_optimizers(optimizer)])


def _read_memory(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerMemory:
    entries = {names[id(p)]: _copy_value(entry) for p, entry in optimizer.state.items() if id(p) in names}
    return OptimizerMemory(entries, [_group_options(group) for group in optimizer.param_groups])


def _find_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it wraps (in its attributes, or in lists of them)."""
    optimizers = [optimizer]
    for member in optimizers:
        for value in vars(member).values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            optimizers += [
                o for o in inner if isinstance(o, torch.optim.Optimizer) and all(o is not f for f in optimizers)
            ]
    return optimizers


def _group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy_value(value) for key, value in group.items() if key != "params" and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(item) for item in value)
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_copy_value(item) for item in value)
    return value


def write_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], cut: Cut) -> None:
    """Copy whole tensors into a worker's parts of them, in place, so that all that share their memory see it.

    Args:
        expected: tensors of the whole model (weights, buffers, gradients), by name.
        tensors: this worker's own tensors, or its parts of them, by name.
        cut: gives the part of a whole tensor that this worker has.
    """
    with torch.no_grad():
        for name, tensor in tensors.items():
            part = cut(name, expected[name])
            if part is not None:
                tensor.copy_(part if part.is_sparse else part.view(tensor.shape))


def tensor_differences(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], cut: Cut
) -> Iterator[tuple[str, float]]:
    """Yield how far a worker's parts of tensors are from the expected ones: name, largest difference."""
    for name, tensor in tensors.items():
        part = cut(name, expected[name])
        if part is not None:
            fits = part.numel() == tensor.numel() and not part.is_sparse
            yield name, max_difference(part.view(tensor.shape) if fits else part, tensor)


def write_memory(
    state: TrainingState, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], cut: Cut
) -> None:
    """Copy a state into an optimizer of the same type, as far as it is in ``state`` and in group options.

    Args:
        state: the state of the whole model that is copied.
        optimizer: this worker's optimizer, and through it those that it wraps.
        parameters: the worker's parameters, or parts of them, by the model's names.
        cut: gives the part of a whole tensor that this worker has.
    """
    for member, memory in zip(_find_optimizers(optimizer), state.memories, strict=True):
        optimized_ids = {id(p) for group in member.param_groups for p in group["params"]}
        for name, parameter in parameters.items():
            if name in memory.entries:
                fit = _make_fit(cut, name, state.tensors[name].shape)
                member.state[parameter] = _fit_value(member.state.get(parameter, {}), memory.entries[name], fit)
            # The reference has no state for this parameter (it got no gradient yet), so that the worker must have none.
            elif id(parameter) in optimized_ids:
                member.state.pop(parameter, None)
        for group, options in zip(member.param_groups, memory.options, strict=True):
            for key, value in options.items():
                group[key] = _fit_value(group.get(key), value, lambda tensor: tensor)


def _make_fit(cut: Cut, name: str, shape: Sequence[int]) -> Callable[[Tensor], Tensor | None]:
    # State in the parameter's shape is cut like the parameter; other entries (step counts, factored moments) stay
    # whole.
    return lambda tensor: cut(name, tensor) if tensor.shape == torch.Size(shape) else tensor


def _fit_value(target: Any, value: Any, fit: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a copy of ``value`` for this worker, written into its own tensor where that has the same shape."""
    if isinstance(value, Tensor):
        part = fit(value)
        if part is None:
            return target
        if isinstance(target, Tensor) and target.shape == part.shape:
            with torch.no_grad():
                target.copy_(part)
            return target
        return part.detach().clone()
    if isinstance(value, dict):
        return {
            key: _fit_value(target.get(key) if isinstance(target, dict) else None, v, fit) for key, v in value.items()
        }
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        targets = target if isinstance(target, (list, tuple)) and len(target) == len(value) else [None] * len(value)
        return type(value)(_fit_value(o, item, fit) for o, item in zip(targets, value, strict=True))
    return value


def memory_differences(
    state: TrainingState, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], cut: Cut
) -> Iterator[tuple[str, str, float]]:
    """Yield how far an optimizer's state is from the expected one: parameter, entry, largest difference.

    Options of parameter groups come under the parameter "".

    Args:
        state: the state of the whole model that is expected.
        optimizer: this worker's optimizer, and through it those that it wraps.
        parameters: the worker's parameters, or parts of them, by the model's names.
        cut: gives the part of a whole tensor that this worker has.
    """
    for member, memory in zip(_find_optimizers(optimizer), state.memories, strict=True):
        for name, parameter in parameters.items():
            expected, actual = memory.entries.get(name, {}), member.state.get(parameter, {})
            fit = _make_fit(cut, name, state.tensors[name].shape)
            for key in expected.keys() | actual.keys():
                yield name, str(key), _value_difference(expected.get(key), actual.get(key), fit)
        for group, options in zip(member.param_groups, memory.options, strict=True):
            for key, value in options.items():
                yield "", key, _value_difference(value, group.get(key), lambda tensor: tensor)


def _value_difference(expected: Any, actual: Any, fit: Callable[[Tensor], Tensor | None]) -> float:
    if isinstance(expected, Tensor):
        part = fit(expected)
        if part is None:
            return 0.0
        return max_difference(part, actual) if isinstance(actual, Tensor) else math.inf
    if isinstance(expected, (int, float)) and isinstance(actual, (int, float)):
        difference = 0.0 if expected == actual else abs(expected - actual)
        return difference if difference == difference else math.inf
    if isinstance(expected, dict):
        keys = expected.keys() | (actual.keys() if isinstance(actual, dict) else set())
        return (
            max((_value_difference(expected.get(k), actual.get(k), fit) for k in keys), default=0.0)
            if actual
            else math.inf
        )
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return math.inf
        return max((_value_difference(a, b, fit) for a, b in zip(expected, actual, strict=True)), default=0.0)
    return 0.0 if type(expected) is type(actual) else math.inf


def measure_memory_sizes(*states: TrainingState) -> dict[tuple[str, str], float]:
    """Return the largest number of every entry over some states, by parameter ("" for options) and key."""
    sizes: dict[tuple[str, str], float] = {}
    for memory in (memory for state in states for memory in state.memories):
        rows = [*memory.entries.items(), *(("", options) for options in memory.options)]
        for name, entries in rows:
            for key, value in entries.items():
                sizes[name, str(key)] = max(sizes.get((name, str(key)), 0.0), _value_size(value))
    return sizes


def _value_size(value: Any) -> float:
    """Return the largest number in an entry, which may be nested."""
    leaves = [leaf for leaf in flatten_nested(value)[0] if isinstance(leaf, (Tensor, int, float))]
    return max((max_magnitude(leaf) if isinstance(leaf, Tensor) else abs(float(leaf)) for leaf in leaves), default=0.0)
