"""Zero-bubble schedules: backward passes in two halves, so that weight gradients fill the gaps of the pipeline.

Only the first half, the gradients of incoming values, is waited for by another stage; the second one, the gradients of
parameters, may run at any time after it. In the tables below a row is a worker and a column one tick; ``0`` is the
forward of microbatch 0, ``<0`` the first half of its backward, ``=0`` the second; each takes one tick. Both halves of a
stage are in ascending order of microbatch, so that gradients accumulate as on one device. A microbatch is live until
its second half is done, which is what reads its activations last.

Source: Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024 (H1, H2), and Qi, Wan, Amar and Lin,
"Pipeline Parallelism with Controllable Memory", 2024 (V).
"""

from __future__ import annotations

from collections import Counter

from polylane.schedule.action import Action, ActionKind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes, checked_stage_graph


def zero_bubble_h1(stages: int | StageGraph, microbatches: int) -> Lanes:
    """Build ZB-H1: forwards and input halves as in 1F1B, weight halves as late as k live microbatches allow.

    With F, I and W the ticks of a forward and of the halves, and N >= k, stage 0 idles (k - 1)(I + max(0, F - W)) ticks
    between its first pass and its last one, and no stage idles more. Where W <= F that is the (k - 1)(F + I - W) of the
    paper; where W > F its formula asks for more live microbatches than it allows. 1F1B idles (k - 1)(F + I + W) in
    every stage's row; ZB-H1 never takes longer than 1F1B, and keeps min(N, k) microbatches alive on every stage.

    In a graph with branches, k is the number of stages on the longest path, k - s that of those from stage s on.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    #     0  1  2  3  4  5  6  7  8  9 10 11 12 13
    # 0   0  1  2  ·  · <0 =0  3 <1 =1 <2 =2 <3 =3
    # 1   ·  0  1  · <0  2 <1 =0  3 <2 =1 <3 =2 =3
    # 2   ·  ·  0 <0  1 <1  2 <2 =0  3 <3 =1 =2 =3
    graph = checked_stage_graph(stages, microbatches)
    depths = graph.depth_to_end
    return tuple(
        _lane(stage, warm_up=ahead - 1, lag=max(depths) - ahead, microbatches=microbatches)
        for stage, ahead in enumerate(depths)
    )


def zero_bubble_h2(stages: int | StageGraph, microbatches: int) -> Lanes:
    """Build ZB-H2: so many forwards before the first backward that no stage ever waits, with 2k - 1 live microbatches.

    For N >= 2k - 1 a stage idles at most (k - 1) max(0, I - F, F + I - 2W) ticks between its first pass and its last
    one: none where I <= F and F + I <= 2W, in particular where all three take equally long. Stage s then starts and
    ends s forwards later than stage 0, so the rectangle of all stages is no smaller than that of ZB-H1: what is gained
    shows where the next step starts at once on each stage.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    #     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16
    # 0   0  1  2  3  4 <0 =0 <1 =1 <2 =2 <3 =3 <4 =4
    # 1   ·  0  1  2 <0  3 <1  4 <2 =0 <3 =1 <4 =2 =3 =4
    # 2   ·  ·  0 <0  1 <1  2 <2  3 <3  4 <4 =0 =1 =2 =3 =4
    graph = checked_stage_graph(stages, microbatches)
    depths = graph.depth_to_end
    return tuple(
        _lane(stage, warm_up=2 * (ahead - 1), lag=2 * (max(depths) - ahead), microbatches=microbatches)
        for stage, ahead in enumerate(depths)
    )


def _lane(stage: int, warm_up: int, lag: int, microbatches: int) -> tuple[Action, ...]:
    """Build the lane of one stage.

    Args:
        stage: the stage whose passes these are.
        warm_up: forwards before the first forward that alternates with an input half, if there are that many.
        lag: microbatches whose input half is done before the first weight half.
        microbatches: number of microbatches of a step.
    """
    lane = [Action(ActionKind.FORWARD, stage, m) for m in range(min(warm_up, microbatches))]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            lane.append(Action(ActionKind.FORWARD, stage, m + warm_up))
        lane.append(Action(ActionKind.BACKWARD_INPUT, stage, m))
        # A weight half ends the life of its microbatch: from here on each makes room for the next forward.
        if m >= lag:
            lane.append(Action(ActionKind.BACKWARD_WEIGHT, stage, m - lag))
    start = max(0, microbatches - lag)
    lane += [Action(ActionKind.BACKWARD_WEIGHT, stage, m) for m in range(start, microbatches)]
    return tuple(lane)


def v_stages(workers: int) -> tuple[int, ...]:
    """Return the worker of each of ``2 * workers`` stages laid out as a V: down the workers, and up again."""
    return (*range(workers), *reversed(range(workers)))


def zero_bubble_v(workers: int, microbatches: int) -> Lanes:
    """Build ZB-V: two chunks on each worker, in a V, so that the first worker also has the last stage and the loss.

    A microbatch's backward starts on the worker that started its forward, k hops earlier than in ZB-H2: with F, I and W
    of a chunk equal, no worker idles between its first pass and its last one for N >= 2k - 1, and at most 2k chunks
    are live on a worker, as much as k microbatches of 1F1B.

    Args:
        workers: number of workers, k; stage s is on worker s, or on 2k - 1 - s.
        microbatches: number of microbatches of a step, N; any number, also fewer than workers.

    Returns:
        A lane for each worker; ``stage`` of its actions is from 0 to 2k - 1.

    Raises:
        ValueError: fewer than one worker or microbatch.
    """
    # Two workers; ' marks the second chunk.
    #     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
    # 0   0   1   2   0' <0' =0'  1' <1' =1' <0  =0   2' <2' =2' <1  =1  <2  =2   ·
    # 1   ·   0   0'  1   1' <0' =0'  2  <0  =0   2' <1' =1' <1  <2' <2  =1  =2' =2
    checked_stage_graph(workers, microbatches)
    return tuple(_v_lane(worker, workers, microbatches) for worker in range(workers))


def _v_lane(worker: int, workers: int, microbatches: int) -> tuple[Action, ...]:
    down, up = worker, 2 * workers - 1 - worker
    forward, first_half, second_half = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
    # The pattern is that of at least 2k - 1 microbatches, the fewest that fill the V; those that are not there are left
    # out, which moves nothing before what it waits for.
    pattern_length = max(2 * workers - 1, microbatches)
    numbers: Counter[tuple[ActionKind, int]] = Counter()
    lane: list[Action] = []

    def add(stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            lane.append(Action(kind, stage, numbers[kind, stage]))
            numbers[kind, stage] += 1

    # Until the first microbatch comes back: forwards of the first chunk, then of both.
    for _ in range(2 * (workers - worker) - 1):
        add(down, forward)
    for _ in range(worker):
        add(up, forward)
        add(down, forward)
    # Backwards of the second chunk follow their forwards; the first chunk waits for them to go round.
    for _ in range(workers - worker):
        add(up, forward, first_half, second_half)
    # The steady state: six passes, every worker shifted against the one before.
    while numbers[forward, up] < pattern_length:
        if numbers[forward, down] < pattern_length:
            add(down, forward)
        add(down, first_half, second_half)
        add(up, forward, first_half, second_half)
    # The end: what others wait for first, weight halves where there would be a gap.
    for _ in range(worker):
        add(down, first_half)
        add(up, first_half)
    for _ in range(workers - worker):
        add(down, first_half, second_half)
    for stage in (up, down):
        add(stage, *[second_half] * (pattern_length - numbers[second_half, stage]))
    return tuple(action for action in lane if action.microbatch is not None and action.microbatch < microbatches)
