"""Numbers in the form in which people read them."""

from __future__ import annotations

import warnings

import pytest

from polylane import cli
from polylane.commands import printing
from polylane.commands.printing import format_duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 s"),
        (8.2e-4, "820 µs"),
        (0.0351, "35.1 ms"),
        (0.9996, "1000 ms"),
        (1.236, "1.24 s"),
        (123.4, "123 s"),
        (999.4, "999 s"),
        (999.6, "16 min 40 s"),
        (1234.0, "20 min 34 s"),
        (7385.0, "2 h 03 min"),
    ],
)
def test_durations_have_three_digits_and_long_ones_minutes(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


def test_a_line_with_a_line_break_in_a_name_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_line("run/a\nb/: plan.yaml")
    assert capsys.readouterr().out == "run/a\\nb/: plan.yaml\n"


def test_a_warning_of_polylane_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: None)
    monkeypatch.setattr(cli, "guard_streams", lambda: None)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    cli.main([])
    assert warnings.formatwarning("new", UserWarning, cli.__file__, 1) == "note: new\n"
    assert warnings.formatwarning("new", UserWarning, "/user/recipe.py", 1) == "/user/recipe.py:1: UserWarning: new\n"
