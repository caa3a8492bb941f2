"""Slow workers are found by what replicas compute in for a sample, named by host, and given a share by their speed."""

from __future__ import annotations

import pytest

from polylane.commands.logs.worker_speeds import WorkerSpeeds
from polylane.plan.plan import Plan
from polylane.plan.plan_file import parse_plan
from polylane.runtime.telemetry.worker_facts import WorkerFacts

HOSTS = ("host-a", "host-a", "host-b", "host-b")


def plan_of(options: str = "", mesh: str = "data: 4") -> Plan:
    return parse_plan(f"stages: [{{nodes: [a, b], devices: [0, 1, 2, 3], mesh: {{{mesh}}}}}]\n{options}", "of a test")


def speeds_after(plan: Plan, computing: list[float], hosts: tuple[str, ...] = HOSTS, steps: int = 10) -> WorkerSpeeds:
    speeds = WorkerSpeeds(plan, hosts)
    for step in range(steps):
        # A pause of the machine counts for nothing.
        times = [seconds * (5 if step == 3 else 1) for seconds in computing]
        speeds.add(24, [WorkerFacts(0, 0, 0, 0, 0, 0, 1.0, 2, 0, seconds, 0, 0) for seconds in times])
    return speeds


def test_a_slow_host_is_named_with_how_slow_it_is_and_the_plan_that_allows_for_it() -> None:
    found = speeds_after(plan_of(), [0.1, 0.1, 0.2, 0.2]).describe()
    assert found["sentence"] == (
        "host-b (ranks 2 and 3) computes at 0.50 times the speed of the others; --plan data=4,shares=2:2:1:1 gives it "
        "fewer samples: up to 1.5 times as fast"
    )
    assert found["gain"] == pytest.approx(1.5)


def test_workers_of_one_host_are_named_by_rank() -> None:
    sentence = speeds_after(plan_of(), [0.1, 0.2, 0.1, 0.1], hosts=()).describe()["sentence"]
    assert sentence.startswith("rank 1 computes at 0.50 times the speed of the others; --plan data=4,shares=2:1:2:2 ")


def test_speeds_are_of_samples_so_that_shares_that_fit_stay() -> None:
    plan = plan_of("shares: [2, 2, 1, 1]")
    found = speeds_after(plan, [0.1, 0.1, 0.1, 0.1])
    assert found.measure() == pytest.approx({0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5})
    assert found.describe()["sentence"].endswith("the speed of the others; the plan's shares allow for that")


def test_ranks_of_a_replica_wait_for_each_other() -> None:
    found = speeds_after(plan_of(mesh="data: 2, tensor: 2"), [0.1, 0.1, 0.1, 0.2])
    assert "--plan data=2,tensor=2,shares=2:1 gives it fewer" in found.describe()["sentence"]


@pytest.mark.parametrize(
    ("computing", "steps"), [([0.1, 0.1, 0.12, 0.13], 10), ([0.1, 0.1, 0.2, 0.2], 4)], ids=["noise", "too early"]
)
def test_nobody_is_called_slow_for_little(computing: list[float], steps: int) -> None:
    assert speeds_after(plan_of(), computing, steps=steps).describe() == {}


def test_replicas_that_train_by_themselves_are_named_without_a_plan() -> None:
    found = speeds_after(plan_of("sync: {every: 4}"), [0.1, 0.1, 0.2, 0.2]).describe()
    assert found["sentence"] == "host-b (ranks 2 and 3) computes at 0.50 times the speed of the others"
