"""Laws of schedules that are found: complete, runnable, within memory, never worse than a schedule by name."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import Action
from polylane.schedule.live import peak_live
from polylane.schedule.problem import ScheduleProblem, lanes_to_orders, orders_to_lanes, play_orders
from polylane.schedule.schedules import NAMES, assign_stages, schedule_lanes, splits_backward
from polylane.schedule.search import find_schedule
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes
from tests.support import subsets


@st.composite
def problems(draw: st.DrawFn) -> ScheduleProblem:
    """Up to four workers, whose stages are a chain, chunks dealt round-robin, or a V; with and without bounds."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    layout = draw(st.sampled_from(["1f1b", "1f1b", "interleaved", "zb-v"]))
    owners = assign_stages(layout, k, 1 if layout == "1f1b" else 2)
    chunks = len(owners) // k
    ticks = st.tuples(*[st.integers(0, 9)] * len(owners))
    bound = st.integers(chunks, chunks * n)
    return ScheduleProblem(
        graph=StageGraph.chain(len(owners)),
        workers=owners,
        microbatches=n,
        forward=draw(st.tuples(*[st.integers(1, 9)] * len(owners))),
        input_gradient=draw(ticks),
        weight_gradient=draw(ticks),
        hop=draw(st.integers(0, 4)),
        memory=draw(st.one_of(st.just(()), st.tuples(*[bound] * k))),
        split=draw(st.booleans()),
    )


def simulated(problem: ScheduleProblem, lanes: Lanes) -> float:
    backward = [i + w for i, w in zip(problem.input_gradient, problem.weight_gradient, strict=True)]
    assert isinstance(problem.hop, int | float)
    timeline = simulate_schedule(lanes, problem.forward, backward, problem.hop, problem.graph, problem.weight_gradient)
    return timeline.makespan()


@given(problems())
@settings(deadline=None, max_examples=subsets.examples(60))
def test_what_is_found_runs_and_is_never_worse_than_a_schedule_by_name(problem: ScheduleProblem) -> None:
    found = find_schedule(problem, effort=20_000)
    assert find_schedule(problem, effort=20_000) == found  # nothing of it is left to chance
    assert simulated(problem, found.lanes) == found.makespan >= problem.lower_bound
    for worker, lane in enumerate(found.lanes):
        own = [stage for stage, owner in enumerate(problem.workers) if owner == worker]
        every = [Action(kind, s, m) for kind in problem.kinds for s in own for m in range(problem.microbatches)]
        assert Counter(lane) == Counter(every)
        for stage in own:
            for kind in problem.kinds:
                ran = [a.microbatch for a in lane if (a.stage, a.kind) == (stage, kind)]
                assert ran == list(range(problem.microbatches))
    peaks = peak_live(found.lanes)
    assert peaks == found.peak_bytes
    assert not problem.memory or all(p <= most for p, most in zip(peaks, problem.memory, strict=True))
    for name in NAMES:
        if splits_backward(name) and not problem.split:
            continue
        try:
            lanes = schedule_lanes(name, problem.graph, problem.microbatches, problem.workers)
        except ValueError:
            continue
        if not problem.memory or all(p <= b for p, b in zip(peak_live(lanes), problem.memory, strict=True)):
            assert found.makespan <= simulated(problem, lanes)


@given(problems())
@settings(deadline=None)
def test_orders_take_as_long_as_their_lanes_are_simulated_to(problem: ScheduleProblem) -> None:
    """One mechanism and the other: the search plays orders by itself, since it plays thousands."""
    name = "naive" if problem.count == problem.graph.stages else "interleaved"
    try:
        lanes = schedule_lanes(name, problem.graph, problem.microbatches, problem.workers)
    except ValueError:  # a V
        lanes = find_schedule(problem, exact=False, effort=1).lanes
    orders = lanes_to_orders(problem, lanes)
    played = play_orders(problem, orders)
    assert played is not None and played.makespan == simulated(problem, orders_to_lanes(problem, orders))
    starts = {
        (span.action.stage, span.action.microbatch, span.action.kind): span.start
        for span in simulate_schedule(
            orders_to_lanes(problem, orders),
            problem.forward,
            [i + w for i, w in zip(problem.input_gradient, problem.weight_gradient, strict=True)],
            problem.hop,
            problem.graph,
            problem.weight_gradient,
        ).spans
    }
    for task, head in enumerate(played.heads):
        stage, microbatch, kind = problem.split_task(task)
        assert starts[stage, microbatch, problem.kinds[kind]] == head
