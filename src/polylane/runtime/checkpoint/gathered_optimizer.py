"""Gathered optimizer: an optimizer's state for whole parameters, from the parts that workers have, and back into these.

``state_dict()`` and ``load_state_dict()`` are the optimizer's own: they are called while it has whole parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.checkpoint.read_tensors import view_piece
from polylane.checkpoint.regions import Rectangle
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.save import Gather, WritableRectangle, assign_rectangles, cut_shards
from polylane.runtime.state.held_tensors import HeldTensor, Region, whole_region
from polylane.runtime.state.optimizer_state import OptimizedPart, collect_optimizer, restore_optimizer


@dataclass(frozen=True)
class ParameterOrder:
    """The parameters of an optimizer as the script has given them, which workers have parts of, or not at all.

    Attributes:
        names: names of the parameters of each group, in order.
        given_names: of each group, what ``param_names`` it was given; None for none.
        forms: shape, dtype and device of each parameter, by name.
    """

    names: tuple[tuple[str, ...], ...]
    given_names: tuple[Any, ...]
    forms: Mapping[str, tuple[torch.Size, torch.dtype, torch.device]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> ParameterOrder:
        """Return the order of an optimizer that has whole parameters.

        Args:
            optimizer: one of the script's, before any worker takes its part.
            names: names of all parameters, by their ids.

        Raises:
            PolylaneError: it has a parameter without a name.
        """
        groups, forms = optimizer.param_groups, dict[str, Any]()
        if any(id(parameter) not in names for group in groups for parameter in group["params"]):
            raise PolylaneError(
                f"the {type(optimizer).__name__} has parameters that are not in a model any more, or never were: give "
                "prepare() the models as they are trained, and replace no module behind it"
            )
        for parameter in (parameter for group in groups for parameter in group["params"]):
            forms[names[id(parameter)]] = parameter.shape, parameter.dtype, parameter.device
        return cls(
            tuple(tuple(names[id(parameter)] for parameter in group["params"]) for group in groups),
            tuple(group.get("param_names") for group in groups),
            forms,
        )

    def stand_ins(self) -> dict[str, nn.Parameter]:
        """Return parameters of the whole shapes that take no memory, by name."""
        return {
            name: nn.Parameter(torch.empty((), dtype=dtype, device=device).expand(shape), dtype.is_floating_point)
            for name, (shape, dtype, device) in self.forms.items()
        }


@contextmanager
def having_whole_parameters(
    optimizer: torch.optim.Optimizer, order: ParameterOrder, state: Mapping[str, Any]
) -> Iterator[dict[str, nn.Parameter]]:
    """Context manager: an optimizer has stand-ins for its whole parameters; the groups' options that it gets stay.

    Args:
        optimizer: the optimizer, which has this worker's parts.
        order: its parameters as the script has given them.
        state: what it keeps for each of these, by name.

    Yields:
        The stand-ins by name, by which the optimizer's ``state`` is ordered inside.
    """
    stand_ins, local_state = order.stand_ins(), optimizer.state
    groups: list[dict[str, Any]] = optimizer.param_groups
    parts: list[dict[str, Any]] = [
        {key: group[key] for key in ("params", "param_names") if key in group} for group in groups
    ]
    for group, names, given_names in zip(optimizer.param_groups, order.names, order.given_names, strict=True):
        group["params"] = [stand_ins[name] for name in names]
        if given_names is not None:
            group["param_names"] = given_names
    optimizer.state = defaultdict(dict, {stand_ins[name]: value for name, value in state.items()})
    try:
        yield stand_ins
    finally:
        for group, part in zip(optimizer.param_groups, parts, strict=True):
            group |= part
        optimizer.state = local_state


def gather_state(
    objective: str,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, OptimizedPart],
    order: ParameterOrder,
    rank: int,
    gather: Gather,
) -> dict[str, Any]:
    """Return what an optimizer keeps for each parameter, whole and by name, on every worker; collective.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the optimizer, which has this worker's parts.
        parts: what it steps on here, by name.
        order: its parameters as the script has given them.
        rank: rank of this worker.
        gather: returns every worker's plain value, by rank.

    Raises:
        PolylaneError: a state is of a type that workers cannot send, or has not its parameter's shape and was cut.
    """
    state = collect_optimizer(objective, optimizer, parts)
    shards, rectangles = cut_shards(state)
    by_rank = [
        [WritableRectangle(*rectangle) for rectangle in answer] for answer in gather([tuple(r) for r in rectangles])
    ]
    assigned = assign_rectangles(by_rank)
    is_mine = set(assigned[rank])
    sent = [view_piece(s.held.local, s.piece).detach().cpu().contiguous() for i, s in enumerate(shards) if i in is_mine]
    answers = gather((state.plain, sent))
    tensors, plain = dict[str, Tensor](), dict[str, Any]()
    for sender, (sender_plain, sender_tensors) in enumerate(answers):
        plain |= sender_plain
        for index, tensor in zip(assigned[sender], sender_tensors, strict=True):
            rectangle = by_rank[sender][index]
            target = tensors.setdefault(rectangle.name, torch.empty(rectangle.shape, dtype=tensor.dtype))
            target[_slices(rectangle.offsets, rectangle.lengths)] = tensor
    stand_ins = order.stand_ins()
    parts = {name: OptimizedPart(parameter, whole_region(parameter.shape)) for name, parameter in stand_ins.items()}

    def fill(name: str, region: Region, local: Tensor) -> None:
        if name not in tensors:
            raise PolylaneError(f"the optimizer's state {name} is in parts that make up no whole")
        target = HeldTensor(name, region, local).as_real()
        target.local.copy_(tensors[name].view(target.local.shape))

    holder = _StateHolder()
    restore_optimizer(objective, holder, parts, plain, fill)  # type: ignore[arg-type]
    return {name: holder.state[stand_in] for name, stand_in in stand_ins.items() if stand_in in holder.state}


def cut_state(state: Mapping[str, Any], part: OptimizedPart) -> dict[str, Any]:
    """Return this worker's part of what an optimizer keeps for a whole parameter.

    Args:
        state: what it keeps, by key.
        part: what this worker steps on for the parameter.

    Raises:
        PolylaneError: a tensor has not the parameter's shape, and the worker has a part of the parameter.
    """
    return {key: _cut_value(value, key, part) for key, value in state.items()}


def _cut_value(value: Any, key: str, part: OptimizedPart) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim():
        if tuple(value.shape) == part.region.shape:
            local = value.new_empty(part.region.local_shape)
            everything = Rectangle((0,) * value.dim(), part.region.shape)
            for piece in part.region.pieces:
                view_piece(local, piece).copy_(value[piece.rectangle.slices_in(everything)])
            return local.view(part.parameter.shape)
        if not part.region.is_whole:
            raise PolylaneError(
                f"the optimizer's state {key} of shape {list(value.shape)} is of a whole parameter of shape "
                f"{list(part.region.shape)}, of which this plan cuts parts: load it under a plan that does not"
            )
    return value.clone()


class _StateHolder:
    """What :func:`restore_optimizer` fills, in place of an optimizer."""

    def __init__(self) -> None:
        self.state = dict[nn.Parameter, Any]()


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))
