"""Lowering by example: who sends what to whom, in which order, and what is reduced with whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.spec import Spec
from polylane.program import lower as lowering
from polylane.program.check import check, list_channels, match_messages
from polylane.program.lower import lower, lower_evaluation
from polylane.program.program import Program
from polylane.schedule.action import Action, ActionKind
from tests.support.synthetic_graphs import chain, graph


def lowered(
    graph: Graph, cuts: tuple[int, ...], schedule: str = "1f1b", microbatches: int = 2, data: int = 1
) -> tuple[Program, ...]:
    partition = Partition(graph, cuts)
    spec = Spec(data, len(cuts) + 1, schedule=schedule)
    return lower(partition, plan_from_partition(partition, spec, microbatches))


def told(program: Program) -> list[str]:
    """Actions as a person would write them: "F0", "send layer0/op 0 to 1", "send d layer0/op 0 to 0"."""
    lines = []
    for action in program.actions:
        name = action.value and action.value.partition("/")[0]
        what = f"{'d ' if action.gradient else ''}{name} {action.microbatch}"
        lines.append(
            {
                ActionKind.FORWARD: f"F{action.microbatch}",
                ActionKind.BACKWARD: f"B{action.microbatch}",
                ActionKind.SEND: f"send {what} to {action.peer}",
                ActionKind.RECEIVE: f"receive {what} from {action.peer}",
                ActionKind.REDUCE: f"reduce {action.value}",
                ActionKind.STEP: "step",
            }[action.kind]
        )
    return lines


def test_two_stages() -> None:
    first, last = lowered(chain(4), (2,), "afab")
    assert told(first) == [
        "F0",
        "send layer1 0 to 1",
        "F1",
        "send layer1 1 to 1",
        "receive d layer1 0 from 1",
        "B0",
        "receive d layer1 1 from 1",
        "B1",
        "step",
    ]
    assert told(last) == [
        "receive layer1 0 from 0",
        "F0",
        "receive layer1 1 from 0",
        "F1",
        "B0",
        "send d layer1 0 to 0",
        "B1",
        "send d layer1 1 to 0",
        "step",
    ]


def test_a_skip_goes_straight_to_its_consumer() -> None:
    """Node 0 is read by nodes 1 (stage 1) and 2 (stage 2): two sends, none through stage 1."""
    first, second, third = lowered(chain(3, skips=[(0, 2)]), (1, 2), "naive", 1)
    assert told(first)[:3] == ["F0", "send layer0 0 to 1", "send layer0 0 to 2"]
    assert told(second)[:3] == ["receive layer0 0 from 0", "F0", "send layer1 0 to 2"]
    assert told(third)[:3] == ["receive layer0 0 from 0", "receive layer1 0 from 1", "F0"]
    assert told(first)[3:6] == ["receive d layer0 0 from 1", "receive d layer0 0 from 2", "B0"]
    assert told(third)[4:6] == ["send d layer0 0 to 0", "send d layer1 0 to 1"]


def test_what_needs_no_gradient_gets_none_back() -> None:
    mask = graph([[], [], [0, 1], [1, 2]], {"w": [0]}, without_gradient=[1])
    first, last = lowered(mask, (2,), microbatches=1)
    assert [a.value for a in first.actions if a.kind is ActionKind.SEND] == ["layer0/op", "layer1/op"]
    assert [a.value for a in last.actions if a.kind is ActionKind.SEND] == ["layer0/op"]


def test_free_nodes_do_not_travel() -> None:
    positions = graph([[], [0], [0, 1]], {"w": [1]}, free=[0], without_gradient=[0])
    first, last = lowered(positions, (2,), microbatches=1)
    assert [a.value for a in first.actions if a.kind is ActionKind.SEND] == ["layer1/op"]
    assert [n.name for n in last.partition.nodes(1)] == ["layer0/op", "layer2/op"]


def test_replicas_keep_to_themselves() -> None:
    programs = lowered(chain(4), (2,), data=2)
    assert [(p.rank, p.stage, p.replica, p.replicas) for p in programs] == [
        (0, 0, 0, (0, 2)),
        (1, 1, 0, (1, 3)),
        (2, 0, 1, (0, 2)),
        (3, 1, 1, (1, 3)),
    ]
    assert list_channels(programs) == [(0, 1), (1, 0), (2, 3), (3, 2)]


def test_a_plan_may_place_stages_anywhere() -> None:
    partition = Partition(chain(4), (2,))
    plan = plan_from_partition(partition, Spec(2, 2), 2)
    turned = [s.model_copy(update={"devices": d}) for s, d in zip(plan.stages, [(3, 1), (0, 2)], strict=True)]
    programs = lower(partition, plan.model_copy(update={"stages": tuple(turned)}))
    check(programs)
    assert list_channels(programs) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert [bucket.ranks for bucket in programs[3].buckets] == [(1, 3)]


def test_ranks_that_share_an_operator_keep_to_their_own_coordinates() -> None:
    partition = Partition(chain(4), (2,))
    programs = lower(partition, plan_from_partition(partition, Spec(2, 2, tensor=2), 1))
    check(programs)
    assert list_channels(programs) == [(0, 2), (1, 3), (2, 0), (3, 1), (4, 6), (5, 7), (6, 4), (7, 5)]
    assert [(p.stage, p.replica, p.coordinates, p.replicas) for p in (programs[1], programs[6])] == [
        (0, 0, {"tensor": 1}, (1, 5)),
        (1, 1, {"tensor": 0}, (2, 6)),
    ]


# Buckets


def names(program: Program) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    return [(bucket.name, bucket.parameters, bucket.ranks) for bucket in program.buckets]


def test_gradients_travel_in_the_order_in_which_a_backward_pass_ends() -> None:
    (first, *_) = lowered(chain(3), (), data=2)
    assert names(first) == [("stage0.0", ("w2", "w1", "w0"), (0, 1))]
    assert told(first)[-2:] == ["reduce stage0.0", "step"]


def test_a_full_bucket_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "BUCKET_BYTES", 128)
    (first, *_) = lowered(chain(5), (), data=2)
    assert [bucket.parameters for bucket in first.buckets] == [("w4", "w3"), ("w2", "w1"), ("w0",)]


def test_a_bucket_has_one_dtype() -> None:
    mixed = chain(4)
    info = mixed.parameters | {"w2": replace(mixed.parameters["w2"], dtype="bfloat16")}
    (first, *_) = lowered(replace(mixed, parameters=info), (), data=2)
    assert [bucket.parameters for bucket in first.buckets] == [("w3",), ("w2",), ("w1", "w0")]


def test_a_parameter_larger_than_a_bucket() -> None:
    large = graph([[], [0]], {"a": [0], "b": [1]}, parameter_bytes=10 * lowering.BUCKET_BYTES)
    (first, *_) = lowered(large, (), data=2)
    assert [bucket.parameters for bucket in first.buckets] == [("b",), ("a",)]


def test_tied_weights_are_summed_over_all_who_hold_them() -> None:
    tied = graph([[], [0], [1], [2]], {"embedding": [0, 3], "w": [1], "v": [2]})
    programs = lowered(tied, (1, 3), data=2)
    assert names(programs[0]) == [("tied0-2.0", ("embedding",), (0, 2, 3, 5))]
    assert names(programs[1]) == [("stage1.0", ("v", "w"), (1, 4))]
    assert names(programs[2]) == [("tied0-2.0", ("embedding",), (0, 2, 3, 5))]


def test_summands_along_an_axis_are_summed_along_it() -> None:
    """w1 is split, or its gradient is whole on each rank: only the replicas sum it. w0 and w2 have summands."""
    partition = Partition(chain(3), ())
    plan = plan_from_partition(partition, Spec(2, tensor=2, sequence=3), 1)
    programs = lower(partition, plan, None, [{"w0": ["tensor"], "w2": ["tensor", "sequence"]}] * plan.pipeline)
    assert names(programs[3]) == [
        ("stage0.0", ("w1",), (3, 9)),
        ("stage0.sequence.tensor.0", ("w2",), tuple(range(12))),
        ("stage0.tensor.0", ("w0",), (2, 3, 8, 9)),
    ]
    assert told(programs[3])[-4:] == [
        "reduce stage0.0",
        "reduce stage0.sequence.tensor.0",
        "reduce stage0.tensor.0",
        "step",
    ]
    assert names(programs[0])[0] == ("stage0.0", ("w1",), (0, 6))


def test_summands_along_an_axis_that_the_plan_does_not_have() -> None:
    partition = Partition(chain(1), ())
    programs = lower(partition, plan_from_partition(partition, Spec(tensor=2), 1), None, [{"w0": ["sequence"]}])
    assert names(programs[1]) == [("stage0.0", ("w0",), (1,))]
    assert told(programs[1]) == ["F0", "B0", "step"]


def test_tied_weights_with_summands() -> None:
    tied = graph([[], [0], [1]], {"embedding": [0, 2], "w": [1]})
    partition = Partition(tied, (1, 2))
    plan = plan_from_partition(partition, Spec(1, 3, tensor=2), 1)
    assert names(lower(partition, plan)[1]) == [("tied0-2.0", ("embedding",), (1, 5))]
    summed = lower(partition, plan, None, [{"embedding": {"tensor"}}] * plan.pipeline)
    assert names(summed[1]) == names(summed[4]) == [("tied0-2.tensor.0", ("embedding",), (0, 1, 4, 5))]


def test_stages_that_another_objective_needs_hold_a_parameter_too() -> None:
    partition = Partition(chain(2), (1,))
    programs = lower(partition, plan_from_partition(partition, Spec(1, 2), 1), {"w0": (0, 1), "w1": (1,)})
    assert names(programs[1]) == [("stage1.0", ("w1",), (1,)), ("tied0-1.0", ("w0",), (0, 1))]


def test_frozen_parameters_are_in_no_bucket() -> None:
    (first, *_) = lowered(graph([[], [0]], {"w": [0], "frozen": [1]}, frozen=["frozen"]), (), data=2)
    assert names(first) == [("stage0.0", ("w",), (0, 1))]


def test_a_worker_alone_reduces_nothing() -> None:
    (only,) = lowered(chain(3), ())
    assert told(only) == ["F0", "B0", "F1", "B1", "step"]


# Evaluation


def test_evaluation_is_forward_only() -> None:
    partition = Partition(chain(3, skips=[(0, 2)]), (1, 2))
    programs = lower_evaluation(partition, plan_from_partition(partition, Spec(2, 3), 2))
    check(programs)
    assert told(programs[1]) == [
        "receive layer0 0 from 0",
        "F0",
        "send layer1 0 to 2",
        "receive layer0 1 from 0",
        "F1",
        "send layer1 1 to 2",
    ]
    assert all(program.buckets == () for program in programs)


# Wrong programs are refused


def changed(programs: tuple[Program, ...], rank: int, actions: list[Action]) -> list[Program]:
    return [replace(p, actions=tuple(actions)) if p.rank == rank else p for p in programs]


def test_a_send_without_its_receive() -> None:
    programs = lowered(chain(2), (1,))
    actions = [a for a in programs[1].actions if not (a.kind is ActionKind.RECEIVE and a.microbatch == 1)]
    with pytest.raises(RuntimeError, match="ranks 0 -> 1: 2 sends meet 1 receives"):
        check(changed(programs, 1, actions))


def test_messages_in_another_order() -> None:
    programs = lowered(chain(3, skips=[(0, 2)]), (2,), microbatches=1)
    receives = [a for a in programs[1].actions if a.kind is ActionKind.RECEIVE]
    rest = [a for a in programs[1].actions if a.kind is not ActionKind.RECEIVE]
    assert len(receives) == 2
    with pytest.raises(RuntimeError, match=r"ranks 0 -> 1: .* would meet"):
        check(changed(programs, 1, [*reversed(receives), *rest]))


def test_a_value_where_its_gradient_is_expected() -> None:
    programs = lowered(chain(2), (1,), microbatches=1)
    actions = [replace(a, gradient=False) if a.kind is ActionKind.RECEIVE else a for a in programs[0].actions]
    with pytest.raises(RuntimeError, match="would meet"):
        check(changed(programs, 0, actions))


def test_waiting_in_a_circle() -> None:
    """Stage 0 wants the gradient before it has sent the value that it is the gradient of."""
    programs = lowered(chain(2), (1,), microbatches=1)
    actions = sorted(programs[0].actions, key=lambda a: a.kind is not ActionKind.RECEIVE)
    with pytest.raises(RuntimeError, match="these actions wait for each other"):
        check(changed(programs, 0, actions))


def test_every_message_is_matched_once() -> None:
    programs = lowered(chain(3, skips=[(0, 2)]), (1, 2), microbatches=3)
    pairs = match_messages(programs)
    assert len(pairs) == len({pair[0] for pair in pairs}) == len({pair[1] for pair in pairs}) == 3 * 3 * 2
