"""The user's own lines: one in an installed library is told together with the line that led there."""

from __future__ import annotations

import sysconfig

from polylane.graph.python_state.own_objects import innermost_line

LIBRARY = f"{sysconfig.get_path('purelib')}/transformers/loss.py"
OWN = "/home/user/recipe.py"
TORCHS = f"{sysconfig.get_path('purelib')}/torch/nn/functional.py"


def test_a_line_of_the_users_own_stands_alone() -> None:
    assert innermost_line([(LIBRARY, 1), (OWN, 7), (TORCHS, 3)]) == f"{OWN}:7"


def test_a_line_in_a_library_is_told_with_the_line_that_led_there() -> None:
    assert innermost_line([(OWN, 7), (LIBRARY, 31), (TORCHS, 3)]) == f"{LIBRARY}:31, called from {OWN}:7"


def test_without_a_line_of_the_users_there_is_what_there_is() -> None:
    assert innermost_line([(LIBRARY, 31)]) == f"{LIBRARY}:31"
    assert innermost_line([(TORCHS, 3)]) == ""
