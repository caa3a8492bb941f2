"""Program states: what every rank waits for, and what it has begun, from its position in its program alone.

    action                     waits for                                    counted on
    receive                    its send, of the same value and microbatch   the channel, in the sender's order
    reduce                     the other ranks of the bucket                the bucket, after a rank's last pass
    after the last action      all ranks, for the sum of the loss           the step

Programs are static, so positions are all that is needed: the same walk as that over the counters which workers keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polylane.diagnosis.culprit import RankState, Wait
from polylane.program.program import Program
from polylane.schedule.action import WEIGHT_PASSES, Action, ActionKind

STEP_LINE = "step"


def states_at(programs: Sequence[Program], positions: Mapping[int, int]) -> dict[int, RankState]:
    """By rank, the state of every worker that is at a position in one and the same step.

    Args:
        programs: the programs of all workers, by rank.
        positions: by rank, the number of actions that it has finished.
    """
    numbers = {program.rank: _message_numbers(program) for program in programs}
    return {program.rank: _state_at(program, positions[program.rank], numbers) for program in programs}


# A message of one channel: its microbatch, its value, and whether that is a gradient.
_Message = tuple[int | None, str | None, bool]


def _message_numbers(program: Program) -> dict[tuple[str, _Message], int]:
    """The number of each message that a rank sends, on its channel."""
    counts: dict[str, int] = {}
    numbers: dict[tuple[str, _Message], int] = {}
    for action in program.actions:
        if action.kind is ActionKind.SEND:
            line = f"{program.rank}>{action.peer}"
            counts[line] = counts.get(line, 0) + 1
            numbers[line, _message(action)] = counts[line]
    return numbers


def _message(action: Action) -> _Message:
    return action.microbatch, action.value, action.gradient


def _launch_positions(actions: Sequence[Action]) -> dict[str, int]:
    """The position from which each bucket's reduction is under way: the last backward pass before it is done."""
    found, after_pass = dict[str, int](), 0
    for position, action in enumerate(actions):
        if action.kind in WEIGHT_PASSES:
            after_pass = position + 1
        elif action.kind is ActionKind.REDUCE and action.value is not None:
            found[action.value] = after_pass
    return found


def _state_at(program: Program, position: int, numbers: Mapping[int, Mapping[tuple[str, _Message], int]]) -> RankState:
    rank, actions, begun = program.rank, program.actions, dict[str, int]()
    for line in (f"{rank}>{a.peer}" for a in actions[:position] if a.kind is ActionKind.SEND):
        begun[line] = begun.get(line, 0) + 1
    begun |= {f"bucket {name}": 1 for name, launched in _launch_positions(actions).items() if position >= launched}
    if position >= len(actions):
        begun[STEP_LINE] = 1
        return RankState(Wait(STEP_LINE, 1, tuple(sorted(numbers))), begun)
    action = actions[position]
    if action.kind is ActionKind.RECEIVE and action.peer is not None:
        line = f"{action.peer}>{rank}"
        number = numbers.get(action.peer, {}).get((line, _message(action)), 0)
        return RankState(Wait(line, number, (action.peer, rank)), begun)
    if action.kind is ActionKind.REDUCE and action.value is not None:
        (ranks,) = (bucket.ranks for bucket in program.buckets if bucket.name == action.value)
        return RankState(Wait(f"bucket {action.value}", 1, ranks), begun)
    return RankState(None, begun)
