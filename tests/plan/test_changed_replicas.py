"""The plan for another number of workers: fewer replicas of the same, or what a search has to keep."""

from __future__ import annotations

import pytest

from polylane.plan.fewer_workers import change_replicas, keep_numbers
from polylane.plan.spec import parse


@pytest.mark.parametrize(
    ("plan", "workers", "natural"),
    [
        ("data=4", 3, "data=3,microbatches=2"),
        ("data=2,pipeline=2", 2, "data=1,pipeline=2,microbatches=2"),
        ("data=2,pipeline=2", 6, "data=3,pipeline=2,microbatches=2"),  # workers that come back, or more
        ("data=2,pipeline=2", 3, None),
        ("pipeline=2,tensor=2", 3, None),
        ("[data=2 | 1]", 2, None),
        ("data=3,servers=1,dedicated=yes", 3, "data=2,servers=1,dedicated=yes,microbatches=2"),
        ("data=1,servers=1,dedicated=yes", 1, None),
        ("data=4,shard=parameters,within=2", 3, "data=3,shard=parameters,microbatches=2"),
        ("data=4,shard=parameters,within=2", 2, "data=2,shard=parameters,within=2,microbatches=2"),
        ("data=2,replicas=round-robin", 3, None),
    ],
)
def test_fewer_replicas(plan: str, workers: int, natural: str | None) -> None:
    found = change_replicas(parse(plan), workers, 2)
    assert found == (None if natural is None else parse(natural))
    assert found is None or found.processes == workers


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        ("pipeline=2,tensor=2", "microbatches=3"),
        ("data=2,pipeline=2,schedule=zb-h1,precision=bfloat16", "microbatches=3,precision=bfloat16"),
        ("data=2,shard=optimizer,recompute=full", "microbatches=3,recompute=full,shard=optimizer"),
        ("pipeline=3,schedule=pipedream-2bw", "microbatches=3,pipeline=3,schedule=pipedream-2bw"),
        ("data=2,servers=2,compile=yes", "microbatches=3,compile=yes,servers=2"),
    ],
)
def test_a_search_keeps_what_decides_numbers(plan: str, kept: str) -> None:
    assert str(keep_numbers(parse(plan), 3)) == kept
