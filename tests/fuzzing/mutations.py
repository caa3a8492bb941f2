"""Mutations: of texts byte by byte, and of plain values by what people mistype and what nobody would write."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    2**20,
    2**20 + 1,
    2**31,
    2**63,
    10**30,
    1e308,
    -1e308,
    1e-320,
    0.5,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    " ",
    "x" * 5000,
    "a\u0301\u200d☂",
    "auto",
    "none",
    "1:2",
    "1e9 GB",
    "-5 us",
    "nan",
    "0x10",
    "²",
    "１２",
    "../../etc/passwd",
    "model",
    "[/b]:smile:",
    [],
    {},
    [[]],
    [0],
    [0, 0],
    [1, 0],
    [0, 1, 2, 3],
    {"a": 1},
    {"kind": "x"},
    {0: 0.5},
    {-1: 2.0},
    "9" * 5000,
)
ODD_NUMBERS = tuple(value for value in ODD_VALUES if type(value) in (int, float))
ODD_TEXTS = (
    "\x00",
    "\x1b[31m",
    "\u202e",
    "\xff\xfe",
    "&a ",
    "*a",
    "!!int ",
    "!!python/object/apply:os.system [id]",
    "[" * 200,
    "{a: " * 200,
    "- " * 200,
    "? ",
    "<<: ",
    "9" * 5000,
    "\n---\n",
    "%YAML 9\n",
    "\t",
    "'",
    '"\\e[2J"',
    "#",
    "|\n",
    "2001-01-01",
    "59:59:59",
    "~",
    ".inf",
    "0x",
    ":",
    ",",
    "=",
    "|",
    "]",
)


def mutate_text(draw: random.Random, text: str) -> bytes:
    """Return a text with some bytes deleted, doubled, exchanged or put in."""
    data = bytearray(text.encode())
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at, length = draw.randrange(len(data) + 1), draw.choice((1, 2, 5, 40))
        match draw.randrange(6):
            case 0:
                del data[at : at + length]
            case 1:
                data[at:at] = data[at : at + length] * draw.choice((1, 2, 50))
            case 2:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 3:
                other = draw.randrange(len(data) + 1)
                data[at:at] = data[other : other + length]
            case 4:
                del data[at:]
            case _:
                data[at:at] = draw.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")
    return bytes(data)


def mutate_data(draw: random.Random, data: Any, times: int | None = None) -> Any:
    """Return plain values with some of them exchanged, left out, renamed or doubled."""
    for _ in range(times or draw.choice((1, 1, 2, 4))):
        places = list(_places(data))
        if not places:
            return copy.deepcopy(draw.choice(ODD_VALUES))
        inside, key = draw.choice(places)
        match draw.randrange(8):
            case 0 if isinstance(inside, dict):
                del inside[key]
            case 1 if isinstance(inside, dict):
                names = (f"{key}s", str(key)[:-1], str(key).upper(), "x", "kind", "", 0, "n" * 300)
                inside[draw.choice(names)] = inside.pop(key)
            case 2 if isinstance(inside, list):
                inside.append(inside[key])
            case 3 if isinstance(inside, list):
                del inside[key]
            case 4:
                other, name = draw.choice(places)
                inside[key] = 1 if isinstance(other[name], dict | list) else other[name]
            case 5 | 6 if type(inside[key]) in (int, float):
                inside[key] = draw.choice(ODD_NUMBERS)
            case _:
                inside[key] = copy.deepcopy(draw.choice(ODD_VALUES))  # the next change must not change the table
    return data


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Return every mapping or list inside a value, with each of its keys or indices."""
    found, todo = [], [data]
    while todo:
        inside = todo.pop()
        items = inside.items() if isinstance(inside, dict) else enumerate(inside) if isinstance(inside, list) else ()
        for key, value in items:
            found.append((inside, key))
            todo.append(value)
    return found


def odd_number(draw: random.Random) -> str:
    """Return a number of a command line that nobody would write."""
    return str(draw.choice(ODD_NUMBERS))


def odd_word(draw: random.Random) -> str:
    """Return a word of a command line that nobody would write."""
    value = draw.choice(ODD_VALUES)
    word = str(value) if draw.random() < 0.8 else draw.choice(ODD_TEXTS)
    return word.replace("\x00", "")
