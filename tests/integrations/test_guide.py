"""The guide to trainers of other libraries says what is refused: ``python -m tests.integrations.test_guide``."""

from __future__ import annotations

from pathlib import Path

from polylane.integrations.transformers import REFUSED

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md"
BEGIN = "<!-- generated from polylane.integrations.transformers: python -m tests.integrations.test_guide -->\n"
END = "<!-- end -->"


def table() -> str:
    rows = [f"| `{name}` | {substitute} |" for name, substitute in REFUSED.items()]
    return "\n".join(["| argument | instead |", "|---|---|", *rows, ""])


def test_the_guide_tells_what_is_refused() -> None:
    text = GUIDE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), "python -m tests.integrations.test_guide writes it"


if __name__ == "__main__":
    head, _, rest = GUIDE.read_text().partition(BEGIN)
    GUIDE.write_text(head + BEGIN + table() + END + rest.partition(END)[2])
