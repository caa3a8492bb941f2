"""Deadlock check: proves before the run that sends and receives match, in order, and that no ranks wait in a cycle."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import itemgetter

import networkx as nx

from polylane.program.program import Program
from polylane.program.waits import posting_places, waiting_microbatch
from polylane.schedule.action import Action, ActionKind

Place = tuple[int, int]  # rank, position in its program


def list_channels(programs: Sequence[Program]) -> list[tuple[int, int]]:
    """Return the directed pairs (sender, receiver) between which messages are sent, sorted."""
    return sorted(
        {(p.rank, a.peer) for p in programs for a in p.actions if a.kind is ActionKind.SEND and a.peer is not None}
    )


def match_messages(programs: Sequence[Program]) -> list[tuple[Place, Place]]:
    """Match every send with its receive: the n-th with the n-th on each directed pair of ranks, as NCCL and gloo do.

    Raises:
        RuntimeError: a message without a partner, or partners that name different values.
    """
    sends: dict[tuple[int, int], list[tuple[Place, Action]]] = {}
    receives: dict[tuple[int, int], list[tuple[Place, Action]]] = {}
    for program in programs:
        for position, action in enumerate(program.actions):
            if action.kind is ActionKind.SEND and action.peer is not None:
                sends.setdefault((program.rank, action.peer), []).append(((program.rank, position), action))
            elif action.kind is ActionKind.RECEIVE and action.peer is not None:
                receives.setdefault((action.peer, program.rank), []).append(((program.rank, position), action))
    pairs = []
    for channel in sends.keys() | receives.keys():
        out, into = sends.get(channel, []), receives.get(channel, [])
        if len(out) != len(into):
            raise RuntimeError(f"ranks {channel[0]} -> {channel[1]}: {len(out)} sends meet {len(into)} receives")
        for (sender, sent), (receiver, received) in zip(out, into, strict=True):
            if (sent.value, sent.microbatch, sent.gradient) != (received.value, received.microbatch, received.gradient):
                raise RuntimeError(f"ranks {channel[0]} -> {channel[1]}: {sent} would meet {received}")
            pairs.append((sender, receiver))
    return pairs


def check(programs: Sequence[Program]) -> None:
    """Raise RuntimeError unless the programs can run to their end, whatever the timing.

    An action waits for the one before it and, if it receives, for its send; a backward pass waits until messages of
    earlier microbatches have been taken, which may be as late as their receives are posted. The programs can be run if
    and only if that relation has no cycle.
    """
    waits = nx.DiGraph()
    for program in programs:
        _check_handed_on(program)
        nx.add_path(waits, [(program.rank, i) for i in range(len(program.actions))])
    messages = match_messages(programs)
    waits.add_edges_from(messages)
    waits.add_edges_from(_waits_for_sends(programs, messages))
    if not nx.is_directed_acyclic_graph(waits):
        of_rank = {program.rank: program for program in programs}
        circle = [of_rank[rank].actions[i] for (rank, i), _ in nx.find_cycle(waits)]
        raise RuntimeError(f"these actions wait for each other: {circle}")


def _waits_for_sends(
    programs: Sequence[Program], messages: Sequence[tuple[Place, Place]]
) -> Iterator[tuple[Place, Place]]:
    """Yield what comes before the posting of each receive, with the backward pass that waits for the message."""
    of_rank = {program.rank: program for program in programs}
    posted = {program.rank: posting_places(program.actions) for program in programs}
    passes = backward_passes(programs)
    for (sender, sent), (receiver, received) in messages:
        # The message is taken once its receive is posted, for which the receiver must have run what comes before.
        program, predecessor = of_rank[sender], posted[receiver][received] - 1
        action = program.actions[sent]
        if predecessor < 0 or action.microbatch is None:
            continue
        pairs = passes.get((sender, action.stage), [])
        # Passes of a kind follow the microbatches, so that the first one that waits is found by its number.
        at = bisect_left(pairs, waiting_microbatch(program, action), key=itemgetter(1))
        # Of an unrolled pipeline there are the passes of several batches: those of a later one do not wait.
        if at < len(pairs) and pairs[at][1] // program.microbatches == action.microbatch // program.microbatches:
            yield (receiver, predecessor), (sender, pairs[at][0])


def backward_passes(programs: Sequence[Program]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the backward passes of each rank and stage, or their first halves: (position, microbatch), in order."""
    passes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for program in programs:
        for position, action in enumerate(program.actions):
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and action.microbatch is not None:
                passes.setdefault((program.rank, action.stage), []).append((position, action.microbatch))
    return passes


def _check_handed_on(program: Program) -> None:
    """Raise RuntimeError unless what a stage gets from another one of its worker is there, both ways, when it runs."""
    # No message and no lock orders these: stages of one worker hand values over in its memory.
    passes = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    positions = {
        (action.kind is ActionKind.FORWARD, action.stage, action.microbatch): position
        for position, action in enumerate(program.actions)
        if action.kind in passes and not action.steps_back
    }
    for (value, reader), source in program.local_sources.items():
        for (forward, stage, microbatch), position in positions.items():
            if stage == reader and (source_position := positions.get((forward, source, microbatch))) is not None:
                producer, consumer = (source_position, position) if forward else (position, source_position)
                if producer > consumer:
                    raise RuntimeError(
                        f"{value} of microbatch {microbatch} goes from stage {source} to stage {reader} of rank "
                        f"{program.rank} before it is there"
                    )
