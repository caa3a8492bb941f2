"""The promise for replicas that train alone and then average: what their own rule gives, done in one process."""

from __future__ import annotations

import pytest

from tests.equivalence.table import Row
from tests.equivalence.test_equivalence import verdict_on
from tests.equivalence.test_hybrids import prepared_for
from tests.support import subsets

ROWS = """
model           | sizes   | plan                                          | proof
digits          | 8 7 5 6 | data=2,every=2                                | 1f1b 2 adamw
digits          | 8 7 5   | data=2,pipeline=2,every=3,outer=0.7:0.9       | afab 3 sgd
gpt             | 8 7 3 4 | data=3,every=2,warmup=1                       | naive 2 own
gpt             | 8 7 3   | data=2,tensor=2,every=2                       | 1f1b 2 adamw
hf_llama        | 5 3 2   | data=2,pipeline=2,every=2,outer=1:0           | 1f1b 1 sgd
moe             | 5 4 3   | data=2,every=2                                | naive 1 own
nested          | 9 5 2 1 | data=3,every=3                                | 1f1b 2 adamw
encoder         | 8 7 3   | data=2,sequence=2,every=2,warmup=1            | afab 2 sgd
"""


def rows() -> list[Row]:
    found = []
    for line in ROWS.strip().splitlines()[1:]:
        model, sizes, plan, proof = (cell.strip() for cell in line.split("|"))
        schedule, microbatches, optimizer = proof.split()
        found.append(Row(model, plan, schedule, int(microbatches), optimizer, tuple(map(int, sizes.split()))))
    return found


# Each of them is like one that stays, of another model.
FURTHER = [row for row in rows() if row.model in ("encoder", "hf_llama", "moe") or row.plan == "data=2,every=2"]


@pytest.mark.parametrize(
    "row", subsets.one_in(2, subsets.except_slow(rows(), FURTHER), first=1), ids=lambda row: f"{row.model}-{row.plan}"
)
def test_equal_to_its_own_rule(row: Row) -> None:
    verdict = verdict_on(row, prepared_for(row))
    assert verdict.rule and "a copy for each replica" in verdict.reference
    assert verdict.passed, f"worst {verdict.worst:.1e}"
