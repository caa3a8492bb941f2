"""Batch tables: what one worker's program comes to for batches of one size, worked out before the first of them runs.

Which samples each microbatch has here, which box of a value goes to which peer, how large values are: a step looks it
all up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polylane.graph.batch import bounds
from polylane.program.program import Program
from polylane.program.relay import Box, shape_of
from polylane.runtime.division import Share
from polylane.runtime.relays import Relays
from polylane.runtime.value_spec import Wire
from polylane.schedule.action import Action, Kind


@dataclass(frozen=True)
class Route:
    """What of this worker's part of a value one action sends or receives.

    Attributes:
        box: by positions in that part.
        shape: of the message.
        factor: by which a sender multiplies it; 1 of what is received.
    """

    box: Box
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
    shares: Mapping[int, Share]
    microbatches: Mapping[int, int]
    held: Mapping[int, int]
    routes: Mapping[Action, Route]
    shapes: Mapping[tuple[str, int], tuple[int, ...]]
    last_backward: int


def build_tables(
    program: Program,
    relays: Relays,
    wires: Mapping[str, Wire],
    samples: int,
    shares: Mapping[int, Share],
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
    ends = bounds(samples, count_microbatches(program))
    whole = {i: ends[i][1] - ends[i][0] for i in shares}
    held = whole if batch_is_sharded else {i: share.samples for i, share in shares.items()}
    routes, last_backward = dict[Action, Route](), -1
    for index, action in enumerate(program.actions):
        if action.microbatch not in shares:
            continue
        if action.kind is Kind.BACKWARD:
            last_backward = index
        elif action.kind in (Kind.SEND, Kind.RECEIVE):
            assert action.value is not None and action.peer is not None and action.microbatch is not None
            about = action.value, action.peer, whole[action.microbatch], action.gradient
            sends = action.kind is Kind.SEND
            box = relays.sent(*about) if sends else relays.received(*about)
            if box is not None:
                routes[action] = Route(box, shape_of(box), relays.factor(*about) if sends else 1.0)
    shapes = {(name, count): wire.shape(count) for name, wire in wires.items() for count in set(held.values())}
    return BatchTables(samples, shares, whole, held, routes, shapes, last_backward)


def count_microbatches(program: Program) -> int:
    """Into how many microbatches a program divides a batch."""
    return 1 + max((a.microbatch for a in program.actions if a.microbatch is not None), default=0)
