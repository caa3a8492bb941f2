"""Synchronous pipeline schedules: the order in which every stage runs its forwards and backwards.

A schedule is a function ``(stages, microbatches) -> lanes``; ``lanes[s]`` is what stage s does, first to last. Stages
are a number, of a chain, or a `StageGraph`, whose branches run at the same time. A schedule has no durations:
`polylane.cost.simulator.schedule_tasks.simulate_schedule` adds them. In the tables below a row is a stage, a column is
one tick, a forward takes one tick and so does a backward; ``0`` is the forward of microbatch 0, ``<0`` its backward.
Every schedule here runs backwards in ascending order of microbatch, so gradients accumulate as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from polylane.schedule.action import Action, ActionKind
from polylane.schedule.stage_graph import StageGraph, as_stage_graph

Lanes = tuple[tuple[Action, ...], ...]


def naive(stages: int | StageGraph, microbatches: int) -> Lanes:
    """Build the naive schedule: a microbatch passes forward and backward through all stages before the next one starts.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    #     0  1  2  3  4  5  6  7  8  9 10 11
    # 0   0  ·  ·  ·  · <0  1  ·  ·  ·  · <1
    # 1   ·  0  ·  · <0  ·  ·  1  ·  · <1  ·
    # 2   ·  ·  0 <0  ·  ·  ·  ·  1 <1  ·  ·
    count = checked_stage_graph(stages, microbatches).stages
    return tuple(
        tuple(action for m in range(microbatches) for action in (_forward(s, m), _backward(s, m))) for s in range(count)
    )


def all_forward_all_backward(stages: int | StageGraph, microbatches: int) -> Lanes:
    """Build the GPipe schedule: every forward, then every backward; all microbatches are live in between.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019 (there
    the backwards run last in first out; ascending order costs no tick and keeps one device's order of accumulation).

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    #     0  1  2  3  4  5  6  7  8  9 10 11
    # 0   0  1  2  3  ·  ·  ·  · <0 <1 <2 <3
    # 1   ·  0  1  2  3  ·  · <0 <1 <2 <3  ·
    # 2   ·  ·  0  1  2  3 <0 <1 <2 <3  ·  ·
    count = checked_stage_graph(stages, microbatches).stages
    return tuple(
        tuple(_forward(s, m) for m in range(microbatches)) + tuple(_backward(s, m) for m in range(microbatches))
        for s in range(count)
    )


def one_forward_one_backward(stages: int | StageGraph, microbatches: int) -> Lanes:
    """Build the 1F1B schedule: k-1-s forwards to warm up on stage s, then one forward and one backward in turn.

    It takes as long as all forward, all backward where a hop costs nothing, with min(m, k-s) live microbatches instead
    of m. In a graph with branches k-s is the number of stages on the longest path from stage s to the end: a stage has
    started as many microbatches as the path ahead can hold, and every stage before it at least one more, so that no two
    wait for each other.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021, and "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    #     0  1  2  3  4  5  6  7  8  9 10 11
    # 0   0  1  2  ·  · <0  3 <1  · <2  · <3
    # 1   ·  0  1  · <0  2 <1  3 <2  · <3  ·
    # 2   ·  ·  0 <0  1 <1  2 <2  3 <3  ·  ·
    depth = checked_stage_graph(stages, microbatches).depth_to_end
    return tuple(_alternate(s, min(ahead - 1, microbatches), microbatches) for s, ahead in enumerate(depth))


def warmed_up(stages: int | StageGraph, microbatches: int, warm_up: Sequence[int]) -> Lanes:
    """Build 1F1B with other warm-ups: ``warm_up[s]`` forwards on stage s, then one forward and one backward in turn.

    The lanes wait for each other in a circle unless every stage warms up with more than those that it feeds.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    checked_stage_graph(stages, microbatches)
    return tuple(_alternate(s, min(forwards, microbatches), microbatches) for s, forwards in enumerate(warm_up))


def _alternate(stage: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    """Build the lane of one stage: ``warm_up`` forwards, then forwards and backwards in turn, then what is left."""
    steady = microbatches - warm_up
    return (
        *(_forward(stage, m) for m in range(warm_up)),
        *(action for m in range(steady) for action in (_forward(stage, warm_up + m), _backward(stage, m))),
        *(_backward(stage, m) for m in range(steady, microbatches)),
    )


def _forward(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.FORWARD, stage, microbatch)


def _backward(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.BACKWARD, stage, microbatch)


def checked_stage_graph(stages: int | StageGraph, microbatches: int) -> StageGraph:
    """Return the stage graph, a number of stages as a chain.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches must be a whole number of at least 1, not {microbatches!r}")
    return as_stage_graph(stages)
