"""Tables of the terminal: figures are whole at every width, and names break after a comma, a dot or a slash only."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.commands.printing import BreakableText, _PlainConsole, make_table, print_table
from polylane.plan.spec import parse, shorten_plan

PLANS = st.lists(
    st.sampled_from(["data=2", "pipeline=4", "tensor=8", "schedule=interleaved", "microbatches=128", "every=8"]),
    min_size=1,
    max_size=6,
).map(",".join)
FIGURES = st.sampled_from(["13.5 ms", "≤ 1.15 GiB", "4,757,112.8", "8.2e-06", "100%", "62,344.1"])


@given(st.lists(st.tuples(PLANS, *[FIGURES] * 5), min_size=1, max_size=4), st.integers(80, 160))
def test_figures_are_whole_and_names_break_where_names_may(rows: list[tuple[str, ...]], width: int) -> None:
    out = _PlainConsole(file=io.StringIO(), width=width, markup=False)
    table = make_table("title", "plan", *"abcde", left=["plan"])
    for row in rows:
        table.add_words(*row)
    print_table(out, table)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= width for line in lines) and not any("…" in line for line in lines)
    shown = "\n".join(lines)
    for plan, *figures in rows:
        assert all(figure in shown for figure in figures)
        assert all(word in shown for word in plan.split(","))


def test_a_name_is_broken_between_its_parts() -> None:
    out = _PlainConsole(file=io.StringIO(), width=14)
    out.print(BreakableText("blocks.0.attention/add#2,microbatches=1"))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines() == ["blocks.0.", "attention/", "add#2,", "microbatches=1"]


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("data=1,pipeline=1,schedule=1f1b,microbatches=1", "data=1"),
        ("data=2,pipeline=1,tensor=4,schedule=1f1b,microbatches=1", "data=2,tensor=4"),
        ("data=1,pipeline=2,schedule=1f1b,microbatches=1", "pipeline=2,schedule=1f1b,microbatches=1"),
        ("[data=2 | 1],schedule=1f1b,microbatches=4", "[data=2 | 1],schedule=1f1b,microbatches=4"),
        ("data=2,pipeline=1,schedule=1f1b,microbatches=4", "data=2,microbatches=4"),
    ],
)
def test_a_short_plan_is_the_same_plan(line: str, short: str) -> None:
    assert shorten_plan(line) == short
    assert parse(short).group_meshes == parse(line).group_meshes
