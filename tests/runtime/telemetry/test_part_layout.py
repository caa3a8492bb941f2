"""Parts of a batch: the noise is measured where every pool has two of them, and each replica's pass is in one part."""

from __future__ import annotations

from collections import Counter

import pytest

from polylane.compile.objectives import build_objectives
from polylane.runtime.telemetry.part_layout import lay_out_parts, why_not_measured
from tests.support.workers.training import batch_of, classify, compiled, mlp, sgd

PLANS = {
    "data=1": 1,
    "microbatches=2": 2,
    "data=2": 2,
    "data=2,microbatches=3": 6,
    "data=2,every=4": 1,
    "data=2,every=4,microbatches=2": 2,
    "data=2,servers=1": 1,
    "data=2,servers=1,microbatches=3": 3,
    "pipeline=2,data=2,microbatches=2,replicas=round-robin": 2,
    "[data=2|data=1],microbatches=2": 2,
}


@pytest.mark.parametrize(("spec", "parts"), PLANS.items())
def test_noise_is_measured_where_every_pool_has_two_parts(spec: str, parts: int) -> None:
    plan = compiled(mlp(6, 12, 12, 4), build_objectives(classify, sgd, None), batch_of(12), spec).plan
    layout = lay_out_parts(plan, plan.microbatches, False, plan.sync.is_replica_local)
    members = Counter(layout.pool_of(part) for part in range(layout.parts))
    assert set(members) == set(range(layout.pools)) and set(members.values()) == {parts}
    assert (why_not_measured(plan, False) is None) == (parts >= 2)
    made = {
        layout.part_of(replica, microbatch) for replica in range(plan.data) for microbatch in range(plan.microbatches)
    }
    assert made == set(range(layout.parts))
