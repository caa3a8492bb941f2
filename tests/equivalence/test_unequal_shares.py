"""The promise for replicas with unequal shares of a batch: whoever computes which samples, the results are the same."""

from __future__ import annotations

import pytest

from tests.equivalence import table
from tests.equivalence.test_equivalence import check
from tests.equivalence.test_hybrids import rows

ROWS = """
model     / sizes / plan                                  / proof
digits    / 9 5 2 / data=3,shares=4:2:1                   / 1f1b 1 sgd
gpt       / 8 5   / data=2,pipeline=2,shares=3:1          / 1f1b 2 adamw
"""
FURTHER = """
model     / sizes / plan                                  / proof
unet      / 7 4   / data=2,shares=1:3                     / 1f1b 2 sgd
digits    / 8 3   / data=2,tensor=2,shares=3:1            / 1f1b 1 own
gpt       / 8 5   / data=3,shares=5:1:1,shard=parameters  / 1f1b 1 adamw
nested    / 9 2   / data=4,shares=2:2:1:1,shard=optimizer / 1f1b 2 sgd
"""


@pytest.mark.parametrize("row", rows(ROWS), ids=str)
def test_unequal_shares(row: table.Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(FURTHER), ids=str)
def test_unequal_shares_further(row: table.Row) -> None:
    check(row)
