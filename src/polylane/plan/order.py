"""Order of passes in a plan with ``schedule: auto``: as text in plan files, and as lanes.

A line for each group of workers, a word for each pass: ``f0.3`` is the forward pass of stage 0 over microbatch 3,
``b0.3`` its backward pass; ``i0.3`` and ``w0.3`` are the halves of a backward pass in two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from polylane.errors import PolylaneError
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

# Kinds of pass that a microbatch goes through on a stage, in this order.
_WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)
_HALVES = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


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
        found = _WORD.fullmatch(word)
        if found is None:
            raise PolylaneError(
                f"order.{number}: {word[:40]!r} is no pass: write f, b, i or w, a stage, a dot and a microbatch, as in "
                "f0.3"
            )
        yield Action(_KINDS[found[1]], int(found[2]), int(found[3]))


def has_halves(lines: Sequence[str]) -> bool:
    """Return whether backward passes are in two halves."""
    return any(word.startswith("i") for line in lines[:1] for word in line.split())


def check_order(lines: Sequence[str], groups: Sequence[int], microbatches: int) -> None:
    """Refuse an order that does not run every pass of a plan once, on its workers, each after what it needs.

    Args:
        lines: the order, one line for each group of workers.
        groups: for every stage, the number of the group of workers that has it.
        microbatches: number of microbatches of a step.

    Raises:
        PolylaneError: the order is not one of these passes.
    """
    lanes, kinds, count = parse_order(lines), _HALVES if has_halves(lines) else _WHOLE, 1 + max(groups)
    if len(lanes) != count:
        raise PolylaneError(f"order has {len(lanes)} lines, and there are {count} groups of workers")
    for number, lane in enumerate(lanes):
        wanted = [
            Action(kind, stage, microbatch)
            for stage, group in enumerate(groups)
            if group == number
            for microbatch in range(microbatches)
            for kind in kinds
        ]
        if len(lane) != len(wanted) or set(lane) != set(wanted):
            wrong = [a for a in lane if a not in set(wanted) or lane.count(a) > 1]
            why = "does not belong there" if wrong else "is missing"
            word = format_order([[*wrong, *(a for a in wanted if a not in set(lane))][:1]])[0]
            raise PolylaneError(f"order.{number}: {word} {why}")
        _check_places(lane, number, kinds, microbatches)


def _check_places(lane: Sequence[Action], number: int, kinds: Sequence[ActionKind], microbatches: int) -> None:
    """Check that a microbatch's passes on a stage follow each other, and each kind of pass the microbatches."""
    done = dict[tuple[int, ActionKind], int]()
    for action in lane:
        assert action.microbatch is not None
        place = kinds.index(action.kind)
        before = done.get((action.stage, kinds[place - 1]), -1) if place else microbatches
        if done.get((action.stage, action.kind), -1) != action.microbatch - 1 or before < action.microbatch:
            raise PolylaneError(
                f"order.{number}: {format_order([[action]])[0]} is out of its place: passes of a stage "
                "are in ascending order of microbatch, and a backward pass comes after its forward pass"
            )
        done[action.stage, action.kind] = action.microbatch


def check_order_runs(lines: Sequence[str], graph: StageGraph) -> None:
    """Refuse an order in which passes wait for each other in a circle.

    Args:
        lines: the order, one line for each group of workers.
        graph: which stages feed which.

    Raises:
        PolylaneError: it names a pass of the circle.
    """
    waits: dict[Action, set[Action]] = {}
    for lane in parse_order(lines):
        for before, action in zip((None, *lane), lane, strict=False):
            waits[action] = set() if before is None else {before}
            forward = action.kind is ActionKind.FORWARD
            others = (graph.predecessors if forward else graph.successors)[action.stage]
            if action.kind is not ActionKind.BACKWARD_WEIGHT:
                waits[action] |= {Action(action.kind, other, action.microbatch) for other in others}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        word = format_order([[error.args[1][0]]])[0]
        raise PolylaneError(f"order: {word} waits for a pass that waits for it in turn") from None
