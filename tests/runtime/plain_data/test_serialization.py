"""Plain values between workers: what comes back is what was given, and no bytes of a stranger's run anything."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polylane
from polylane.auto import plan_broadcast
from polylane.errors import PolylaneError
from polylane.observe.timeline import Span
from polylane.plan.plan import Plan
from polylane.runtime import step_result as result
from polylane.runtime.plain_data.serialization import decode, encode, serializable
from polylane.schedule.action import Action, ActionKind

assert plan_broadcast is not None and result is not None  # they say how plans and spans travel


class Colour(Enum):
    RED = 1


@serializable
@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any

    def __post_init__(self) -> None:
        if self.left == "refused":
            raise ValueError("not this one")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda each: (
        st.lists(each, max_size=4)
        | st.lists(each, max_size=4).map(tuple)
        | st.dictionaries(KEYS, each, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.builds(Pair, each, each)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_what_comes_back_is_what_was_given(value: Any):
    again = decode(encode(value))
    assert again == value
    assert repr(again) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | Pair)
    assert type(again) is type(value)
    assert encode(again) == encode(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 0.1, 5e-324])
def test_floats_come_back_to_the_bit(value: float):
    assert decode(encode(value)) == value
    assert math.copysign(1, decode(encode(value))) == math.copysign(1, value)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (5, 2)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]):
    value = torch.randint(0, 2, shape).to(dtype)
    other = torch.arange(7).double()[::2]  # not contiguous
    again = decode(encode({"a": value, "b": [other, value]}))
    for found in (again["a"], again["b"][1]):
        assert found.dtype == dtype
        assert found.shape == shape
        assert torch.equal(found, value)
    assert torch.equal(again["b"][0], other)


def test_a_single_element_may_have_any_stride():
    row = torch.arange(12.0).reshape(3, 4)[1:2, 2]
    assert row.is_contiguous() and row.stride() == (4,)
    assert torch.equal(decode(encode(row)), row)


def test_parameters_arrive_as_plain_tensors():
    found = decode(encode(torch.nn.Parameter(torch.ones(2))))
    assert type(found) is torch.Tensor
    assert not found.requires_grad


def test_spans_and_plans():
    span = Span(1, Action(ActionKind.SEND, 0, 2, "x", 1, gradient=True), 0.25, 0.5, bytes=7)
    (again,) = decode(encode([span]))
    assert again == span
    assert type(again.action.kind) is ActionKind
    plan = Plan.model_validate({"stages": [{"nodes": ("a", "b"), "devices": (0, 1), "mesh": {"data": 2}}]})
    assert decode(encode(plan)) == plan


@pytest.mark.parametrize("value", [object(), len, Colour.RED, {"a": [print]}, {torch.ones(1)}, Path("a")])
def test_what_is_not_plain_is_refused(value: Any):
    with pytest.raises(TypeError, match="cannot be sent to other workers"):
        encode(value)


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path, protocol: int):
    with pytest.raises(PolylaneError, match="cannot be read"):
        decode(pickle.dumps(Bomb(tmp_path / "ran"), protocol))
    assert not (tmp_path / "ran").exists()


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes):
    with pytest.raises(PolylaneError, match="cannot be read"):
        decode(data)


@settings(max_examples=300)
@given(VALUES, st.data())
def test_what_was_changed_on_its_way_is_a_value_or_refused(value: Any, data: Any):
    message = bytearray(encode([value, torch.arange(3)]))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    for each in (message, message[:cut]):
        try:
            decode(each)
        except PolylaneError as error:
            assert "cannot be read" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        '["o","os.system","touch ran"]',
        '["o","builtins.eval",["l"]]',
        '["__class__"]',
        "{}",
        '["x","float32",3]',
        '["x","torch.float32",-1]',
        '["x","torch.float32",1e30]',
        '["d",1]',
        '["d",["l"],1]',
        '["s",["l"]]',
        "[" * 100_000,
        "9" * 100_000,
    ],
)
def test_bad_forms_are_refused(text: str):
    data = encode(None)[:4] + len(text).to_bytes(8, "little") + text.encode()
    with pytest.raises(PolylaneError, match="cannot be read"):
        decode(data)


def test_a_class_that_refuses_its_fields_is_refused():
    with pytest.raises(PolylaneError, match="not this one"):
        decode(encode(Pair("refuses", 1)).replace(b"refuses", b"refused"))


SOURCES = sorted(Path(polylane.__file__).parent.rglob("*.py"))

# Between a worker and the process that started it: a pipe that both inherited, or a socket that the secret was said at.
PICKLE = {"worker_pipe.py", "torchrun.py", "failure.py", "auditor_process.py", "launch.py"}


def test_pickles_are_read_nowhere_else():
    reads = (
        "pickle.load",
        "torch.load(",
        "all_gather_object(",
        "gather_object(",
        "broadcast_object_list(",
        "recv_object",
    )
    for file in SOURCES:
        for line in file.read_text().splitlines():
            code = line.strip()
            if any(f"dist.{name}" in code for name in reads) or any(name in code for name in reads[:2]):
                assert file.name in PICKLE, f"{file}: {code}"
