"""Laws of recorded launches: could NCCL hang, read too early, or run out of multiprocessors on these?

A communication kernel spins on its multiprocessors until its partners have launched theirs. What runs beside it is not
promised: a wait of the host for the device (an allocator near its limit, a kernel that is loaded, a value that is read)
holds back all later launches of a rank until its earlier ones have ended. So the launches are safe, whatever waits for
what, if they have an order that all ranks agree on, where each kernel ends before the next one of its rank begins:

    rank 0    A ──▶ B ──▶ C         A, B, C launched in this order; each meets the partner's launch of the same number
              │     │     │         in the same communicator. One node for each meeting, an edge for each rank's next
    rank 1    A ──▶ C ──▶ B         launch: a cycle (B before C at rank 0, C before B at rank 1) is a possible deadlock.

NCCL's user guide, "Using multiple NCCL communicators concurrently", asks for such an order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx

from tests.support.nccl.fake_nccl import Launch

MULTIPROCESSORS = 132  # of an H100
CONNECT = "connect"

Records = Sequence[Sequence[Launch]]  # by rank


def list_violations(records: Records) -> list[str]:
    """Return every law that the launches of all ranks break, a sentence each, most severe first."""
    return [
        *list_unequal_orders(records),
        *list_cycles(records),
        *list_crowds(records),
        *list_late_connections(records),
        *list_misused_tensors(records),
        *list_held_messages(records),
    ]


def name_meeting(launch: Launch) -> tuple[tuple[int, ...], str, int]:
    """Return what all partners of a kernel have in common: their ranks, their communicator, the kernel's number."""
    return *launch.group, launch.number


def list_unequal_orders(records: Records) -> Iterator[str]:
    """Yield the communicators whose ranks launch different kernels under one number, or not equally many."""
    by_group: dict[tuple[tuple[int, ...], str], dict[int, list[Launch]]] = defaultdict(lambda: defaultdict(list))
    for rank, launches in enumerate(records):
        for launch in launches:
            by_group[launch.group][rank].append(launch)
    for (ranks, _), launches in by_group.items():
        counts = {rank: len(launches[rank]) for rank in ranks}
        if len(set(counts.values())) > 1:
            yield f"order: ranks {ranks} launch different numbers of kernels: {counts}"
        for row in zip(*(launches[rank] for rank in ranks), strict=False):
            kinds = {("message" if launch.kind in ("send", "recv") else launch.kind, launch.form) for launch in row}
            if len(kinds) > 1:
                yield f"order: ranks {ranks} meet in {[(launch.kind, launch.form, launch.line) for launch in row]}"
                break


def list_cycles(records: Records) -> Iterator[str]:
    """Yield the launches that wait for each other where each launch holds back all later ones of its rank."""
    graph: nx.DiGraph[tuple[tuple[int, ...], str, int]] = nx.DiGraph()
    names = {}
    for rank, launches in enumerate(records):
        graph.add_nodes_from(map(name_meeting, launches))
        graph.add_edges_from((name_meeting(a), name_meeting(b)) for a, b in pairwise(launches))
        names |= {(rank, name_meeting(launch)): launch for launch in launches}
    for component in nx.strongly_connected_components(graph):
        if len(component) > 1:
            cycle = [edge[0] for edge in nx.find_cycle(graph.subgraph(component))]
            parts = [
                f"rank {rank} {names[rank, meeting].kind} {names[rank, meeting].line}"
                for meeting in cycle
                for rank in meeting[0]
                if (rank, meeting) in names
            ]
            yield f"cycle: of {len(component)} kernels, so: {' -> '.join(parts[:8])}"


def count_blocks(launch: Launch, launches: Sequence[Launch]) -> int:
    """Return the multiprocessors that a kernel and those before it may take at the same time.

    Kernels of one communicator run one after the other, so that each communicator counts once.
    """
    running = {other.group: other.blocks for other in (launch, *(launches[index] for index in launch.in_flight))}
    return sum(running.values())


def list_crowds(records: Records) -> Iterator[str]:
    """Yield the lines whose kernels may need more multiprocessors than there are, with all that spin beside them."""
    most: Counter[str] = Counter()
    for launches in records:
        for launch in launches:
            most[launch.line] = max(most[launch.line], count_blocks(launch, launches))
    for line, blocks in most.items():
        if blocks > MULTIPROCESSORS:
            yield f"crowd: {blocks} multiprocessors of {MULTIPROCESSORS} may be asked for at {line}"


def list_late_connections(records: Records) -> Iterator[str]:
    """Yield the kernels of a communicator's first step whose kind it has not run before: NCCL may connect only then."""
    late = set()
    for launches in records:
        connected = {(launch.group, launch.kind) for launch in launches if launch.phase == CONNECT}
        for launch in launches:
            if launch.phase != CONNECT and (launch.group, launch.kind) not in connected:
                late.add((launch.kind, launch.line))
    yield from (f"connect: the first {kind} of a communicator is in a step, at {line}" for kind, line in sorted(late))


def list_misused_tensors(records: Records) -> Iterator[str]:
    """Yield the kernels that nobody waits for, and tensors that were written while a kernel could use them."""
    for line in sorted({launch.line for launches in records for launch in launches if not launch.waited}):
        yield f"edge: nothing waits for what is launched at {line}"
    for line, side in sorted({(la.line, la.changed) for launches in records for la in launches if la.changed}):
        yield f"edge: the {side} of what is launched at {line} is written before its wait"


def list_held_messages(records: Records) -> Iterator[str]:
    """Yield the lines of point-to-point kernels: the allocator keeps their tensors until a later event of a channel."""
    lines = sorted({la.line for launches in records for la in launches if la.kind in ("send", "recv")})
    yield from (f"memory: a point-to-point kernel holds its tensor back, at {line}" for line in lines)
