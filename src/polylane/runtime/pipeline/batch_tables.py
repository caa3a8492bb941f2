"""Batch tables: what one worker's program comes to for batches of one size, worked out before the first of them runs.

Which samples each microbatch has here, which box of a value goes to which peer, how large values are: a step looks it
all up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polylane.compile.batch_split import SampleShare
from polylane.compile.reshard import Resharder
from polylane.compile.value_spec import ValueSpec
from polylane.graph.batch import split_bounds
from polylane.program.boxes import IndexBox, box_shape
from polylane.program.program import Program
from polylane.schedule.action import Action, ActionKind


@dataclass(frozen=True)
class Route:
    """What of this worker's part of a value one action sends or receives.

    Attributes:
        box: by positions in that part.
        shape: of the message.
        factor: by which a sender multiplies it; 1 of what is received.
    """

    box: IndexBox
    shape: tuple[int, ...]
    factor: float


@dataclass(frozen=True)
class BatchTables:
    """One worker's part in batches of one size.

    Attributes:
        samples: in a batch, over all replicas.
        shares: of each microbatch that this worker computes on, the samples that are its own.
        microbatches: of each of these, the samples of the whole microbatch.
        held: of each of these, the samples that this worker's operators see.
        routes: of every send and receive that has something to carry, what it is.
        shapes: of every value that crosses, by its name and the samples that this worker's operators see.
        last_backward: position of the last backward pass among the program's actions; -1 where there is none.
    """

    samples: int
    shares: Mapping[int, SampleShare]
    microbatches: Mapping[int, int]
    held: Mapping[int, int]
    routes: Mapping[Action, Route]
    shapes: Mapping[tuple[str, int], tuple[int, ...]]
    last_backward: int


def build_tables(
    program: Program,
    relays: Resharder,
    wires: Mapping[str, ValueSpec],
    samples: int,
    shares: Mapping[int, SampleShare],
    batch_is_sharded: bool,
) -> BatchTables:
    """Work out one worker's part in batches of one size.

    Args:
        program: the worker's.
        relays: which pieces of values go where.
        wires: how values that cross look.
        samples: in a batch, over all replicas.
        shares: what the worker computes on, by microbatch.
        batch_is_sharded: whether replicas split operators between them, so that each sees the whole microbatch.
    """
    ends = split_bounds(samples, count_microbatches(program))
    whole = {i: ends[i][1] - ends[i][0] for i in shares}
    held = whole if batch_is_sharded else {i: share.samples for i, share in shares.items()}
    routes, last_backward = dict[Action, Route](), -1
    for index, action in enumerate(program.actions):
        if action.microbatch not in shares:
            continue
        if action.kind is ActionKind.BACKWARD:
            last_backward = index
        elif action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
            assert action.value is not None and action.peer is not None and action.microbatch is not None
            about = action.value, action.peer, whole[action.microbatch], action.gradient
            sends = action.kind is ActionKind.SEND
            box = relays.box_to_send(*about) if sends else relays.box_to_receive(*about)
            if box is not None:
                routes[action] = Route(box, box_shape(box), relays.send_factor(*about) if sends else 1.0)
    shapes = {(name, count): wire.shape(count) for name, wire in wires.items() for count in set(held.values())}
    return BatchTables(samples, shares, whole, held, routes, shapes, last_backward)


def count_microbatches(program: Program) -> int:
    """Into how many microbatches a program divides a batch."""
    return 1 + max((a.microbatch for a in program.actions if a.microbatch is not None), default=0)
