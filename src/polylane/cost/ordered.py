"""Memory of a worker that runs several stages, counted by going through its passes in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from polylane.cost.memory import Load, Margin, Memory, sharded, with_margin
from polylane.cost.method import Method
from polylane.cost.residence import Need
from polylane.schedule.action import Action, Kind

# Receives are posted while so many passes are still to come before the one that needs them.
AHEAD = 2


def memory_in_order(
    lane: Sequence[Action],
    needs: Mapping[int, Need],
    trained: Mapping[int, float],
    load: Load,
    microbatches: int,
    method: Method | None = None,
    replicas: int = 1,
    margin: Margin | None = None,
) -> Memory:
    """The most that a worker holds in a step: at each of its passes, what all its stages hold together.

    For one stage that is what :func:`polylane.cost.memory.memory` says.

    Args:
        lane: forward and backward passes, first to last.
        needs: of one microbatch, for every stage of the worker.
        trained: bytes of the parameters that a stage's first backward pass gives gradients, by stage.
        load: what all stages train together.
        microbatches: of a step, of which this worker has the samples.
        method, replicas, margin: as of :func:`polylane.cost.memory.memory`.
    """
    own = sharded(load, method or Method(), replicas)
    share = own.gradients / own.trained if own.trained else 0.0
    samples = max(need.batch for need in needs.values()) * microbatches

    def at(moment: str, activations: float, gradients: float, travels: float, work: float = 0.0) -> Memory:
        return Memory(
            parameters=math.ceil(own.parameters + own.gathered),
            gradients=math.ceil(min(gradients, own.gradients + own.scattered)),
            optimizer=math.ceil(own.states + work),
            activations=math.ceil(activations + samples),
            communication=math.ceil(travels),
            moment=moment,
        )

    live, begun, gone = dict.fromkeys(needs, 0), set[int](), [0.0, 0.0]  # gone: gradients that were sent last
    moments = list[Memory]()
    for index, action in enumerate(lane):
        stage, need = action.stage, needs[action.stage]
        forward = action.kind is Kind.FORWARD
        live[stage] -= not forward
        held = sum(count * needs[other].live for other, count in live.items())
        made = share * sum(trained[other] for other in begun)
        coming = sum(_awaited(needs[a.stage], a.kind) for a in lane[index + 1 : index + 1 + AHEAD])
        travels = gone[-1] + coming
        if forward:
            moments.append(at("forward", held + need.forward, made, travels))
            live[stage] += 1
            continue
        if stage not in begun:  # its gradients only come into being
            made += share * max(need.first - need.backward, 0.0)
            begun.add(stage)
        moments.append(at("backward", held + need.backward, own.scattering(made), travels))
        gone = [gone[-1], need.returned]
    moments.append(at("reduction", 0.0, own.gradients, sum(gone) + own.copied))
    moments.append(at("step", 0.0, own.gradients, sum(gone), own.working))
    return with_margin(max(moments, key=lambda each: each.total), margin)


def _awaited(need: Need, kind: Kind) -> float:
    """What a pass receives."""
    return need.received if kind is Kind.FORWARD else need.asked
