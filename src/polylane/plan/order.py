"""Order of passes in a plan with ``schedule: auto``: as text in plan files, and as lanes.

A line for each group of workers, a word for each pass: ``f0.3`` is the forward pass of stage 0 over microbatch 3,
``b0.3`` its backward pass; ``i0.3`` and ``w0.3`` are the halves of a backward pass in two. An order may have both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from polylane.errors import PolylaneError, format_plural
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes

_LETTERS = {
    ActionKind.FORWARD: "f",
    ActionKind.BACKWARD: "b",
    ActionKind.BACKWARD_INPUT: "i",
    ActionKind.BACKWARD_WEIGHT: "w",
}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_WORD = re.compile(r"([fbiw])(\d{1,7})\.(\d{1,7})")

# What a microbatch goes through on a stage, in this order; a whole backward pass is two of these at once.
_HALVES = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_PARTS = {ActionKind.BACKWARD: _HALVES[1:]}


def format_order(lanes: Sequence[Sequence[Action]]) -> tuple[str, ...]:
    """Return the lines of an order of passes, one for each group of workers."""
    return tuple(" ".join(f"{_LETTERS[a.kind]}{a.stage}.{a.microbatch}" for a in lane) for lane in lanes)


def parse_order(lines: Sequence[str]) -> Lanes:
    """Return the lanes of an order of passes.

    Raises:
        PolylaneError: a word is no pass; it names the line and the word.
    """
    return tuple(tuple(_parse_line(line, number)) for number, line in enumerate(lines))


def _parse_line(line: str, number: int) -> Iterator[Action]:
    for word in line.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise PolylaneError(
                f"order.{number}: {word[:40]!r} is no pass: write f, b, i or w, a stage, a dot and a microbatch, as in "
                "f0.3"
            )
        yield Action(_KINDS[match[1]], int(match[2]), int(match[3]))


def has_halves(lines: Sequence[str]) -> bool:
    """Return whether some backward passes are in two halves."""
    return any(word.startswith("i") for line in lines for word in line.split())


def check_order(lines: Sequence[str], groups: Sequence[int], microbatches: int) -> None:
    """Refuse an order that does not run every pass of a plan once, on its workers, each after what it needs.

    Args:
        lines: the order, one line for each group of workers. Of every stage and microbatch it has a forward pass, and a
            backward pass that is either whole or in two halves.
        groups: for every stage, the number of the group of workers that has it.
        microbatches: number of microbatches of a step.

    Raises:
        PolylaneError: the order is not one of these passes.
    """
    lanes, count = parse_order(lines), 1 + max(groups)
    if len(lanes) != count:
        lines_of, groups_of = format_plural(len(lanes), "line"), format_plural(count, "group")
        raise PolylaneError(f"order has {lines_of}, for {groups_of} of workers")
    for number, lane in enumerate(lanes):
        passes = [(stage, m) for stage, group in enumerate(groups) if group == number for m in range(microbatches)]
        _check_passes(lane, number, passes)
        _check_places(lane, number)


def _check_passes(lane: Sequence[Action], number: int, passes: Sequence[tuple[int, int]]) -> None:
    """Check that a line has every pass of its stages and microbatches once, and no other."""
    # First what is there too much, then what is missing: a misspelt word is both, and better named as what it is.
    actions, known_passes = set[Action](), set(passes)
    for action in lane:
        if action in actions:
            raise PolylaneError(f"order.{number}: {_word(action)} is there twice")
        if (action.stage, action.microbatch) not in known_passes:
            raise PolylaneError(f"order.{number}: {_word(action)} does not belong there")
        actions.add(action)
    for stage, microbatch in passes:
        forward, backward, first_half, second = (Action(kind, stage, microbatch) for kind in _LETTERS)
        halves = [half for half in (first_half, second) if half in actions]
        if backward in actions and halves:
            raise PolylaneError(
                f"order.{number}: {_word(backward)} and {_word(halves[0])} are both there: a backward pass is either "
                "whole or in two halves"
            )
        missing = [forward] if forward not in actions else []
        if backward not in actions:
            # Without any of them it depends on the rest of the line what is thought to be missing.
            in_halves = halves or any(action.kind is ActionKind.BACKWARD_INPUT for action in lane)
            missing += [part for part in ((first_half, second) if in_halves else (backward,)) if part not in actions]
        if missing:
            raise PolylaneError(f"order.{number}: {_word(missing[0])} is missing")


def _check_places(lane: Sequence[Action], number: int) -> None:
    """Check that a microbatch's passes on a stage follow each other, and each kind of pass the microbatches.

    A whole backward pass is both of its halves at once.
    """
    # The last microbatch of every stage and kind of pass: the next one must be its successor, and no further than that
    # of the kind before it.
    progress = dict[tuple[int, ActionKind], int]()
    for action in lane:
        assert action.microbatch is not None
        for kind in _PARTS.get(action.kind, (action.kind,)):
            index = _HALVES.index(kind)
            earlier_progress = progress.get((action.stage, _HALVES[index - 1]), -1) if index else action.microbatch
            if progress.get((action.stage, kind), -1) != action.microbatch - 1 or earlier_progress < action.microbatch:
                raise PolylaneError(
                    f"order.{number}: {_word(action)} is out of its place: passes of a stage are in ascending order of "
                    "microbatch, and a backward pass comes after its forward pass"
                )
            progress[action.stage, kind] = action.microbatch


def _word(action: Action) -> str:
    return format_order([[action]])[0]


def check_order_runs(lines: Sequence[str], graph: StageGraph) -> None:
    """Refuse an order in which passes wait for each other in a circle.

    Args:
        lines: the order, one line for each group of workers.
        graph: which stages feed which.

    Raises:
        PolylaneError: it names a pass of the circle.
    """
    # A pass waits for the one before it on its workers, and for the values or gradients that it reads.
    waits: dict[Action, set[Action]] = {}
    lanes = parse_order(lines)
    actions = {action for lane in lanes for action in lane}
    for lane in lanes:
        for previous_action, action in zip((None, *lane), lane, strict=False):
            waits[action] = set() if previous_action is None else {previous_action}
            forward = action.kind is ActionKind.FORWARD
            neighbours = (graph.predecessors if forward else graph.successors)[action.stage]
            if action.kind is not ActionKind.BACKWARD_WEIGHT:
                # A neighbour's gradient comes from its backward pass, or from the first half of it.
                kinds = (action.kind,) if forward else (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
                sources = (Action(kind, stage, action.microbatch) for kind in kinds for stage in neighbours)
                waits[action] |= {source for source in sources if source in actions}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        word = format_order([[error.args[1][0]]])[0]
        raise PolylaneError(f"order: {word} waits for a pass that waits for it in turn") from None
