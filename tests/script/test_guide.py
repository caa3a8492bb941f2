"""The reference's table of what scripts do is that of the tests; ``python -m tests.script.test_guide`` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.script.call_traps import CALL_TRAPS
from tests.script.loops import LOOPS
from tests.script.mode_traps import MODE_TRAPS
from tests.script.model_state.state_traps import STATE_TRAPS
from tests.script.sequence_loops import SEQUENCE_LOOPS
from tests.script.traps import TRAPS
from tests.script.weight_loops import WEIGHT_LOOPS
from tests.script.weight_traps import WEIGHT_TRAPS

GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "scripts.md"
_TABLE = re.compile(r"(?<=test_guide -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def write_table() -> str:
    """Return the tables as text: what is refused first, with a part of the error's sentence."""
    traps = [*(TRAPS | WEIGHT_TRAPS | CALL_TRAPS | MODE_TRAPS | STATE_TRAPS).values()]
    loops = [*LOOPS.values(), *WEIGHT_LOOPS.values(), *SEQUENCE_LOOPS.values()]
    lines = ["| refused | the error says |", "|---|---|"]
    lines += [f"| {_describe(trap.loop)} | …{trap.refusal}… |" for trap in traps if trap.refusal]
    lines += ["", "| works, with the same numbers |", "|---|"]
    lines += [f"| {_describe(loop)} |" for loop in (*loops, *(trap.loop for trap in traps if not trap.refusal))]
    return "\n".join(lines)


def _describe(loop: Callable[..., object]) -> str:
    text = " ".join((loop.__doc__ or "").split()).removesuffix(".").replace("``", "`")
    return text[0].lower() + text[1:]


def test_the_table_is_that_of_the_tests() -> None:
    found = _TABLE.search(GUIDE.read_text())
    assert found is not None
    assert found.group() == write_table()


if __name__ == "__main__":
    GUIDE.write_text(_TABLE.sub(lambda match: write_table(), GUIDE.read_text()))
