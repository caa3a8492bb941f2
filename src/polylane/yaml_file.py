"""YAML files: reads one into a plain mapping, within bounds; turns pydantic's validation errors into sentences.

A sentence names the key by its place in the file (``stages.0.mesh.tensor``), and says what must be there and what is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic_core import ErrorDetails

from polylane.errors import PolylaneError, find_unfit, format_value, shorten_text, suggest_name

# libyaml's parser is ten times as fast; not every build of PyYAML has it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Bounds of a file: some ten times what a plan of thousands of stages has. They bound the time and memory of reading it.
MOST_BYTES = 8 * 2**20
MOST_VALUES = 2**18
MOST_LEVELS = 32
MOST_DIGITS = 40  # characters of a number

_QUOTED = 200  # most characters of the parser's message that are quoted

_MAPPING = "a mapping of keys and values"
_KEY = "[key]"  # in a pydantic location: the error is in a mapping's key, not in its value

# A positive integer. Strict: neither true nor "2" is accepted for a number.
Count = Annotated[int, pydantic.Field(strict=True, gt=0)]


class StrictMapping(pydantic.BaseModel):
    """Base of every mapping of a file: it does not change, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


# ---- reading and writing ---------------------------------------------------------------------------------------------


def parse(text: str) -> dict[Any, Any]:
    """Parse a YAML text that is a mapping.

    Only what a plan or a cluster needs: mappings, lists, texts, numbers, true, false and null. What would make a small
    file large, or run a converter, is refused: anchors, aliases, tags.

    Raises:
        PolylaneError: the text is not YAML, is empty or no mapping, has a key twice, or has what is refused.
    """
    _check_size(len(text))
    try:
        data = _Builder(text).build()
    except (yaml.YAMLError, ValueError) as error:
        raise PolylaneError(f"this is not YAML: {shorten_text(' '.join(str(error).split()), _QUOTED)}") from error
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
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # the file may be a device without an end
        _check_size(len(content))
        return parse(content.decode())
    except OSError as error:
        raise PolylaneError(f"{name}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise PolylaneError(f"{name}: this is not YAML: {error}") from error
    except PolylaneError as error:
        raise PolylaneError(f"{name}: {error}") from error


def dump(data: dict[Any, Any]) -> str:
    """Format plain values as YAML that :func:`parse` reads: values that occur twice are written twice."""
    return str(yaml.dump(data, Dumper=_WithoutAliases, sort_keys=False, default_flow_style=None, width=120))


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise PolylaneError(f"the file has more than {MOST_BYTES / 2**20:.0f} MiB, the most that is read")


def _too_many_levels(line: int) -> PolylaneError:
    return PolylaneError(f"line {line}: there are more than {MOST_LEVELS} levels, one inside the other")


@dataclass
class _Open:
    """A mapping or list whose end has not been read yet.

    Attributes:
        value: the mapping or list, as far as it has been read.
        lines: of a mapping, the line of each key.
        key: of a mapping, a list with the key whose value comes next; empty where a key comes next.
    """

    value: dict[Any, Any] | list[Any]
    lines: dict[Any, int] = field(default_factory=dict)
    key: list[Any] = field(default_factory=list)


class _Builder:
    """Builds plain values from a parser's events one after another, without recursion, so that depth costs no stack.

    Args:
        text: the whole text of the file.
    """

    def __init__(self, text: str) -> None:
        self._events = _Loader(text)
        self._open: list[_Open] = []
        self._values = 0
        self._documents: list[Any] = []

    def build(self) -> Any:
        """Return the value of the one document; None where there is none."""
        try:
            while not isinstance(event := self._events.get_event(), yaml.StreamEndEvent):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            # libyaml reads a line ahead of its events, and bounds levels too: by more than we do, so ours are exceeded.
            if "nesting depth" in str(error.problem) and error.problem_mark:
                raise _too_many_levels(error.problem_mark.line + 1) from error
            raise
        finally:
            self._events.dispose()
        if len(self._documents) > 1:
            raise PolylaneError("there are several documents in it, divided by ---: keep one")
        return self._documents[0] if self._documents else None

    def _take(self, event: Any) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise PolylaneError(f"line {line}: aliases (*name) are not read: write the value itself")
        if isinstance(event, yaml.NodeEvent):
            self._check(event, line)
        if isinstance(event, yaml.ScalarEvent):
            self._add(self._scalar(event, line), line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(self._open) == MOST_LEVELS:
                raise _too_many_levels(line)
            if self._open and isinstance(self._open[-1].value, dict) and not self._open[-1].key:
                raise PolylaneError(f"line {line}: a key must be a name or a number, not a mapping or a list")
            self._open.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else []))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._add(self._open.pop().value, line)

    def _check(self, event: Any, line: int) -> None:
        """Refuse what has an anchor or a tag, and too many values."""
        if event.anchor is not None:
            raise PolylaneError(f"line {line}: anchors (&name) are not read: write the value where it is needed")
        if getattr(event, "tag", None) is not None:
            raise PolylaneError(f"line {line}: tags (!name) are not read: write the value alone")
        self._values += 1
        if self._values > MOST_VALUES:
            raise PolylaneError(f"there are more than {MOST_VALUES:,} values in it, the most that are read")

    def _add(self, value: Any, line: int) -> None:
        """Put a whole value where it belongs: into the list or mapping that is open, or at the top."""
        if not self._open:
            self._documents.append(value)
            return
        container = self._open[-1]
        if isinstance(container.value, list):
            container.value.append(value)
        elif container.key:
            container.value[container.key.pop()] = value
        else:
            if value in container.lines:
                twice = f"lines {container.lines[value]} and {line}"
                raise PolylaneError(f"{value} is there twice, on {twice}: keep one")
            container.lines[value] = line
            container.key.append(value)

    def _scalar(self, event: Any, line: int) -> Any:
        """Return what a scalar means: plain ones may be numbers, true, false or null, all others are text."""
        text = event.value
        if self._open and (unfit := find_unfit(text)) is not None:  # a whole file of text is no mapping, and said so
            raise PolylaneError(f"line {line}: {format_value(text)} has the character {unfit}, which no name may have")
        if not event.implicit[0]:  # in quotes
            return text
        tag = self._events.resolve(yaml.ScalarNode, text, event.implicit)
        sort = tag.rpartition(":")[2]
        # Dates, merge keys (<<) and numbers to the base of 60 (1:30) are texts here: no key takes them.
        if sort not in ("int", "float", "bool", "null") or (sort in ("int", "float") and ":" in text):
            return text
        if sort in ("int", "float") and len(text) > MOST_DIGITS:
            raise PolylaneError(f"line {line}: a number has {len(text):,} characters, and {MOST_DIGITS} are the most")
        try:
            return getattr(self._events, f"construct_yaml_{sort}")(yaml.ScalarNode(tag, text))
        except ValueError:  # 0x_ looks like a number and is none
            return text


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
    figure: Callable[[Sequence[int | str]], str] = lambda path: "a number"


