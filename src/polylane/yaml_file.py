"""YAML files: from a file to a plain mapping, and from what pydantic finds wrong with one to a sentence for the user.

A sentence names the key by its place in the file (``stages.0.mesh.tensor``), says what must be there, and what is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from polylane.errors import PolylaneError, format_value, suggest_name

if TYPE_CHECKING:
    import pydantic
    from pydantic_core import ErrorDetails

# The parser in C is ten times as fast; not every build of PyYAML has it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MAPPING = "a mapping of keys and values"
_KEY = "[key]"  # how pydantic marks the place of a mapping's key, rather than of its value


# ---- reading ---------------------------------------------------------------------------------------------------------


class EachKeyOnce(_Loader):  # type: ignore[misc]
    """YAML in which no mapping has a key twice: of two values plain YAML keeps the last one, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    raise PolylaneError(f"{key.value} is there twice, on lines {lines[name]} and {line}: keep one")
                lines[name] = line
        return super().construct_mapping(node, deep)


def parse(text: str) -> dict[Any, Any]:
    """The mapping that a YAML text is.

    Raises:
        PolylaneError: it is not YAML, empty or no mapping, or a key is there twice.
    """
    try:
        data = yaml.load(text, EachKeyOnce)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PolylaneError(f"this is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        raise PolylaneError("there is nothing in it")
    if not isinstance(data, dict):
        raise PolylaneError(f"this is not {_MAPPING}")
    return data


def read(path: str | Path, kind: str = "") -> dict[Any, Any]:
    """The mapping in a YAML file.

    Args:
        path: of the file, as the user gave it.
        kind: what errors call the file, before its path: "plan".

    Raises:
        PolylaneError: as :func:`parse`, or it cannot be read; naming the file.
    """
    name = f"{kind} {path}" if kind else str(path)
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolylaneError(f"{name}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise PolylaneError(f"{name}: this is not YAML: {error}") from error
    except PolylaneError as error:
        raise PolylaneError(f"{name}: {error}") from error


# ---- what is wrong with it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileForm:
    """What one kind of file may say, for sentences about errors.

    Attributes:
        name: of the kind, with its article: "a plan".
        keys: the keys that a mapping may have, by its place in the file.
        figure: what must be in the place of a number, by its place: "a rate, such as 25 GB/s".
    """

    name: str
    keys: Callable[[Sequence[int | str]], Sequence[str]]
    figure: Callable[[Sequence[int | str]], str] = lambda place: "a number"


def first_error(error: pydantic.ValidationError) -> ErrorDetails:
    """The error to tell of: where a key is missing, one that nobody knows is mostly why."""
    return min(error.errors(), key=lambda each: each["type"] == "missing")


def error_sentence(error: ErrorDetails, form: FileForm, data: object) -> str:
    """What is wrong with one value of a file, and what it must be.

    Args:
        error: one of pydantic's.
        form: of the file.
        data: the file's mapping as the user wrote it.
    """
    at_key, kind = _KEY in error["loc"], error["type"]
    where = [part for part in error["loc"] if part != _KEY]
    key = ".".join(map(str, where)) or "the file"
    if kind == "missing":
        return f"{key} is missing"
    wrong_key = at_key and kind == "literal_error"
    if kind in ("extra_forbidden", "invalid_key") or wrong_key:
        known = _listed(error) if wrong_key else form.keys(where[:-1])
        return (
            f"{key} is not a key of {form.name}; known there are "
            f"{', '.join(known)}{suggest_name(str(where[-1]), known)}"
        )
    if kind == "value_error" or "url" not in error:  # a sentence of our own, from one of the models
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}{' ' if message.startswith('must be') else ': '}{message}"
    given = error["input"] if at_key else _at(data, where, error["input"])
    return f"{key} must be {_wanted(error, where, form)}, not {format_value(given)}"


# What must be in a place, by the first word of how pydantic calls the error.
_WANTED = {
    "int": "a whole number",
    "string": "a name",
    "tuple": "a list",
    "list": "a list",
    "dict": _MAPPING,
    "mapping": _MAPPING,
    "model": _MAPPING,
    "bool": "true or false",
    "finite": "a finite number",
}
# The same for a number that is too small or too large, and where pydantic has the limit.
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _wanted(error: ErrorDetails, where: Sequence[int | str], form: FileForm) -> str:
    """What must be where something else is."""
    kind, given, details = error["type"], error["input"], error.get("ctx", {})
    if kind == "literal_error":
        *names, last = _listed(error)
        return f"{', '.join(names)} or {last}" if names else last
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        limit = details[name]
        return "at least 1" if (kind, limit) == ("greater_than", 0) and isinstance(limit, int) else f"{words} {limit:g}"
    if kind == "union_tag_not_found":
        return "a mapping with the key kind"
    if kind == "union_tag_invalid":
        return f"of a kind that is known: {str(details['expected_tags']).replace(chr(39), '')}"
    if kind.startswith("string") and isinstance(given, (int, float)):
        return f"a name, in quotes where it reads like a number ('{given}')"
    return _WANTED.get(kind.partition("_")[0]) or form.figure(where)


def _listed(error: ErrorDetails) -> list[str]:
    """What pydantic lists as ``'naive', 'afab' or '1f1b'``."""
    listed = str(error.get("ctx", {}).get("expected", ""))
    return [name.strip("' ") for name in listed.replace(" or ", ",").split(",")]


def _at(data: object, where: Sequence[int | str], default: object) -> object:
    """What is at a place of the file, as the user wrote it."""
    for part in where:
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return default
    return data
