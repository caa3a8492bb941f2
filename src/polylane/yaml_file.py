"""YAML files: reads a file into a plain mapping, and turns pydantic's validation errors into sentences for the user.

A sentence names the key by its place in the file (``stages.0.mesh.tensor``), and says what must be there and what is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic_core import ErrorDetails

from polylane.errors import PolylaneError, format_value, suggest_name

# libyaml's parser is ten times as fast; not every build of PyYAML has it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MAPPING = "a mapping of keys and values"
_KEY = "[key]"  # in a pydantic location: the error is in a mapping's key, not in its value

# A positive integer. Strict: neither true nor "2" is accepted for a number.
Count = Annotated[int, pydantic.Field(strict=True, gt=0)]


class StrictMapping(pydantic.BaseModel):
    """Base of every mapping of a file: it does not change, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


# ---- reading ---------------------------------------------------------------------------------------------------------


class EachKeyOnce(_Loader):  # type: ignore[misc]
    """Loader that refuses a mapping with a key twice, of which plain YAML silently keeps the last value."""

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
    """Parse a YAML text that is a mapping.

    Raises:
        PolylaneError: the text is not YAML, is empty or no mapping, or a key is there twice.
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
    """Read a YAML file that is a mapping.

    Args:
        path: path of the file, as the user gave it.
        kind: what errors call the file, before its path, such as "plan".

    Raises:
        PolylaneError: as :func:`parse`, or the file cannot be read; naming the file.
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
    """What one kind of file may contain, for sentences about errors.

    Attributes:
        name: name of the kind of file, with its article: "a plan".
        keys: returns the keys that a mapping may have, by its place in the file.
        figure: returns what a number at a place of the file must be: "a rate, such as 25 GB/s".
    """

    name: str
    keys: Callable[[Sequence[int | str]], Sequence[str]]
    figure: Callable[[Sequence[int | str]], str] = lambda place: "a number"


def first_error(error: pydantic.ValidationError) -> ErrorDetails:
    """Return the error to report: rather an unknown key than a missing one, which is mostly the same key misspelt."""
    return min(error.errors(), key=lambda each: each["type"] == "missing")


def error_sentence(error: ErrorDetails, form: FileForm, data: object) -> str:
    """Describe what is wrong with one value of a file, and what it must be.

    Args:
        error: one of the details of pydantic's validation error.
        form: keys and figures of this kind of file.
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
    if kind == "value_error" or "url" not in error:  # raised by a validator of our own models, already a sentence
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}{' ' if message.startswith('must be') else ': '}{message}"
    # Pydantic's input may be converted already (a unit taken in): show what the file has.
    given = error["input"] if at_key else _at(data, where, error["input"])
    return f"{key} must be {_wanted(error, where, form)}, not {format_value(given)}"


# What must be in a place, by the first word of pydantic's error type.
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
# For numbers that are too small or too large: the words, and the key of the limit in pydantic's context.
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _wanted(error: ErrorDetails, where: Sequence[int | str], form: FileForm) -> str:
    """Describe what must be in the place of a wrong value."""
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
    """Split pydantic's list of literals, such as ``'naive', 'afab' or '1f1b'``."""
    listed = str(error.get("ctx", {}).get("expected", ""))
    return [name.strip("' ") for name in listed.replace(" or ", ",").split(",")]


def _at(data: object, where: Sequence[int | str], default: object) -> object:
    """Return what is at a place of the file, as the user wrote it."""
    for part in where:
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return default
    return data
