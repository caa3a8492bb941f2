"""Asynchronous pipeline schedules: 1F1B without a flush, where weights are updated while microbatches are under way.

A run is drawn from its first microbatch to its last one. A stage's weights have as many versions as updates that other
microbatches still need the weights of before; an update is a step action with the number of the microbatch whose
gradient completes it. Version v of a stage's weights has v updates in it. What a plan runs is one step of the steady
state, over and over (:func:`steady_step`).

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, and
"Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW), ICML 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polylane.schedule.action import Action, ActionKind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes, checked_stage_graph, one_forward_one_backward


@dataclass(frozen=True)
class AsynchronousRun:
    """The lanes of a run, and the weights that each pass computes on.

    Attributes:
        lanes: passes and updates of every stage, first to last.
        versions: ``versions[s][m]`` is the version of the weights on which stage s computes both passes of microbatch
            m, so that its gradient is one of a single set of weights.
        accumulated: microbatches of one update.
    """

    lanes: Lanes
    versions: tuple[tuple[int, ...], ...]
    accumulated: int

    def staleness(self) -> tuple[int, ...]:
        """Return for each stage the most updates that its weights lack: a device alone would have made them before."""
        return tuple(max(m // self.accumulated - used for m, used in enumerate(versions)) for versions in self.versions)

    def peak_versions(self) -> tuple[int, ...]:
        """Return for each stage the most versions of its weights that are kept at once, the newest included."""
        return tuple(max(_kept_versions(*of_stage)) for of_stage in zip(self.lanes, self.versions, strict=True))


def _kept_versions(lane: Sequence[Action], versions: Sequence[int]) -> Iterator[int]:
    """Yield how many versions a stage keeps at the start and after each action of its lane."""
    # Also of microbatches that are still to come: with vertical sync they use weights that the stage has had for long.
    needed = Counter(versions)
    newest = 0
    kept_versions = {newest}
    yield len(kept_versions)
    for action in lane:
        assert action.microbatch is not None  # the builders below number all actions
        version = newest
        if action.kind is ActionKind.BACKWARD:
            version = versions[action.microbatch]
            needed[version] -= 1
        elif action.kind is ActionKind.STEP:
            newest += 1
            kept_versions.add(newest)
        # The newest weights are what the next update starts from, whether a microbatch needs them or not.
        if version != newest and not needed[version]:
            kept_versions.discard(version)
        yield len(kept_versions)


def pipedream(stages: int | StageGraph, microbatches: int, vertical_sync: bool = False) -> AsynchronousRun:
    """Build PipeDream's run: 1F1B without a flush, and an update of the stage after every backward.

    A stage keeps the weights of a microbatch's forward for its backward (weight stashing). Stage s of k computes on
    weights that lack k - 1 - s updates and keeps k - s versions. With vertical sync every stage uses the version that
    the first one used: all lack k - 1 updates, and every stage keeps k versions. In a graph with branches, k - s is the
    number of stages on the longest path from stage s to the end.

    Args:
        stages: number of stages of a chain, or the graph of the stages.
        microbatches: number of microbatches of the run; each is a batch of its own.
        vertical_sync: whether a microbatch sees the same version on all stages.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    #     0   1   2   3   4   5   6   7   8   9  10  11
    # 0   0   1   2   ·   · <0#   3 <1#   · <2#   · <3#      # is an update
    # 1   ·   0   1   · <0#   2 <1#   3 <2#   · <3#   ·
    # 2   ·   ·   0 <0#   1 <1#   2 <2#   3 <3#   ·   ·
    graph = checked_stage_graph(stages, microbatches)
    lags = [max(graph.depth_to_end) - 1 if vertical_sync else ahead - 1 for ahead in graph.depth_to_end]
    versions = tuple(tuple(max(0, m - lag) for m in range(microbatches)) for lag in lags)
    return AsynchronousRun(_with_updates(one_forward_one_backward(graph, microbatches), 1), versions, 1)