def first_error(error: pydantic.ValidationError) -> ErrorDetails:
    """Return the error to report: rather an unknown key than a missing one, which is mostly the same key misspelt."""
    return min(error.errors(), key=lambda detail: detail["type"] == "missing")


def error_sentence(error: ErrorDetails, form: FileForm, data: object) -> str:
    """Describe what is wrong with one value of a file, and what it must be.

    Args:
        error: one of the details of pydantic's validation error.
        form: keys and figures of this kind of file.
        data: the file's mapping as the user wrote it.
    """
    at_key, kind = _KEY in error["loc"], error["type"]
    path = [part for part in error["loc"] if part != _KEY]
    key = ".".join(map(str, path)) or "the file"
    if kind == "missing":
        return f"{key} is missing"
    wrong_key = at_key and kind == "literal_error"
    if kind in ("extra_forbidden", "invalid_key") or wrong_key:
        known_keys = _listed(error) if wrong_key else form.keys(path[:-1])
        return (
            f"{key} is not a key of {form.name}; known there are "
            f"{', '.join(known_keys)}{suggest_name(str(path[-1]), known_keys)}"
        )
    if kind == "value_error" or "url" not in error:  # raised by a validator of our own models, already a sentence
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}{' ' if message.startswith('must be') else ': '}{message}"
    # Pydantic's input may be converted already (a unit taken in): show what the file has.
    value = error["input"] if at_key else _at(data, path, error["input"])
    return f"{key} must be {_wanted(error, path, form)}, not {format_value(value)}"


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


def _wanted(error: ErrorDetails, path: Sequence[int | str], form: FileForm) -> str:
    """Describe what must be in the place of a wrong value."""
    kind, value, details = error["type"], error["input"], error.get("ctx", {})
    if kind == "literal_error":
        *names, last_name = _listed(error)
        return f"{', '.join(names)} or {last_name}" if names else last_name
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        limit = details[name]
        if isinstance(limit, int):
            return "at least 1" if (kind, limit) == ("greater_than", 0) else f"{words} {limit:,}"
        return f"{words} {limit:g}"
    if kind == "union_tag_not_found":
        return "a mapping with the key kind"
    if kind == "union_tag_invalid":
        return f"of a kind that is known: {str(details['expected_tags']).replace(chr(39), '')}"
    if kind.startswith("string") and isinstance(value, (int, float)):
        return f"a name, in quotes where it reads like a number ('{value}')"
    return _WANTED.get(kind.partition("_")[0]) or form.figure(path)


def _listed(error: ErrorDetails) -> list[str]:
    """Split pydantic's list of literals, such as ``'naive', 'afab' or '1f1b'``."""
    listed = str(error.get("ctx", {}).get("expected", ""))
    return [name.strip("' ") for name in listed.replace(" or ", ",").split(",")]


def _at(data: object, path: Sequence[int | str], default: object) -> object:
    """Return what is at a place of the file, as the user wrote it."""
    for part in path:
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return default
    return data
