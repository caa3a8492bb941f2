"""What is computed again and what replicas share out: laws of time, bytes and memory, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.published.closed_form import sharded
from polylane.cost.network import collectives as network
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import PlanCost
from polylane.cost.predict import Prediction, predict
from polylane.cost.shard_traffic import EXPOSED, ShardTrafficSeconds, exposed_seconds
from polylane.cost.stage_cost import StageCosts
from polylane.graph.capture.repeatable import NOTHING_DROPPED
from polylane.graph.graph import Graph
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Span
from polylane.plan.spec import Degrees
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.schedule.action import ActionKind
from tests.support import planning_graphs, subsets

# Blocks whose parameters all travel in one bucket, and blocks that are a bucket for each large parameter.
SMALL, LARGE = planning_graphs.blocks(4, 64), planning_graphs.blocks(4, 1024)
DEVICE = "a100-80g"
SHARDS = ("optimizer", "gradients", "parameters")


def predicted(
    graph: Graph,
    plan: str,
    batch: int = 16,
    cluster: str = f"8:{DEVICE}",
    every: bool = False,
    shard: str = "none",
    **how: object,
) -> Prediction:
    found, plan = planning_graphs.basis(graph, cluster, TrainingOptions(**how)), f"{plan},shard={shard}"  # type: ignore[arg-type]
    return predict(found, *setup.fit_plan(found, spec_of(plan), batch), batch, every=every)


def weights(graph: Graph) -> int:
    return sum(info.bytes for info in graph.parameters.values())


def spans(found: Prediction, kind: ActionKind) -> list[Span]:
    return [span for span in found.timeline.spans if span.action.kind is kind and span.rank == 0]


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", subsets.one_in(4, ["data=1", "pipeline=2,microbatches=4", "data=2", "tensor=2"], first=2)
)
def test_selective_recomputation_lies_between_none_and_all(plan: str) -> None:
    graph = planning_graphs.attending(
        5, 64, 512
    )  # of one attention alone nothing is spared while it is gone through backward
    none, selective, full = (predicted(graph, plan, recompute=how) for how in ("none", "selective", "full"))
    assert none.seconds < selective.seconds < full.seconds
    for a, b, c in zip(none.stages, selective.stages, full.stages, strict=True):
        assert a.memory.activations > b.memory.activations > c.memory.activations
        assert a.passes.forward == b.passes.forward == c.passes.forward
        assert a.memory.parameters == b.memory.parameters and a.memory.optimizer == b.memory.optimizer


def test_selective_recomputation_runs_attention_once_more() -> None:
    graph = planning_graphs.attending(3, 64, 512)
    none, selective = (predicted(graph, "pipeline=2,microbatches=4", recompute=how) for how in ("none", "selective"))
    found = planning_graphs.basis(graph, f"8:{DEVICE}")
    partition, plan = setup.fit_plan(found, spec_of("pipeline=2,microbatches=4"), 16)
    core = {name for each in found.stages.attention_cores for name in each}
    assert len(found.stages.attention_cores) == 3
    for stage, (plain, again) in enumerate(zip(none.stages, selective.stages, strict=True)):
        table = PlanCost(found, partition, plan, 16).table(stage)
        own = [i for a, b, s in partition.pieces if s == stage for i in range(a, b) if graph.nodes[i].name in core]
        forward = sum(table.between("forward", i, i + 1) for i in own)
        assert own and again.passes.backward == pytest.approx(plain.passes.backward + forward)


def test_collectives_of_what_is_computed_again_are_waited_for_again() -> None:
    graph = planning_graphs.attending(3, 64, 512)
    none, full = (predicted(graph, "tensor=2", recompute=how).stages[0].passes for how in ("none", "full"))
    assert none.waits > 0
    assert full.backward_waits == pytest.approx(none.backward_waits + none.waits)
    assert full.sent == pytest.approx(1.5 * none.sent)


def test_without_attention_selective_is_none() -> None:
    for plan in ("data=2", "pipeline=2,microbatches=4"):
        none, selective = (predicted(LARGE, plan, recompute=how) for how in ("none", "selective"))
        assert none.stages == selective.stages and none.seconds == selective.seconds


def test_a_fused_attention_keeps_no_scores_to_save() -> None:
    """Only its result could be left away, and the product behind it reads that."""
    graph = planning_graphs.attending(2, 64, 512, fused=True)
    none, selective = (predicted(graph, "data=1", recompute=how) for how in ("none", "selective"))
    assert selective.seconds > none.seconds
    assert 0.9 * none.stages[0].memory.activations <= selective.stages[0].memory.activations


def test_what_is_kept_is_not_mixed_up_with_what_would_be() -> None:
    graph = planning_graphs.attending(2, 64, 256)
    stages: StageCosts = planning_graphs.basis(graph, f"8:{DEVICE}").stages
    every, mesh = [(0, len(graph.nodes))], Degrees()
    dropped = stages.drop_everywhere(mesh, 4, "selective")
    none, selective = (stages.microbatch_memory(mesh, 4, every, True, each) for each in (NOTHING_DROPPED, dropped))
    assert selective.saved < none.saved
    assert stages.microbatch_memory(mesh, 4, every, True) == none
    assert stages.without_prices().microbatch_memory(mesh, 4, every, True, dropped) == selective
    assert (
        stages.without_prices().live_ranges(mesh, 4)
        is stages.live_ranges(mesh, 4)
        is not stages.live_ranges(mesh, 4, dropped)
    )


# ---- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("dtype, item", [("float32", 4), ("bfloat16", 2)])
def test_two_replicas_scatter_update_a_half_each_and_gather(shard: str, dtype: str, item: int) -> None:
    found = predicted(SMALL, "data=2", dtype=dtype, shard=shard, overlap=False)
    (stage,), basis = found.stages, planning_graphs.basis(SMALL, f"8:{DEVICE}", TrainingOptions(dtype=dtype))
    size, both = weights(SMALL) / 4 * item, range(2)
    passes = stage.passes.forward + stage.passes.backward + 2 * basis.host_overhead
    scattered, gathered = (
        network.collective_seconds(basis.cluster, kind, size, both, None) for kind in ("reduce_scatter", "all_gather")
    )
    update = basis.update_seconds(basis.cluster.device(0), weights(SMALL) // 4 // 2)
    assert found.seconds == pytest.approx(passes + scattered + update + gathered, rel=1e-9)
    assert account_time(found.timeline).ranks[0].communication == pytest.approx(scattered + gathered, rel=1e-9)
    (reduce,), (step,) = spans(found, ActionKind.REDUCE), spans(found, ActionKind.STEP)
    assert reduce.bytes == step.bytes == size / 2


@pytest.mark.parametrize(("plan", "shard"), subsets.pairs(["data=1", "pipeline=2,microbatches=4", "tensor=2"], SHARDS))
def test_alone_nothing_is_shared_out(plan: str, shard: str) -> None:
    plain, other = predicted(LARGE, plan), predicted(LARGE, plan, shard=shard)
    assert plain.timeline == other.timeline and plain.stages == other.stages


def test_sharing_out_the_optimizer_sends_what_a_sum_sends() -> None:
    plain, other = predicted(LARGE, "data=8"), predicted(LARGE, "data=8", shard="optimizer")
    assert sum(other.timeline.sent()) == pytest.approx(sum(plain.timeline.sent()), rel=1e-6)
    assert other.stages[0].update_seconds < plain.stages[0].update_seconds / 4
    assert other.stages[0].passes == plain.stages[0].passes


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_gathered_parameters_send_half_as_much_again(replicas: int) -> None:
    """Rajbhandari et al., "ZeRO: Memory Optimizations", 2020, section 7.2.2."""
    summed, gathered = (predicted(LARGE, f"data={replicas}", shard=shard) for shard in ("none", "parameters"))
    part = (replicas - 1) / replicas * weights(LARGE)
    assert summed.timeline.sent()[0] == pytest.approx(2 * part, rel=1e-6)
    assert gathered.timeline.sent()[0] == pytest.approx(3 * part, rel=1e-6)
    assert [span.bytes for span in spans(gathered, ActionKind.FORWARD)] == [int(part)]
    assert [span.bytes for span in spans(gathered, ActionKind.BACKWARD)] == [int(2 * part)]
    assert not spans(gathered, ActionKind.REDUCE) and not spans(gathered, ActionKind.STEP)[0].bytes


def test_every_microbatch_gathers_anew() -> None:
    once, often = (predicted(LARGE, f"data=2,microbatches={m}", shard="parameters") for m in (1, 4))
    assert often.timeline.sent()[0] == pytest.approx(4 * once.timeline.sent()[0], rel=1e-6)


@pytest.mark.parametrize("link", ["nvlink-3", "pcie-3"])
@pytest.mark.parametrize("batch", [16, 1 << 19])
def test_gathered_parameters_take_what_the_closed_form_takes(link: str, batch: int) -> None:
    found = predicted(LARGE, "data=4,microbatches=2", batch, f"8:{DEVICE},link={link}", shard="parameters")
    (stage,), basis = found.stages, planning_graphs.basis(LARGE, f"8:{DEVICE},link={link}")
    bounds, uses = basis.stages.block_positions, basis.stages.first_uses
    held = [sum(i.bytes for n, i in LARGE.parameters.items() if a <= uses[n] < b) for a, b in pairwise(bounds)]
    sizes = [float(size) for size in held if size]
    traffic = ShardTrafficSeconds.of(basis.cluster, sizes, 2 * sizes, range(4))
    there, back = stage.passes.forward + basis.host_overhead, stage.passes.backward + basis.host_overhead
    sums, ways = [traffic.gathers / 2, traffic.gathers / 2 + traffic.scatters], [there, back]
    each = [compute + exposed_seconds(compute, travel) for compute, travel in zip(ways, sums, strict=True)]
    assert found.seconds == pytest.approx(2 * sum(each) + stage.update_seconds, rel=1e-9)
    if {ways[i] > (1 - EXPOSED) * sums[i] for i in (0, 1)} == {True}:  # both passes hide what they can
        assert found.seconds == pytest.approx(sharded(there + back, traffic, 2) + stage.update_seconds, rel=1e-9)
    exposed = 2 * (stage.shard_traffic.waits + stage.shard_traffic.backward_waits)
    assert account_time(found.timeline).ranks[0].communication == pytest.approx(exposed)


@pytest.mark.parametrize("shard", subsets.one_in(3, ["optimizer", "gradients", "parameters"], first=2))
def test_summands_along_another_axis_are_summed_all_the_same(shard: str) -> None:
    """Replicas sum their parts; then the ranks of the other axis sum those, of every part the same one."""
    graph = planning_graphs.attending(2, 64, 64)
    plain, other = (predicted(graph, "data=2,sequence=2", shard=s) for s in ("none", shard))
    axes = planning_graphs.basis(graph, f"8:{DEVICE}").stages.partial_gradient_axes(Degrees(2, 2, 1))
    summed = sum(len(each) * graph.parameters[name].bytes for name, each in axes.items())
    assert summed, "ranks that have parts of a sequence have summands of the gradients"
    assert sum(s.bytes for s in spans(plain, ActionKind.REDUCE)) == 2 * 3 / 4 * summed
    halves = 0 if shard == "parameters" else summed / 2
    assert sum(s.bytes for s in spans(other, ActionKind.REDUCE)) == halves + 2 / 2 * summed / 2


@pytest.mark.parametrize(
    ("plan", "shard"),
    subsets.pairs(
        ["data=4", "data=2,pipeline=2,microbatches=4", "data=2,tensor=2", "data=2,pipeline=2,sequence=2"], SHARDS
    ),
)
def test_one_worker_stands_for_all_that_share(plan: str, shard: str) -> None:
    few, every = predicted(LARGE, plan, shard=shard), predicted(LARGE, plan, shard=shard, every=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)


def test_memory_is_what_it_was() -> None:
    plain, *found = (
        predicted(LARGE, "data=8", shard=s).stages[0].memory for s in ("none", "optimizer", "gradients", "parameters")
    )
    assert [memory.optimizer < plain.optimizer / 4 for memory in found] == [True, True, True]
    assert [memory.parameters < plain.parameters for memory in found] == [False, False, True]


@pytest.mark.parametrize(
    ("plan", "shard"),
    subsets.one_in(
        2,
        subsets.pairs(
            ["data=2,pipeline=2,microbatches=2", "[data=2 | tensor=2]", "[data=2 | data=2,tensor=2]"],
            ["none", "optimizer", "parameters"],
        ),
        several=True,
    ),
)
def test_tied_weights_are_summed_over_stages_however_they_are_shared(plan: str, shard: str) -> None:
    found = predicted(planning_graphs.example("gpt"), plan, shard=shard)
    tied = [span for span in spans(found, ActionKind.REDUCE) if (span.action.value or "").startswith("tied")]
    assert tied and all(span.bytes for span in tied)


def test_while_one_attention_is_gone_through_backward_it_has_what_it_had() -> None:
    graph = planning_graphs.attending(1, 64, 512)
    none, selective = (predicted(graph, "data=1", recompute=how).stages[0].memory for how in ("none", "selective"))
    assert selective.activations == none.activations


@pytest.mark.parametrize(
    ("plan", "network"),
    subsets.pairs(
        ["data=2", "data=4,pipeline=2,microbatches=4", "data=8,microbatches=2"],
        [(1, "bfloat16"), (4, "float32"), (4, "bfloat16"), (1, "float32")],
    ),
)
def test_who_holds_less_needs_no_more_memory(plan: str, network: tuple[int, str]) -> None:
    blocks, dtype = network
    graph, ways = planning_graphs.blocks(blocks, 1024), ("none", "optimizer", "gradients", "parameters")
    found = [predicted(graph, plan, batch=64, shard=way, dtype=dtype) for way in ways]
    for stages in zip(*(each.stages for each in found), strict=True):
        totals = [stage.memory.total for stage in stages]
        assert totals == sorted(totals, reverse=True)


def test_attention_with_dropout_takes_the_time_of_its_scores() -> None:
    """They are read and written 26 times in both passes, at what the memory gives."""
    plain, dropping = (
        predicted(planning_graphs.attending(2, 64, 2048, True, dropout), "data=1", dtype="bfloat16").seconds
        for dropout in (0.0, 0.1)
    )
    passed = 2 * 26 * 16 * 4 * 2048**2 * 2 / 2039e9  # two attentions, their scores in 16 bits
    assert passed < dropping < plain + 2 * passed
    assert plain < passed
