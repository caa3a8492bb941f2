"""What the user's Python holds in a training is told to the process that replays its steps, into the same objects."""

from __future__ import annotations

import contextvars
import copy
import mmap
import multiprocessing
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


MORE: dict[str, tuple[Callable[[Held], Any], Callable[[Held], Any]]] = {
    "numpy's number": (lambda h: exchange(h, "number", np.float64(0.5)), lambda h: h.number),
    "another array": (lambda h: exchange(h, "array", np.array([0.2, 0.3])), lambda h: h.array.tolist()),
    "another array of the old form": (lambda h: exchange(h, "array", np.zeros(3)), lambda h: h.array.tolist()),
    "another deque": (lambda h: exchange(h, "none", deque([1], 2)), lambda h: (h.none and list(h.none), h.none)),
    "tensor of a tuple": (lambda h: h.tuple[0].mul_(2), lambda h: h.tuple[0].tolist()),
    "integer key": (lambda h: h.numbers.update({0: 2.0}), lambda h: h.numbers),
    "new integer key": (lambda h: h.numbers.update({1: 2.0}), lambda h: h.numbers),
    "bytes": (lambda h: h.bytes.extend(b"2"), lambda h: bytes(h.bytes)),
    "order of keys": (lambda h: exchange(h, "table", {"b": 1, "a": 1}), lambda h: list(h.table)),
    "object in a list": (lambda h: h.objects.append(h.objects[0]), lambda h: len(h.objects)),
    "one of two of a name": (lambda h: exchange(h.objects[1], "value", 5), lambda h: [o.value for o in h.objects[:2]]),
    "undefined": (lambda h: exchange(h, "number", float("nan")), lambda h: str(h.number)),
    "beside what cannot be told": (lambda h: h.items.append(3), lambda h: h.items),
}


@pytest.mark.parametrize("name", MORE)
def test_a_change_of_another_kind_is_told(name: str) -> None:
    held = [hold(), hold()]
    for each in held:
        each.tuple, each.numbers, each.bytes = (torch.ones(2),), {0: 1.0}, bytearray(b"1")
        each.objects, each.complex, each.text_array = [Held(value=1), Held(value=1)], 1j, np.array(["a"])
        each.swapped, each.cyclic = np.ones(2, ">f4"), []
        each.cyclic.append({"again": each.cyclic})
    here, there = held
    training, auditor = watch(here), watch(there)
    change, read = MORE[name]
    before = copy.deepcopy(read(there))
    change(here)
    values = decode(encode(training.read_values()))
    assert training.find_unreadable_change(values) is None
    auditor.write_values(values)
    assert read(there) == read(here) != before


def test_an_object_that_took_anothers_place_leaves_the_other_alone() -> None:
    here, there = hold(), hold()
    for each in (here, there):
        each.inner.mask = each.mask = torch.ones(3)
    training, auditor = watch(here), watch(there)
    here.mask = torch.zeros(3)
    auditor.write_values(decode(encode(training.read_values())))
    assert there.mask.tolist() == [0, 0, 0]
    assert there.inner.mask.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).share_memory_(),
        multiprocessing.Value("d", 1.0),
        mmap.mmap(-1, 4),
        multiprocessing.RawValue("d", 1.0),
    ],
)
def test_memory_that_processes_share_is_not_written_and_ends_audits(value: Any) -> None:
    """The auditor has the same memory: it would write into the training."""
    held = hold()
    held.shared = value
    training = watch(held)
    assert training.find_unreadable_change(training.read_values()) is None
    if isinstance(value, Tensor):
        value.add_(1)
    elif isinstance(value, mmap.mmap):
        value[0] = 5
    else:
        value.value = 2.0
    values = training.read_values()
    assert not any("shared" in label for label in values)
    assert "shared" in (training.find_unreadable_change(values) or "")


def test_what_an_exchange_cannot_tell_ends_audits_with_its_name() -> None:
    """A function in the place of a list whose inside was told before."""
    held = hold()
    training = watch(held)
    held.items.append(3)
    assert training.find_unreadable_change(training.read_values()) is None
    training._constants = {*training._places}  # as if a step read them all
    held.items = max
    assert "items" in (training.find_unreadable_change(training.read_values()) or "")


def test_a_number_that_becomes_something_else_ends_audits() -> None:
    held = hold()
    training = watch(held)
    training._constants = {*training._places}  # as if a step read them all
    held.number = Slots()
    assert "number" in (training.find_unreadable_change(training.read_values()) or "")


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


def test_code_under_a_new_name_ends_audits() -> None:
    """An object's own method hides its class's, and a hook is a function under a new key."""
    held = hold()
    training = watch(held)
    held.inner.forward = max
    assert "inner.forward" in (training.find_unreadable_change(training.read_values()) or "")
