"""Servers as queues: closed forms of steps that wait, of steps that do not, and of a server that is too slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.cost.simulator.server_queue import ServerLoad, simulate_servers


def load(replicas: int, travel: float = 0.0, adding: float = 0.0, update: float = 0.0) -> ServerLoad:
    return ServerLoad((travel,) * replicas, (travel,) * replicas, adding, update, 0.0)


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_synchronous_step_waits_for_the_slowest_and_for_the_link(replicas: int) -> None:
    """All gradients pass the server's link one after another, and so do the weights that come back."""
    compute = [10.0 + index for index in range(replicas)]
    found = simulate_servers(compute, [load(replicas, travel=0.0, adding=0.0, update=2.0)], 0)
    assert found.seconds == pytest.approx(max(compute) + 2) and found.apart == 0
    alike = simulate_servers([10.0] * replicas, [load(replicas, travel=3.0, update=2.0)], 0)
    # The last one to be answered begins last, so its gradients arrive last: its way there and back is all it waits for.
    assert 10 + 3 + 2 + 3 <= alike.seconds <= 10 + 2 + 2 * 3 * replicas + 1e-9


def test_alone_a_step_is_its_parts() -> None:
    found = simulate_servers([10.0], [load(1, travel=3.0, adding=1.0, update=2.0)], 0)
    assert found.seconds == pytest.approx(10 + 3 + 1 + 2 + 3) and found.waits == pytest.approx((9.0,))


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_at_their_own_pace_wait_for_nobody(replicas: int) -> None:
    """As long as the server is idle most of the time: each replica takes its own passes and its own update."""
    compute = [10.0 * (index + 1) for index in range(replicas)]
    found = simulate_servers(compute, [load(replicas, update=1e-6)], "any", steps=400)
    rate = sum(1 / seconds for seconds in compute)
    assert found.seconds == pytest.approx(replicas / rate, rel=0.03)
    assert found.apart > 2


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_server_that_is_always_busy_is_what_all_wait_for(replicas: int) -> None:
    found = simulate_servers([1.0] * replicas, [load(replicas, update=5.0)], "any")
    assert found.seconds == pytest.approx(5.0 * replicas, rel=0.05)
    halves = simulate_servers([1.0] * replicas, [load(replicas, update=2.5)] * 2, "any")
    assert halves.seconds == pytest.approx(2.5 * replicas, rel=0.05), "two servers do half each, at the same time"


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_a_bound_keeps_replicas_together(staleness: int) -> None:
    found = simulate_servers([1.0, 10.0], [load(2)], staleness, steps=100)
    assert found.apart <= staleness
    assert found.seconds == pytest.approx(10.0, rel=0.1), "in the long run no faster than the slowest one"


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    st.floats(0, 3),
    st.floats(0, 3),
    st.sampled_from([0, 1, 3, "any"]),
)
def test_no_step_is_faster_than_its_parts(
    compute: list[float], travel: float, update: float, staleness: object
) -> None:
    found = simulate_servers(compute, [load(len(compute), travel, 0.0, update)], staleness)  # type: ignore[arg-type]
    least = len(compute) / sum(1 / (seconds + 2 * travel + update) for seconds in compute)
    if staleness == 0:
        least = max(compute) + 2 * travel + update
    assert found.seconds >= least * (1 - 0.1) and all(wait >= update - 1e-9 for wait in found.waits)
