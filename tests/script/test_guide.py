"""The guide's table of what scripts do is that of the tests; ``python -m tests.script.test_guide`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.script.call_traps import CALL_TRAPS
from tests.script.loops import LOOPS
from tests.script.mode_traps import MODE_TRAPS
from tests.script.sequence_loops import SEQUENCE_LOOPS
from tests.script.traps import TRAPS
from tests.script.weight_loops import WEIGHT_LOOPS
from tests.script.weight_traps import WEIGHT_TRAPS

GUIDE = Path(__file__).parents[2] / "docs" / "scripts.md"
_TABLE = re.compile(r"(?<=test_guide -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def write_table() -> str:
    """Return the table as text."""
    lines = ["| what the script does | under a plan |", "|---|---|"]
    for loop in (*LOOPS.values(), *WEIGHT_LOOPS.values(), *SEQUENCE_LOOPS.values()):
        description = " ".join((loop.__doc__ or "").split()).removesuffix(".").replace("``", "`")
        lines.append(f"| {description[0].lower()}{description[1:]} | works |")
    for trap in (*TRAPS.values(), *WEIGHT_TRAPS.values(), *CALL_TRAPS.values(), *MODE_TRAPS.values()):
        outcome = f"refused: …{trap.refusal}…" if trap.refusal else "works"
        lines.append(f"| {' '.join((trap.loop.__doc__ or '').split())} | {outcome} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_tests() -> None:
    found = _TABLE.search(GUIDE.read_text())
    assert found is not None
    assert found.group() == write_table()


if __name__ == "__main__":
    GUIDE.write_text(_TABLE.sub(lambda match: write_table(), GUIDE.read_text()))
