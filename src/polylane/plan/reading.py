"""From a plan file to plain data; and what pydantic finds wrong with that, as a sentence about the file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from polylane.cluster.mapping import EachKeyOnce
from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MOST_SHOWN = 60  # characters of a value that is wrong


def read(path: str | Path, what: str = "plan") -> dict[Any, Any]:
    """The mapping in a YAML file, with the key "stages"; ``what`` errors call it.

    Raises:
        PolylaneError: it cannot be read, is not YAML or no mapping, or a key is there twice.
    """
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), EachKeyOnce)
    except OSError as error:
        raise PolylaneError(f"{what} {path}: {error.strerror or error}") from error
    except PolylaneError as error:
        raise PolylaneError(f"{what} {path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PolylaneError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise PolylaneError(f"{what} {path} is not a mapping with the key stages")
    return data


def sentence(error: ErrorDetails, known: Callable[[Sequence[int | str]], Sequence[str]]) -> str:
    """What is wrong with one value of a plan file, and what it must be.

    Args:
        error: one of pydantic's.
        known: the keys that a mapping may have, by its own place in the file.
    """
    where, kind = error["loc"], error["type"]
    key = ".".join(str(part) for part in where if part != "[key]")
    if kind in ("placement", "pairs", "sync"):
        return f"{key}{' ' if error['msg'].startswith('must be') else ': '}{error['msg']}"
    if where[-1] == "[key]" and kind == "literal_error":
        axes = _names(error)
        return f"{key} is no axis; known there are {', '.join(axes)}{_hint(str(where[-2]), axes)}"
    if kind in ("extra_forbidden", "invalid_key"):
        keys = known(where[:-1])
        return f"{key} is not a key of a plan; known there are {', '.join(keys)}{_hint(str(where[-1]), keys)}"
    if kind == "missing":
        return f"{key} is missing"
    given = "empty" if error["input"] is None else repr(error["input"])
    return f"{key} must be {_wanted(error)}, not {given if len(given) <= MOST_SHOWN else given[:MOST_SHOWN] + '…'}"


_WANTED = {
    "int": "a whole number",
    "string": "a name",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping of keys and values",
    "model": "a mapping of keys and values",
    "float": "a number",
    "bool": "true or false",
}


_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}


def _wanted(error: ErrorDetails) -> str:
    """What must stand where something else does."""
    kind, given = error["type"], error["input"]
    if kind == "literal_error":
        *names, last = _names(error)
        return f"{', '.join(names)} or {last}" if names else last
    bound = next((words for name, words in _BOUNDS.items() if kind == name), None)
    if bound is not None:
        limit = error["ctx"][_LIMITS[kind]]
        return "at least 1" if (kind, limit) == ("greater_than", 0) and isinstance(limit, int) else f"{bound} {limit:g}"
    if kind == "finite_number":
        return "a number"
    if kind == "union_tag_not_found":
        return "a mapping with the key kind"
    if kind == "union_tag_invalid":
        return f"of a kind that is known: {str(error['ctx']['expected_tags']).replace(chr(39), '')}"
    if kind.startswith("string") and isinstance(given, (int, float)):
        return f"a name, in quotes where it reads like a number ('{given}')"
    return _WANTED.get(kind.partition("_")[0], "something else")


def _names(error: ErrorDetails) -> list[str]:
    """What pydantic lists as ``'naive', 'afab' or '1f1b'``."""
    listed = str(error.get("ctx", {}).get("expected", ""))
    return [name.strip("' ") for name in listed.replace(" or ", ",").split(",")]


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
