"""Unrolling: the programs of an asynchronous pipeline over several steps, from an empty pipeline to an empty one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polylane.plan.lanes import stage_graph_of
from polylane.plan.plan import Plan
from polylane.program.program import Program
from polylane.schedule.action import Action
from polylane.schedule.asynchronous import steps_in_flight


def unroll(programs: Sequence[Program], plan: Plan, steps: int = 2) -> tuple[Program, ...]:
    """Return the programs of an asynchronous pipeline over several steps, from an empty pipeline to an empty one.

    Microbatches are numbered through. After the last step come as many more as its batch is under way.
    """
    count = plan.microbatches

    def number(action: Action, step: int) -> Action:
        return replace(action, microbatch=(step - action.steps_back) * count + (action.microbatch or 0), steps_back=0)

    places = place_unrolled(programs, plan, steps)
    return tuple(
        replace(program, actions=tuple(number(program.actions[index], step) for step, index in places[program.rank]))
        for program in programs
    )


def place_unrolled(programs: Sequence[Program], plan: Plan, steps: int) -> dict[int, list[tuple[int, int]]]:
    """Return by rank, for each action of :func:`unroll`, its step's number, and its place in that step's program."""
    drain_steps = steps_in_flight(stage_graph_of(programs[0].partition, plan), plan.most_turns)
    batches = steps + drain_steps
    return {
        program.rank: [
            (step, index)
            for step in range(batches + drain_steps)
            for index, action in enumerate(program.actions)
            if 0 <= step - action.steps_back < batches
        ]
        for program in programs
    }
