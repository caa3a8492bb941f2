"""What polylane refuses in a script names the script's line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from polylane.errors import PolylaneError
from polylane.script.session import ScriptSession, running_session


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("the model was replaced: build it first", "train.py:4: the model was replaced: build it first"),
        ("train.py line 3: a choice by rank", "train.py line 3: a choice by rank"),
        ("what was computed (train.py:2) is gone", "what was computed (train.py:2) is gone"),
    ],
)
def test_a_refusal_names_a_line_of_the_script(tmp_path: Path, sentence: str, expected: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from polylane.errors import PolylaneError\n"
        "def step():\n    # the innermost line of the script's own\n"
        f"    raise PolylaneError({sentence!r})\nstep()\n"
    )
    with pytest.raises(PolylaneError) as raised, running_session(ScriptSession()):
        runpy.run_path(str(script), run_name="__main__")
    assert str(raised.value).removeprefix(f"{tmp_path}/") == expected
