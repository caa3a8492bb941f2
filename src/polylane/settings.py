"""Settings as text: parses ``key=value,key=value``, and single values by the type of their default."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from polylane.errors import PolylaneError, format_value, suggest_name

MOST_DIGITS = 40  # of a number

# The exceptions of ast.literal_eval for text that is no literal, deep nesting and null bytes included.
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def split_pairs(pieces: Iterable[str], keys: Sequence[str], example: str) -> dict[str, str]:
    """Split pieces of the form key=value into a dict.

    Args:
        pieces: pieces of one line, which was split at commas.
        keys: all keys that are known.
        example: a correct piece, shown in errors.

    Raises:
        PolylaneError: a piece is not of that form, or its key is unknown or there already; naming the piece or key.
    """
    values: dict[str, str] = {}
    for piece in pieces:
        key, equals, value = (word.strip() for word in piece.partition("="))
        if not equals or not value:
            raise PolylaneError(f"{format_value(piece.strip())} is not of the form key=value, as in {example}")
        if key not in keys:
            raise PolylaneError(
                f"unknown key {format_value(key)}, known are {', '.join(keys)}{suggest_name(key, keys)}"
            )
        if key in values:
            raise PolylaneError(f"{key} is given twice")
        values[key] = value
    return values


def parse_whole(name: str, text: str) -> int:
    """Parse a whole number of plain digits.

    Raises:
        PolylaneError: it has more digits than any number needs; int() takes quadratic time, and refuses thousands.
        ValueError: it is no whole number.
    """
    if len(text) > MOST_DIGITS:
        raise PolylaneError(f"{name}: {format_value(text)} has {len(text):,} digits, and {MOST_DIGITS} are the most")
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


def parse_setting(text: str, default: Any) -> Any:
    """Parse text as a value of the default's type; for a default of None, as a Python literal, else it stays text.

    Raises:
        ValueError: "takes a whole number, and 'abc' is not one": the end of a sentence that starts with the argument.
    """
    if isinstance(default, str):  # as it is, without quotes: "4" stays text where the default is text
        return text
    if default is None:
        return _parse_literal(text)
    if not isinstance(default, (bool, int, float, tuple, list, dict)):
        raise ValueError(f"cannot be set from text: its default is {format_value(default)}")
    try:
        if isinstance(default, bool):  # before int, of which bool is a subclass
            return _parse_bool(text)
        if isinstance(default, (int, float)):
            return type(default)(text)
        if isinstance(default, (tuple, list)):
            return _parse_sequence(text, default)
        return _parse_dict(text)
    except _NO_LITERAL:
        raise ValueError(f"takes {_describe_type(default)}, and {format_value(text)} is not one") from None


def _parse_bool(text: str) -> bool:
    value = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.strip().lower() not in value:
        raise ValueError(text)
    return value[text.strip().lower()]


def _parse_literal(text: str) -> Any:
    """Parse a Python literal, such as ``0.1`` or ``None``; what is none is text."""
    try:
        return ast.literal_eval(text.strip())
    except _NO_LITERAL:
        return text


def _parse_dict(text: str) -> dict[Any, Any]:
    value = ast.literal_eval(text.strip())
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _parse_sequence(text: str, default: Sequence[Any]) -> Sequence[Any]:
    """Parse ``1,2`` or ``(1, 2)`` or ``[1, 2]`` into the default's type; items must have the type of the default's."""
    value = ast.literal_eval(text.strip()) if text.strip() else ()
    items = list(value) if isinstance(value, (tuple, list)) else [value]
    kinds = {type(item) for item in default}
    if kinds == {float}:
        items = [float(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in items]
    if len(kinds) == 1 and any(type(item) not in kinds for item in items):
        raise ValueError(text)
    return tuple(items) if isinstance(default, tuple) else items


def _describe_type(default: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", dict: "a dictionary such as {'a': 1}"}
    if isinstance(default, (tuple, list)):
        kinds = {type(item).__name__ for item in default}
        of = f" of {kinds.pop()}" if len(kinds) == 1 else ""
        return f"a list{of} such as {','.join(repr(item) for item in default) or '1,2'}"
    return next(words for kind, words in names.items() if isinstance(default, kind))