def pipedream_2bw(stages: int | StageGraph, microbatches: int, batches: int) -> AsynchronousRun:
    """Build PipeDream-2BW's run: gradients of a batch are accumulated, and two versions of the weights are enough.

    All microbatches of batch t compute on the weights of max(0, t - 1) updates, on every stage: one update late.

    Args:
        stages: number of stages of a chain, k, or the graph of the stages, k of them on its longest path.
        microbatches: number of microbatches of a batch, at least k - 1: with fewer, an update would come after the
            first forward that needs it.
        batches: number of batches of the run.

    Raises:
        ValueError: fewer than one stage, microbatch or batch, or fewer than k - 1 microbatches.
    """
    graph = checked_stage_graph(stages, microbatches)
    if not isinstance(batches, int) or batches < 1:
        raise ValueError(f"batches must be a whole number of at least 1, not {batches!r}")
    _check_accumulation(graph, microbatches)
    total = microbatches * batches
    versions = (tuple(max(0, m // microbatches - 1) for m in range(total)),) * graph.stages
    return AsynchronousRun(_with_updates(one_forward_one_backward(graph, total), microbatches), versions, microbatches)


def steady_step(stages: int | StageGraph, microbatches: int) -> Lanes:
    """Build one step of the steady state: the forwards of a batch, with the backwards of earlier ones between them.

    In the w-th place before its own forward every stage runs a backward, where w is the number of stages behind it on
    the longest path: of microbatch m - w, which began in an earlier step (``steps_back``) where that is negative. An
    update follows the last backward of each batch. Repeated, it is 1F1B without a flush.

    Args:
        stages: number of stages of a chain, or the graph of the stages.
        microbatches: number of microbatches of a batch; an update is made of the whole batch.

    Raises:
        ValueError: fewer than one stage or microbatch.
    """
    graph = checked_stage_graph(stages, microbatches)

    def actions(stage: int, behind: int) -> Iterator[Action]:
        for microbatch in range(microbatches):
            yield Action(ActionKind.FORWARD, stage, microbatch)
            back, backward_microbatch = -((microbatch - behind) // microbatches), (microbatch - behind) % microbatches
            yield Action(ActionKind.BACKWARD, stage, backward_microbatch, steps_back=back)
            if backward_microbatch == microbatches - 1:
                yield Action(ActionKind.STEP, stage, steps_back=back)

    return tuple(tuple(actions(stage, ahead - 1)) for stage, ahead in enumerate(graph.depth_to_end))


def steps_in_flight(stages: int | StageGraph, microbatches: int) -> int:
    """Return how many steps after a batch's own its last backward runs: so many more empty a pipeline."""
    return -(-(max(checked_stage_graph(stages, microbatches).depth_to_end) - 1) // microbatches)


def weight_delays(
    schedule: str, stages: int | StageGraph, microbatches: int, vertical_sync: bool = False
) -> tuple[int, ...]:
    """Return for every stage how many updates the weights lack on which it computes a batch, in the steady state.

    With one microbatch of a batch, stage s of k lacks k - 1 - s under ``pipedream``, and k - 1 with vertical sync. A
    batch of m microbatches is under way for m passes, so that it is the m-th part of that, rounded up. All stages lack
    one under ``pipedream-2bw``.

    Args:
        schedule: name of the schedule, "pipedream" or "pipedream-2bw".
        stages: number of stages of a chain, k, or the graph of the stages.
        microbatches: number of microbatches of a batch.
        vertical_sync: whether a batch sees the same version on all stages.

    Raises:
        ValueError: fewer than one stage or microbatch, or too few microbatches for ``pipedream-2bw``.
    """
    graph = checked_stage_graph(stages, microbatches)
    if schedule == "pipedream-2bw":
        _check_accumulation(graph, microbatches)
        return (1,) * graph.stages
    behind = [max(graph.depth_to_end) if vertical_sync else ahead for ahead in graph.depth_to_end]
    return tuple(-(-(ahead - 1) // microbatches) for ahead in behind)


def _check_accumulation(graph: StageGraph, microbatches: int) -> None:
    """Refuse fewer microbatches than PipeDream-2BW needs: an update would come after a forward that needs it."""
    limit = max(graph.depth_to_end) - 1
    if microbatches < limit:
        raise ValueError(
            f"pipedream-2bw needs at least {limit} microbatches in a batch for {limit + 1} stages, not {microbatches}"
        )


def _with_updates(lanes: Lanes, interval: int) -> Lanes:
    """Put an update behind every backward that completes the gradient of ``interval`` microbatches."""

    def actions(lane: Sequence[Action]) -> Iterator[Action]:
        for action in lane:
            yield action
            assert action.microbatch is not None  # lanes of 1F1B hold passes of microbatches only
            if action.kind is ActionKind.BACKWARD and (action.microbatch + 1) % interval == 0:
                yield Action(ActionKind.STEP, action.stage, action.microbatch)

    return tuple(tuple(actions(lane)) for lane in lanes)
