"""Sentences: what a file, a name or another exception puts into one cannot command a terminal, nor fill it."""

from __future__ import annotations

import pytest

from polylane.errors import PolylaneError, clean_text, describe_error, find_unfit, format_value


def test_a_sentence_obeys_nobody() -> None:
    said = str(PolylaneError("stage \x1b[31mred\x07 is\nno\u202eeman of \udcff"))
    assert said == "stage \\x1b[31mred\\x07 is no\\u202eeman of \\udcff"


def test_a_sentence_is_bounded() -> None:
    said = str(PolylaneError(f"plan {'n' * 5000}.yaml: File name too long"))
    assert said.startswith("plan nnn") and "…(5,006 characters)…" in said and said.endswith("File name too long")
    assert len(said) < 350
    assert len(str(PolylaneError("a " * 100_000))) < 5000
    path = "/".join(["folder"] * 40)
    assert str(PolylaneError(path)) == path


def test_lines_of_a_traceback_stay() -> None:
    assert clean_text("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@pytest.mark.parametrize("text", ["plain", "Schicht 3 ☂ 層", "a\xa0b", "🙂"])
def test_ordinary_text_is_fit(text: str) -> None:
    assert find_unfit(text) is None and clean_text(text) == text


def test_values_are_shortened_before_they_are_written() -> None:
    assert format_value(10**5000) == "a number of more than 60 digits"
    assert len(format_value("x" * 10**7)) < 70
    assert format_value("\x1b") == "'\\x1b'"


def test_an_exception_that_cannot_tell_its_text() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(Silent()) == "Silent: its text cannot be told, for its __str__ raises RuntimeError"
    assert describe_error(ValueError("a\x1b\nb")) == "ValueError: a\\x1b b"
