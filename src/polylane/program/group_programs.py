"""Group programs: the passes and messages of each group of workers, as if it were one worker.

All workers of a group run the same passes in the same order, so that one program for each tells which messages a worker
holds when, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from polylane.graph.partition import Partition
from polylane.plan.lanes import lanes_of, stage_graph_of
from polylane.plan.plan import Plan
from polylane.program.late_sends import defer_sends
from polylane.program.lower import add_messages, crossing_as_sent, find_local_sources, lower, order_receives
from polylane.program.program import Program
from polylane.schedule.action import PASSES, Action


def lower_groups(partition: Partition, plan: Plan) -> tuple[Program, ...]:
    """Lower a partition to one program for each group of workers: its passes with their messages, and no update.

    Ranks are numbers of groups, except where groups have different numbers of replicas that take turns: there it is the
    program of each group's first worker, since which workers exchange a microbatch depends on its number.

    Args:
        partition: the graph and its cuts into stages.
        plan: what runs where, in which order.
    """
    if plan.has_uneven_replicas and plan.takes_turns:
        rank_programs = lower(partition, plan)
        return tuple(rank_programs[plan.stages[stage].devices[0]] for stage in plan.first_chunks)
    lanes = lanes_of(plan, stage_graph_of(partition, plan))
    programs = tuple(_group_program(partition, plan, group, lane) for group, lane in enumerate(lanes))
    # As in lower(): an asynchronous pipeline has one order, in which no worker waits for a late message.
    if plan.is_asynchronous:
        return programs
    return defer_sends(order_receives(programs) if plan.most_chunks > 1 else programs)


def _group_program(partition: Partition, plan: Plan, group: int, lane: Sequence[Action]) -> Program:
    stages = plan.chunks(plan.first_chunks[group])
    sources, peers = find_local_sources(partition, stages), [(peer,) for peer in plan.stage_groups]
    receives = {s: [c for c in partition.crossings if s in c.consumers and (c.value, s) not in sources] for s in stages}
    sent = [message for c in partition.crossings if c.producer in stages and (message := crossing_as_sent(c, plan))]
    sends = {s: [c for c in sent if c.producer == s] for s in stages}
    actions = [
        added_action
        for action in lane
        if action.kind in PASSES
        for added_action in add_messages(action, peers, receives[action.stage], sends[action.stage])
    ]
    return Program(
        rank=group,
        stage=stages[0],
        replica=0,
        replicas=(group,),
        actions=tuple(actions),
        stages=stages,
        local_sources=sources,
        buckets=(),
        partition=partition,
        coordinates={},
        microbatches=plan.microbatches,
        takes_turns=plan.takes_turns,
    )
