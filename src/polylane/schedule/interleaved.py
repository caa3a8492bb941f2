"""Interleaved 1F1B: every rank has several virtual stages, so that the pipeline fills and drains in smaller steps.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from polylane.schedule.action import Action, ActionKind
from polylane.schedule.synchronous import Lanes


def interleaved(ranks: int, chunks: int, microbatches: int) -> Lanes:
    """Build the lanes of a chain of ``ranks * chunks`` virtual stages, where rank r runs those numbered c * ranks + r.

    Microbatches go through a rank in rounds, each of as many microbatches as there are ranks: all of a round through
    the first virtual stage, then through the next one; backwards go the other way. A rank warms up with the forwards of
    (chunks - 1) rounds and two for every rank after it, then alternates one forward and one backward, then runs the
    backwards that are left.

    With F and B the ticks of all of a rank's chunks, and no ticks for a hop, N microbatches on k ranks take
    (vN + k - 1)(F + B)/v: the bubble is 1/v of that of 1F1B, for v times as many messages. Where N is no multiple of k,
    N // k rounds share the microbatches as evenly as they can, larger ones first, which takes no tick more than that
    formula says, and keeps more microbatches alive; fewer microbatches than ranks are one round, and take
    (vk + N - 1)(F + B)/v. Backwards of a virtual stage are in ascending order of microbatch.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
    section 2.2.2 (there N must be a multiple of k, and the rounds are the same).

    Args:
        ranks: number of ranks, k, each of which has a lane.
        chunks: virtual stages of each rank, v; 1 is 1F1B.
        microbatches: number of microbatches of a step, N.

    Returns:
        A lane for each rank; ``stage`` of its actions is the virtual stage.

    Raises:
        ValueError: fewer than one rank, chunk or microbatch.
    """
    # Two ranks of two chunks; ' marks the second one.
    #     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
    # 0   0   1   0'  1'  2 <0'   3 <1'   2' <0  3'  <1   · <2'   · <3'  <2  <3
    # 1   ·   0   1   0' <0'  1' <1'  2  <0   3  <1  2' <2'  3' <3'  <2  <3   ·
    rounds = _rounds(ranks, chunks, microbatches)
    return tuple(_lane(rank, ranks, chunks, rounds) for rank in range(ranks))


def _rounds(ranks: int, chunks: int, microbatches: int) -> list[range]:
    """Divide the microbatches into rounds of at least as many as there are ranks, if there are enough."""
    for name, value in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _warm_up_forwards(rank: int, ranks: int, chunks: int, rounds: Sequence[range]) -> int:
    """Return the number of forwards before the first backward, if there are that many."""
    # Two for every rank after it: with chunks a microbatch needs that much longer to get there and back. Megatron-LM
    # has the same count.
    ranks_behind = ranks - rank - 1
    return ranks_behind if chunks == 1 else (chunks - 1) * len(rounds[0]) + 2 * ranks_behind


def _lane(rank: int, ranks: int, chunks: int, rounds: Sequence[range]) -> tuple[Action, ...]:
    # Forwards and backwards each have a fixed order; the schedule only decides how they are merged.
    forwards = list(_passes(ActionKind.FORWARD, rounds, range(rank, ranks * chunks, ranks)))
    backwards = list(_passes(ActionKind.BACKWARD, rounds, range(rank, ranks * chunks, ranks)[::-1]))
    ahead = min(len(forwards), _warm_up_forwards(rank, ranks, chunks, rounds))
    steady = len(forwards) - ahead
    alternate = zip(forwards[ahead:], backwards[:steady], strict=True)
    return (*forwards[:ahead], *(action for pair in alternate for action in pair), *backwards[steady:])


def _passes(kind: ActionKind, rounds: Sequence[range], stages: Sequence[int]) -> Iterator[Action]:
    for microbatches in rounds:
        for stage in stages:
            for microbatch in microbatches:
                yield Action(kind, stage, microbatch)
