"""YAML files: what is read of them, what is refused, and that reading is bounded whatever the file has."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from polylane import yaml_file
from polylane.errors import PolylaneError
from polylane.yaml_file import MOST_BYTES, MOST_LEVELS, MOST_VALUES, dump, parse, read

LETTERS = "abcdefgh"
BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise(LETTERS))


def test_what_is_read() -> None:
    text = """
    whole: 12
    hexadecimal: 0x1F
    number: 1.5e+3
    true: true
    none: ~
    text: "12"
    date: 2001-01-01
    clock: 1:30
    no_number: 0x_
    list: [1, [2, {a: b}], []]
    <<: {merged: no}
    long: >-
      folded
      text
    """
    assert parse(text) == {
        "whole": 12,
        "hexadecimal": 31,
        "number": 1500.0,
        True: True,
        "none": None,
        "text": "12",
        "date": "2001-01-01",
        "clock": "1:30",
        "no_number": "0x_",
        "list": [1, [2, {"a": "b"}], []],
        "<<": {"merged": False},
        "long": "folded text",
    }


REFUSED = {
    "line 1: tags (!name) are not read": [
        "a: !!int ''",
        "a: !!float ''",
        "a: !!bool x",
        "a: !!timestamp x",
        "!!map [a]",
        "a: !!binary aGk=",
        "a: ! x",
        "a: !!python/object:os.system {}",
        "!!set {a}",
    ],
    "anchors (&name) are not read": ["&a [*a]", "a: &a {b: *a}", "a: &a 1", BOMB],
    "aliases (*name) are not read": ["a: *b", "[*b]"],
    f"there are more than {MOST_LEVELS} levels": [
        "[" * 33,
        "[" * 100_000,
        "a:\n  " + "[" * 100_000,
        "{a: " * 100_000,
        "- " * 100_000,
    ],
    "a number has 6,000 characters": ["a: " + "9" * 6000, "9" * 6000 + ": a", f"a: -{'9' * 5999}"],
    "which no name may have": ['a: "\\e[31mred"', 'a: "\\u202Eder"', 'a: "\\n"', '"\\0": 1', "a: |\n  b\n  c"],
    "a key must be a name or a number": ["[a]: b", "? {a: b}\n: c", "? " * 100_000, "{a: {[b]: c}}"],
    "there are several documents": ["a: 1\n---\nb: 2"],
    "is there twice, on lines 1 and 2": ["a: 1\na: 2", "1: 1\n0x1: 2", "1: 1\ntrue: 2"],
    f"there are more than {MOST_VALUES:,} values": [f"a: [{'a,' * MOST_VALUES}]"],
    f"more than {MOST_BYTES // 2**20} MiB": ["a" * (MOST_BYTES + 1)],
    "this is not YAML": ["a: \0", "a: [", "a: b: c", "\t- a", "%YAML 3.0", "'", "a: @", "a: \x1b"],
}


@pytest.mark.parametrize(("says", "text"), [(says, text) for says, texts in REFUSED.items() for text in texts])
def test_what_is_refused(says: str, text: str) -> None:
    began = time.process_time()
    with pytest.raises(PolylaneError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()
    assert time.process_time() - began < 5


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(PolylaneError, match="plan /dev/zero: the file has more than 8 MiB"):
        read("/dev/zero", "plan")


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match="File name too long") as caught:
        read(tmp_path / ("n" * 5000))
    assert len(str(caught.value)) < 500


def test_what_is_written_is_read_again() -> None:
    """Values that occur twice are written twice, for aliases are not read."""
    shared = [1, 2]
    data = {"a": shared, "b": shared, "date": "2001-01-01", "text": "12", "clock": "1:30", "odd": "0x_"}
    assert parse(dump(data)) == data
    assert "&" not in dump(data)


def test_the_slow_parser_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of PyYAML lack libyaml."""
    import yaml

    fast = parse("a: [1, b, {c: 2.5}]\nd: 'e'")
    monkeypatch.setattr(yaml_file, "_Loader", yaml.SafeLoader)
    assert parse("a: [1, b, {c: 2.5}]\nd: 'e'") == fast
    for text in ("[" * 100_000, "a: &a 1", "a: !!int 1", "a: *a"):
        with pytest.raises(PolylaneError, match=r"are not read|more than"):
            parse(text)
