"""Digests of what a user's Python keeps: equal where nothing has changed, different where anything has."""

from __future__ import annotations

from typing import Any

import pytest

from polylane.graph.own_state import Digests

NAMES = "abcdefgh"


class Fields:
    """An object of the user's own, with a list in every attribute."""

    def __init__(self, changed: str = "") -> None:
        for name in NAMES:
            setattr(self, name, [name, name == changed])


def digest(value: Any) -> Any:
    return Digests(()).of(value)


@pytest.mark.parametrize("changed", NAMES)
def test_a_change_of_any_attribute_is_seen(changed: str) -> None:
    """What is only made on the way, one after the other at the same address, is not taken for the same again."""
    assert digest(Fields(changed)) != digest(Fields())


def test_functions_are_told_by_what_they_enclose_whatever_was_at_their_address() -> None:
    def functions(last: int) -> list[Any]:
        def make(each: int) -> Any:
            return lambda x, factor=each: x * factor * each

        return [make(each) for each in (*range(20), last)]

    equal = functions(1)
    assert all(digest(functions(1)) == digest(equal) for _ in range(20))
    assert digest(functions(2)) != digest(equal)
