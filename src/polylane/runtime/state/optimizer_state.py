"""Optimizer state: an optimizer's tensors by parameter, its groups' options and its scheduler, saved and restored.

A state tensor of its parameter's shape (a momentum) is cut as the parameter is, and fits any other cut of it. One of
another shape (a factor of a second moment) belongs to the part of the parameter that it was made for. Numbers, texts
and containers of them are plain; tensors inside of containers are named by their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.optimizer_parts import BASE_ATTRIBUTES, find_tensors, own_attributes
from polylane.compile.optimizer_sequence import optimizers_in, schedulers_in
from polylane.errors import PolylaneError
from polylane.optim.averaging import DECAY, IS_AVERAGED
from polylane.runtime.state.held_tensors import Region, WorkerState, whole_region
from polylane.runtime.state.plain_values import SCALARS, TENSOR, from_plain, to_plain

_GROUP_NAMES = ("params", "param_names")  # options of a group that are its parameters, which have their own states

# Reads a worker's part of a saved tensor: its global name and region, and the tensor that is filled.
Fill = Callable[[str, Region, Tensor], None]


@dataclass(frozen=True)
class OptimizedPart:
    """The tensor that an optimizer updates for one parameter, and which part of the parameter it is."""

    parameter: nn.Parameter
    region: Region


def collect_optimizer(
    objective: str, optimizer: torch.optim.Optimizer, parts: Mapping[str, OptimizedPart], variant: str = ""
) -> WorkerState:
    """Return the state of an optimizer's parameters.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the user's optimizer on this worker.
        parts: what it steps on, by the parameter's canonical name.
        variant: ending of names for state that is one replica's own.

    Raises:
        PolylaneError: a state is of a type that no file has.
    """
    worker_state = WorkerState()
    for name, part in parts.items():
        if not (state := optimizer.state.get(part.parameter)):
            continue
        prefix = f"optimizer/{objective}/{name}"
        skeleton = {}
        for key, value in state.items():
            skeleton[key] = split_state(value, f"{prefix}/{key}", part, variant, worker_state, f"{name}: state {key}")
        worker_state.plain[prefix + variant] = skeleton
    return worker_state


def split_state(value: Any, path: str, part: OptimizedPart, variant: str, state: WorkerState, text: str) -> Any:
    """Return a value that belongs to a parameter with tensors replaced by their names, which are added to the state."""
    if isinstance(value, Tensor):
        is_alike = value.shape == part.parameter.shape
        region = part.region if is_alike and value.dim() else whole_region(value.shape)
        # What has the shape of all of a parameter is known by the parameter's name; else by the part that it is for.
        name = path + ("" if (is_alike or not value.dim()) else part.region.label) + variant
        state.add(name, region, value)
        # Adam counts its steps on the CPU, also for parameters on a GPU: a resumed run puts it where it was.
        on_device = value.device == part.parameter.device
        return {TENSOR: [name, str(value.dtype), None if is_alike and value.dim() else list(value.shape), on_device]}
    if isinstance(value, Mapping):
        return {key: split_state(item, f"{path}/{key}", part, variant, state, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(split_state(e, f"{path}/{i}", part, variant, state, text) for i, e in enumerate(value))
    if isinstance(value, SCALARS):
        return value
    raise PolylaneError(
        f"the optimizer's state of {text} is a {type(value).__name__}, which no checkpoint can hold: it may be made of "
        "tensors, numbers and texts"
    )


def restore_optimizer(
    objective: str,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, OptimizedPart],
    plain: Mapping[str, Any],
    fill: Fill,
    variant: str = "",
) -> None:
    """Give an optimizer the state of a checkpoint, in this worker's own cut.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the user's optimizer on this worker.
        parts: what it steps on, by the parameter's canonical name.
        plain: the checkpoint's plain state.
        fill: reads this worker's part of a tensor.
        variant: ending of names for state that is one replica's own.

    Raises:
        PolylaneError: a state belongs to another part of its parameter than this worker has.
    """
    for name, part in parts.items():
        prefix = f"optimizer/{objective}/{name}"
        skeleton = find_variant(plain, prefix, variant)
        # What the optimizer has computed for a trial, or before this load, must not stay where the checkpoint has none.
        optimizer.state.pop(part.parameter, None)
        if skeleton is not None:
            optimizer.state[part.parameter] = {
                key: join_state(value, part, variant, fill, name) for key, value in skeleton.items()
            }


def find_variant(plain: Mapping[str, Any], path: str, variant: str) -> Any:
    """Return a path's value of one replica; where that replica was not there, the plain one or the first replica's."""
    if path + variant in plain:
        return plain[path + variant]
    if path in plain:
        return plain[path]
    return plain.get(f"{path}@0")


def join_state(value: Any, part: OptimizedPart, variant: str, fill: Fill, parameter: str) -> Any:
    """Return the value of which :func:`split_state` has returned this, in the cut of this worker's part."""
    if isinstance(value, Mapping) and TENSOR in value:
        name, dtype, shape, on_device = value[TENSOR]
        # Saved by one replica, perhaps, and read by another: the ending is that of the reader.
        name = name.partition("@")[0]
        device, kind = part.parameter.device if on_device else "cpu", getattr(torch, dtype.removeprefix("torch."))
        if shape is None:
            tensor = torch.empty_like(part.parameter, dtype=kind, device=device, requires_grad=False)
            fill(name + variant, part.region, tensor)
            return tensor
        if shape and name.partition("#")[1] + name.partition("#")[2] != part.region.label:
            raise PolylaneError(
                f"the optimizer's state {name} is of another part of {parameter} than this worker updates: such a "
                "state, which does not have the parameter's shape, fits plans that cut the parameter alike"
            )
        tensor = torch.empty(shape, dtype=kind, device=device)
        fill(name + variant, whole_region(tensor.shape), tensor)
        return tensor
    if isinstance(value, Mapping):
        return {key: join_state(item, part, variant, fill, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(join_state(item, part, variant, fill, parameter) for item in value)
    return value


# ---- options and schedulers ------------------------------------------------------------------------------------------


def collect_options(objective: str, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return the plain state that all workers share: options of groups, the scheduler's state.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the user's optimizer on this worker.
        scheduler: the user's scheduler of it, or None.

    Raises:
        PolylaneError: an option or a scheduler's state is of a type that no file has.
    """
    groups = [
        {
            key: to_plain(value, f"optimizer.param_groups[{i}][{key!r}]")
            for key, value in group.items()
            if key not in _GROUP_NAMES and not is_beside_state(key, value)
        }
        for i, group in enumerate(optimizer.param_groups)
    ]
    kinds = [_describe_kinds(optimizers_in(optimizer)), _describe_kinds(schedulers_in(scheduler))]
    options: dict[str, Any] = {f"groups/{objective}": groups, f"kinds/{objective}": kinds}
    if scheduler is not None and hasattr(scheduler, "state_dict"):
        options[f"scheduler/{objective}"] = to_plain(scheduler.state_dict(), f"{type(scheduler).__name__}.state_dict()")
    return options


def collect_counts(objective: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers and texts that are attributes of an optimizer, such as a count of its steps."""
    return {f"attributes/{objective}": dict(_plain_attributes(optimizer))}


def is_beside_state(key: str, value: Any) -> bool:
    """Return whether an option of a group is no option, but what an optimizer keeps: a list or mapping of tensors."""
    return key not in _GROUP_NAMES and not isinstance(value, Tensor) and any(item.dim() for item in find_tensors(value))


def _plain_attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes that an optimizer's own class has set, such as a count of steps.

    Of the second and later of several optimizers with their number before the name.
    """
    for number, member in enumerate(optimizers_in(optimizer)):
        for name, value in own_attributes(member):
            if isinstance(value, bool | int | float | str | NoneType):
                yield f"{number}/{name}" if number else name, value


def _describe_kinds(objects: Sequence[Any]) -> str | None:
    """Return the classes of optimizers or schedulers as one text; None where there are none."""
    return ", ".join(type(item).__qualname__ for item in objects) or None


def restore_options(objective: str, optimizer: torch.optim.Optimizer, scheduler: Any, plain: Mapping[str, Any]) -> None:
    """Set options, attributes and the scheduler's state to those of a checkpoint.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the user's optimizer on this worker.
        scheduler: the user's scheduler of it, or None.
        plain: the checkpoint's plain state.

    Raises:
        PolylaneError: it was saved with other groups, or with a scheduler where there is none now.
    """
    _refuse_other_kinds(objective, optimizer, scheduler, plain)
    groups = plain.get(f"groups/{objective}")
    if groups is None or len(groups) != len(optimizer.param_groups):
        has = "none" if groups is None else str(len(groups))
        raise PolylaneError(
            f"has {has} of the optimizer's groups, and there are {len(optimizer.param_groups)}: it is "
            "of another optimizer"
        )
    _refuse_other_averages(optimizer, groups, plain.get(f"attributes/{objective}", {}))
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in _GROUP_NAMES:
                continue
            value = from_plain(value)
            present = group.get(key)
            if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
                present.copy_(value)  # a scheduler, or a captured step, may hold this very tensor
            else:
                group[key] = value
    members = optimizers_in(optimizer)
    for path, value in plain.get(f"attributes/{objective}", {}).items():
        number, _, name = path.rpartition("/")
        member = members[int(number)] if number.isdecimal() and int(number) < len(members) else members[0]
        if name not in BASE_ATTRIBUTES and not hasattr(type(member), name):  # never a method, whatever the file says
            vars(member)[name] = value
    saved = plain.get(f"scheduler/{objective}")
    if scheduler is not None and hasattr(scheduler, "load_state_dict"):
        if saved is None:
            raise PolylaneError(f"has no state of a scheduler, expected a {type(scheduler).__qualname__}'s")
        scheduler.load_state_dict(from_plain(saved))


def _refuse_other_averages(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], attributes: Mapping[str, Any]
) -> None:
    """Refuse averages of the weights (--ema) where the optimizer keeps none, or others: it would train on from them.

    Args:
        optimizer: the user's optimizer on this worker.
        groups: the saved options of its groups.
        attributes: the saved plain attributes of all optimizers.
    """
    saved = sorted({value for name, value in attributes.items() if name.rpartition("/")[2] == DECAY})
    decays = sorted({vars(member)[DECAY] for member in optimizers_in(optimizer) if DECAY in vars(member)})
    if saved != decays and any(IS_AVERAGED in group for group in groups):
        values, rates = (", ".join(f"{decay:g}" for decay in decays_of) for decays_of in (saved, decays))
        raise PolylaneError(
            f"has averages of weights with a decay of {values}, and this training's optimizer keeps "
            f"{f'averages with {rates}' if decays else 'none'}: give --ema {values}, or averaged_optimizer this decay"
        )


def _refuse_other_kinds(
    objective: str, optimizer: torch.optim.Optimizer, scheduler: Any, plain: Mapping[str, Any]
) -> None:
    """Refuse state that another class of optimizer or scheduler has saved, which would be taken for one's own."""
    saved = plain.get(f"kinds/{objective}")
    objects = optimizers_in(optimizer), schedulers_in(scheduler)
    for role, saved_kind, members in zip(("optimizer", "scheduler"), saved or (), objects, strict=False):
        kind = _describe_kinds(members)
        if saved_kind != kind:
            raise PolylaneError(
                f"was saved with {_name_kind(saved_kind, role)}, expected {_name_kind(kind, role)}: it is of "
                "another training"
            )


def _name_kind(kind: str | None, role: str) -> str:
    return f"no {role}" if kind is None else f"the {role} {kind}"
