"""What the user's Python holds in a training is told to the process that replays its steps, into the same objects."""

from __future__ import annotations

import contextvars
import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polylane.runtime.plain_data.serialization import decode, encode
from polylane.verify.audit.audit_settings import AuditSettings

Held = SimpleNamespace


class Slots:
    __slots__ = ("level", "seen")

    def __init__(self) -> None:
        self.level, self.seen = 1.0, [1]


def hold() -> Held:
    """Return what a loss may refer to, of every kind that can be told."""
    frozen = nn.Linear(2, 2)
    return Held(
        number=1.0, pair=(1, 2), items=[1, [2]], table={"a": 1}, recent=deque([1], 3), names={"a"}, array=np.ones(3),
        tensor=torch.ones(2), tensors=[torch.ones(2)], none=None, slots=Slots(),
        variable=contextvars.ContextVar("variable", default=0), teacher=frozen, inner=Held(value=1),
    )  # fmt: skip


def watch(held: Held) -> AuditSettings:
    """Return the settings of a training whose loss refers to ``held``; no captured run has read any."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert held.number
        return model(batch).square().mean() + held.teacher(batch).mean().detach()

    graph = Held(code=Held(effects=None))
    training: Any = Held(
        model=nn.Linear(2, 2),
        objectives={"loss": Held(loss=loss, given_loss=loss)},
        partitions={"loss": Held(graph=graph)},
    )
    return AuditSettings(training, "loss")


def exchange(held: Held, name: str, value: Any) -> None:
    setattr(held, name, value)


CHANGES: dict[str, tuple[Callable[[Held], Any], Callable[[Held], Any]]] = {
    "number": (lambda h: exchange(h, "number", 2.0), lambda h: h.number),
    "pair": (lambda h: exchange(h, "pair", (1, 3)), lambda h: h.pair),
    "list": (lambda h: h.items.append(2), lambda h: h.items),
    "nested list": (lambda h: h.items[1].append(2), lambda h: h.items),
    "another list": (lambda h: exchange(h, "items", [5]), lambda h: h.items),
    "value of a dict": (lambda h: h.table.update(a=2), lambda h: h.table),
    "new key": (lambda h: h.table.update(b=[1]), lambda h: h.table),
    "removed key": (lambda h: h.table.clear(), lambda h: h.table),
    "deque": (lambda h: h.recent.extend([2, 3, 4]), lambda h: list(h.recent)),
    "set": (lambda h: h.names.add("b"), lambda h: h.names),
    "array": (lambda h: exchange(h, "array", h.array.__imul__(2)), lambda h: h.array.tolist()),
    "tensor": (lambda h: h.tensor.data.mul_(2), lambda h: h.tensor.tolist()),
    "another tensor": (lambda h: exchange(h, "tensor", torch.zeros(3)), lambda h: h.tensor.tolist()),
    "tensor of a list": (lambda h: h.tensors[0].mul_(2), lambda h: h.tensors[0].tolist()),
    "none": (lambda h: exchange(h, "none", {"a": 1}), lambda h: h.none),
    "slots": (lambda h: exchange(h.slots, "level", 2.0), lambda h: h.slots.level),
    "context variable": (lambda h: h.variable.set(3), lambda h: h.variable.get()),
    "weights of a teacher": (lambda h: h.teacher.weight.data.mul_(2), lambda h: h.teacher.weight.tolist()),
    "object": (lambda h: exchange(h.inner, "value", 2), lambda h: h.inner.value),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told(name: str) -> None:
    torch.manual_seed(0)
    here = hold()
    torch.manual_seed(0)
    there = hold()
    training, auditor = watch(here), watch(there)
    change, read = CHANGES[name]
    before = copy.deepcopy(read(there))
    objects = there.items, there.table, there.recent, there.array, there.tensor, there.tensors[0]
    change(here)
    auditor.write_values(decode(encode(training.read_values())))
    assert read(there) == read(here) != before
    if "another" not in name:
        now = there.items, there.table, there.recent, there.array, there.tensor, there.tensors[0]
        assert all(a is b for a, b in zip(objects, now, strict=True))


def test_what_was_not_changed_is_not_told() -> None:
    """The auditor's own may have moved: a wrong graph would not move what it should."""
    held = hold()
    training, auditor = watch(held), watch(held)
    values = training.read_values()
    held.items.append(7)
    held.number = 2.0
    auditor.write_values(values)
    assert held.items[-1] == 7
    assert held.number == 2.0


def test_a_function_or_a_weight_is_not_told() -> None:
    held = hold()
    held.weights, held.function = [nn.Parameter(torch.ones(2))], max
    training = watch(held)
    before = training.read_values().keys()
    held.weights[0].data.mul_(2)
    held.function = min
    assert training.read_values().keys() == before
