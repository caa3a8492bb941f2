"""Held messages: values and gradients between stages that a worker holds beside what its passes count themselves.

A pass counts what it reads and makes (:class:`.live_ranges.PeakMemory`), and a microbatch under way its values. Beside
them the runtime holds, between passes:

==================================  ==================================  ==============================================
message                             held from                           until
==================================  ==================================  ==============================================
received value or gradient          its receive is posted               the pass that reads it
sent gradient                       the backward pass that makes it     the backward pass that waits for the send
sent value that has no gradient     its microbatch's backward pass      the backward pass that waits for the send
gradient of a stage of this worker  the backward pass that makes it     that stage's backward pass
==================================  ==================================  ==============================================

A value whose gradient comes back has been taken by then, and is held with its microbatch until that very pass.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polylane.cost.memory.live_ranges import PeakMemory
from polylane.graph.partition import StageCrossing
from polylane.program.program import Program
from polylane.program.waits import posting_places, waiting_microbatch
from polylane.schedule.action import PASSES, Action, ActionKind

_Pass = tuple[int, int]  # stage and microbatch


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message that a worker holds during some of its passes, beside what these count themselves.

    Attributes:
        bytes: size on the worker.
        first, end: the passes during which it is held, by their numbers in the worker's order: from ``first`` on, and
            before ``end``. With n passes the sums of gradients and the step, behind the last one, are number n.
    """

    bytes: float
    first: int
    end: int


def find_held_messages(program: Program, needs: Mapping[int, PeakMemory]) -> tuple[HeldMessage, ...]:
    """Return the messages that a worker holds in a step.

    Args:
        program: the worker's passes and messages.
        needs: memory of one microbatch for every stage of the worker.
    """
    passes = [action for action in program.actions if action.kind in PASSES]
    places = _PassPlaces(passes)
    sizes = {stage: _MessageSizes(program, stage, need) for stage, need in needs.items()}
    return tuple(message for message in _held(program, places, sizes) if message.bytes and message.first < message.end)


def sum_held(messages: Sequence[HeldMessage], passes: int) -> list[float]:
    """Return the bytes of messages that are held during every pass, and behind the last one."""
    change = [0.0] * (passes + 2)
    for message in messages:
        change[message.first] += message.bytes
        change[message.end] -= message.bytes
    return list(itertools.accumulate(change[:-1]))


def _held(program: Program, places: _PassPlaces, sizes: Mapping[int, _MessageSizes]) -> Iterator[HeldMessage]:
    compute = [position for position, action in enumerate(program.actions) if action.kind in PASSES]
    posted = posting_places(program.actions)
    for position, action in enumerate(program.actions):
        if action.kind is ActionKind.RECEIVE:
            assert action.value is not None and action.microbatch is not None
            size, pass_key = sizes[action.stage], (action.stage, action.microbatch)
            value_bytes = size.gradients_received if action.gradient else size.values_received
            reads = places.backward if action.gradient else places.forward
            yield HeldMessage(value_bytes[action.value], bisect_left(compute, posted[position]), reads[pass_key])
    yield from _held_sends(program, places, sizes)
    yield from _handed_gradients(program, places, sizes)


def _held_sends(program: Program, places: _PassPlaces, sizes: Mapping[int, _MessageSizes]) -> Iterator[HeldMessage]:
    # What goes to several workers is in memory once, until the last one that is waited for.
    messages = dict[tuple[int, int, str, bool], HeldMessage]()
    for action in program.actions:
        if action.kind is not ActionKind.SEND:
            continue
        assert action.value is not None and action.microbatch is not None
        stage, microbatch, value = action.stage, action.microbatch, action.value
        end = places.first_backward(stage, waiting_microbatch(program, action))
        backward_place = places.backward.get((stage, microbatch), end)
        size = sizes[stage].gradients_sent[value] if action.gradient else sizes[stage].values_kept.get(value, 0.0)
        key = stage, microbatch, value, action.gradient
        if key not in messages or messages[key].end < end:
            messages[key] = HeldMessage(size, backward_place + action.gradient, end)
    yield from messages.values()


def _handed_gradients(
    program: Program, places: _PassPlaces, sizes: Mapping[int, _MessageSizes]
) -> Iterator[HeldMessage]:
    """Yield the gradients that one stage of the worker hands to another one; those of one value are added up."""
    gradients = dict[tuple[str, _Pass], tuple[int, float]]()
    for (value, reader), source in program.local_sources.items():
        size = sizes[reader].gradients_sent.get(value, 0.0)
        for (stage, microbatch), backward_place in places.backward.items():
            if stage == reader:
                key = value, (source, microbatch)
                gradients[key] = min(gradients.get(key, (backward_place + 1, size)), (backward_place + 1, size))
    for (_, pass_key), (begin, size) in gradients.items():
        yield HeldMessage(size, begin, places.backward[pass_key])


class _PassPlaces:
    """Numbers of a worker's passes.

    Attributes:
        forward, backward: number of the pass by (stage, microbatch); of a backward pass in halves the first one.
    """

    def __init__(self, passes: Sequence[Action]) -> None:
        self.forward, self.backward = dict[_Pass, int](), dict[_Pass, int]()
        self._order: dict[int, list[tuple[int, int]]] = {}
        self._count = len(passes)
        for number, action in enumerate(passes):
            assert action.microbatch is not None
            if action.kind is ActionKind.FORWARD:
                self.forward[action.stage, action.microbatch] = number
            elif action.kind is not ActionKind.BACKWARD_WEIGHT:
                self.backward[action.stage, action.microbatch] = number
                self._order.setdefault(action.stage, []).append((action.microbatch, number))

    def first_backward(self, stage: int, microbatch: int) -> int:
        """Return the number of a stage's first backward pass of a microbatch or a later one; if none, of the end."""
        of_stage = self._order.get(stage, [])
        at = bisect_left(of_stage, (microbatch, 0))
        return of_stage[at][1] if at < len(of_stage) else self._count + 1


class _MessageSizes:
    """Bytes of each message of one stage, by value: its share of what the stage receives or sends.

    Attributes:
        values_received, gradients_received: messages from other stages.
        gradients_sent: gradients of values from other stages.
        values_kept: values for other stages, of those whose gradient does not come back.
    """

    def __init__(self, program: Program, stage: int, need: PeakMemory) -> None:
        inputs, outputs = program.inputs(stage), program.outputs(stage)
        self.values_received = _share_out(need.values_received, inputs)
        self.gradients_sent = _share_out(need.gradients_sent, [c for c in inputs if c.requires_grad])
        self.gradients_received = _share_out(need.gradients_received, [c for c in outputs if c.requires_grad])
        silent = [c for c in outputs if not c.requires_grad]
        self.values_kept = _share_out(max(need.values_sent - need.gradients_received, 0.0), silent)


def _share_out(total: float, crossings: Sequence[StageCrossing]) -> dict[str, float]:
    """Divide bytes among crossing values by their sizes."""
    size_total = sum(crossing.bytes for crossing in crossings)
    return {crossing.value: total * crossing.bytes / size_total if size_total else 0.0 for crossing in crossings}
