"""Batch tables: one worker's shares, message boxes and shapes for batches of one size, computed before the first runs.

A step only looks them up: which samples each microbatch has here, which box of a value goes to which peer, and how
large values are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polylane.compile.reshard import Resharder, SentShare
from polylane.compile.sample_shares import SampleShare
from polylane.graph.batch import split_bounds
from polylane.program.boxes import IndexBox, box_shape
from polylane.program.program import Program
from polylane.schedule.action import WEIGHT_PASSES, Action, ActionKind

_SEND_OR_RECEIVE = (ActionKind.SEND, ActionKind.RECEIVE)


@dataclass(frozen=True)
class Route:
    """The part of this worker's shard of a value that one action sends or receives.

    Attributes:
        box: box of the message, by positions in this worker's shard.
        shape: shape of the message's tensor.
        share: share of the values that a sender sends; None: all of them, and for a receiver.
    """

    box: IndexBox
    shape: tuple[int, ...]
    share: SentShare | None


@dataclass(frozen=True)
class BatchTables:
    """One worker's part in batches of one size.

    Attributes:
        samples: samples of a batch, over all replicas.
        shares: by microbatch that this worker computes on, its own samples.
        microbatches: by microbatch, the number of samples of all replicas in it.
        held: by microbatch, the number of samples that this worker's operators see.
        routes: by send or receive action, its message; actions with an empty box are left out.
        shapes: shape of every crossing value, by its name and the number of samples that this worker's operators see.
        last_backwards: by stage of this worker, the position of the action that completes its parameters' gradients.
        open_sizes: the batch's sizes that the graph leaves open.
    """

    samples: int
    shares: Mapping[int, SampleShare]
    microbatches: Mapping[int, int]
    held: Mapping[int, int]
    routes: Mapping[Action, Route]
    shapes: Mapping[tuple[str, int], tuple[int, ...]]
    last_backwards: Mapping[int, int]
    open_sizes: tuple[int, ...] = ()


def build_tables(
    program: Program,
    relays: Resharder,
    samples: int,
    shares: Mapping[int, SampleShare],
    batch_is_sharded: bool,
    open_sizes: tuple[int, ...] = (),
) -> BatchTables:
    """Compute one worker's tables for batches of one size.

    Args:
        program: program of this worker, whose actions are looked at.
        relays: resharder, which knows the crossing values and computes the boxes of messages.
        samples: samples of a batch, over all replicas.
        shares: by microbatch, the samples that this worker computes on.
        batch_is_sharded: whether replicas shard operators along the batch, so that each sees the whole microbatch.
        open_sizes: the batch's sizes that the graph leaves open, for which the resharder is.
    """
    ends = split_bounds(samples, program.microbatches)
    sizes = {i: ends[i][1] - ends[i][0] for i in shares}
    # Operators sharded along the batch work on sizes of the whole microbatch, and know their own rows by their shard.
    counts = sizes if batch_is_sharded else {i: share.samples for i, share in shares.items()}
    routes, last_backwards = dict[Action, Route](), dict[int, int]()
    for index, action in enumerate(program.actions):
        if action.microbatch not in shares:  # a microbatch without samples, or an action that has no microbatch
            continue
        if action.kind in WEIGHT_PASSES:
            last_backwards[action.stage] = index
        elif action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
            assert action.value is not None and action.peer is not None and action.microbatch is not None
            about = action.value, action.peer, sizes[action.microbatch], action.gradient
            sends = action.kind is ActionKind.SEND
            box = relays.box_to_send(*about) if sends else relays.box_to_receive(*about)
            if box is not None:
                routes[action] = Route(box, box_shape(box), relays.sent_share(*about) if sends else None)
    shapes = {
        (name, count): wire.shape(count) for name, wire in relays.value_specs.items() for count in set(counts.values())
    }
    return BatchTables(samples, shares, sizes, counts, routes, shapes, last_backwards, open_sizes)


def runs(action: Action, tables: BatchTables, sums: bool = True) -> bool:
    """Return whether an action has anything to do for a batch.

    Args:
        action: an action of this worker's program.
        tables: this worker's tables for batches of that size.
        sums: whether gradients are summed with other replicas even where this one has no samples.
    """
    if action.microbatch is not None and action.microbatch not in tables.shares:
        return False  # a microbatch without samples, skipped by every worker alike
    if action.kind is ActionKind.REDUCE and not tables.shares and not sums:
        return False  # a replica-local step without samples of its own: there is nothing to sum
    # An empty box: the peer skips its half of the message, too.
    return action.kind not in _SEND_OR_RECEIVE or action in tables.routes
