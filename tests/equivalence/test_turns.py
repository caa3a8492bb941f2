"""The promise for replicas in turn: stages with any numbers of them, batches shorter than one microbatch for each."""

from __future__ import annotations

import pytest

from tests.equivalence import table
from tests.equivalence.test_hybrids import check, rows

ROWS = """
model     / sizes / plan                                                  / proof
unet      / 6 5 3 / [data=3 | data=2],replicas=round-robin                / 1f1b 4 sgd
digits    / 8 2   / [data=3 | 1],replicas=round-robin                     / afab 4 sgd
"""
FURTHER = """
model     / sizes / plan                                                  / proof
gpt       / 8 5 2 / [data=2 | 1],replicas=round-robin                     / 1f1b 5 adamw
hf_gpt2   / 8 3 2 / data=2,pipeline=2,replicas=round-robin                / 1f1b 4 adamw
gpt       / 8 3   / [data=3 | tensor=2 | data=2],replicas=round-robin     / afab 5 sgd
digits    / 8 2   / [data=3 | data=2],replicas=round-robin                / naive 4 sgd
digits    / 8 5   / data=2,pipeline=2,replicas=round-robin                / zb-h1 5 own
digits    / 8 5   / [data=2,tensor=2 | data=2],replicas=round-robin       / 1f1b 3 sgd
nested    / 9 2   / [1 | data=3],replicas=round-robin                     / afab 4 sgd
"""


@pytest.mark.parametrize("row", rows(ROWS), ids=str)
def test_replicas_in_turn(row: table.Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(FURTHER), ids=str)
def test_replicas_in_turn_further(row: table.Row) -> None:
    check(row)
