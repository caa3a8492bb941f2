"""``polylane simulate``: predict a step of a plan on a cluster: time, bytes, memory and price, without running it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from polylane.cluster.figures import format_size
from polylane.commands import planning, printing
from polylane.commands import user_inputs as inputs
from polylane.errors import PolylaneError, format_plural
from polylane.plan.fixed_keys import FixedKeys, parse_auto
from polylane.settings import parse_whole

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.commands.requests import SimulateRequest
    from polylane.cost.operators.training_options import TrainingOptions
    from polylane.cost.predict import Prediction
    from polylane.graph.graph import Graph
    from polylane.graph.partition import Partition
    from polylane.observe.timeline import Timeline
    from polylane.plan.plan import AnyPlan, Plan

TOP = 12  # most rows of a stage in a printed breakdown


@planning.gc_disabled()
def run(request: SimulateRequest) -> None:
    """Predict a step and print it.

    Raises:
        PolylaneError: an option, the recipe, the plan or the cluster is wrong.
    """
    from polylane.auto.choose import announce_best
    from polylane.cluster.spec import load_or_parse
    from polylane.cost.predict import predict
    from polylane.observe.swimlane import render as swimlane
    from polylane.plan.plan import Plan
    from polylane.planner.find_order import find_order
    from polylane.planner.find_plans import find_plans, keep_options
    from polylane.planner.memory_reserve import refuse_whole_reserve
    from polylane.planner.problem import build_cost_model, fit_plan, fit_to_meshes

    method = planning.method_of(request)
    auto_keys = parse_auto(request.plan)
    check(request, auto_keys)
    plan = None if auto_keys is not None else planning.patch_plan(inputs.read_plan(request.plan), request)
    # A plan file's placements hold for the layouts that are priced.
    pins = {axis: plan.pins(axis) for axis in plan.axes} if isinstance(plan, Plan) else {}
    cluster = slow_down_cluster(load_or_parse(request.cluster), request.slow)
    if auto_keys is not None:
        refuse_whole_reserve(cluster, cluster.count, planning.reserve_of(request))
    recipe = inputs.open_recipe(request)
    problem, captured = planning.capture_for_prediction(recipe, cluster, request, pins)
    if plan is None:
        fixed = planning.fixed_keys(str(auto_keys), request)
        method = keep_options(method, fixed)
        plan = announce_best(
            find_plans(captured, cluster, request.batch, method, fixed=fixed, reserve=planning.reserve_of(request))
        )
    else:
        plan = planning.with_microbatches(divide_further(plan, request.chunks or 1), captured.graph, request.batch)
    check_plan(plan, cluster)
    method = method if request.dtype is not None else replace(method, dtype=plan.precision)
    basis = build_cost_model(captured, cluster, method)
    partition, fitted = fit_plan(basis, plan, request.batch)
    basis = fit_to_meshes(basis, partition, fitted, request.batch)
    fitted = find_order(basis, partition, fitted, request.batch, placed=isinstance(plan, Plan))
    # Ranks that do the same are simulated once; a picture needs a lane for every rank.
    drawn = request.html is not None or request.svg is not None
    prediction = predict(basis, partition, fitted, request.batch, every=drawn)
    facts = {"recipe": str(recipe.path), **summary(captured.graph, cluster, prediction, method)}
    if tokens := planning.tokens_per_sample(problem, captured.graph):
        facts["tokens_per_second"] = prediction.samples_per_second * tokens
    facts |= {"chunks": fitted.most_chunks, "every": prediction.period}
    if prediction.served is not None:
        facts["apart"] = prediction.served.apart
    if request.breakdown:
        facts["breakdown"] = break_down_stages(basis, partition, prediction)
    suffix = f" · the last of {prediction.period} steps" * (prediction.period > 1)
    for file, draw in ((request.html, swimlane.html), (request.svg, swimlane.svg)):
        if file is not None:
            printing.write_text(file, draw(replace(prediction.timeline, title=f"{fitted.spec}{suffix} · predicted")))
    if request.json:
        printing.print_json(facts)
    else:
        print_prediction(facts)


def check(request: SimulateRequest, auto_keys: FixedKeys | None) -> None:
    """Refuse combinations of options that no plan can have, before anything is captured.

    Args:
        request: the options that were given to ``polylane simulate``.
        auto_keys: what a plan that is to be found must keep; None for a plan that is given.

    Raises:
        PolylaneError: an option is out of range or excludes another; the message names it.
    """
    if request.chunks is not None and request.chunks < 1:
        raise PolylaneError(f"--chunks must be at least 1, not {request.chunks}")
    if auto_keys is not None:
        planning.fixed_keys(str(auto_keys), request)
    elif request.reserve is not None:
        raise PolylaneError("--reserve is for plans that are searched, with --plan auto: this plan is given")


def divide_further(plan: AnyPlan, chunks: int) -> AnyPlan:
    """Return the plan with that many stages on every worker; as it is for 1.

    Raises:
        PolylaneError: a plan that says where its stages begin, or that has no chunks.
    """
    from polylane.plan.plan import Plan

    if isinstance(plan, Plan) and chunks not in (1, plan.most_chunks):
        raise PolylaneError(
            f"{plan.title} says where its stages begin, which {chunks} chunks of each would change: give it in one line"
        )
    return plan if isinstance(plan, Plan) or chunks == 1 else plan.with_chunks(chunks)


def check_plan(plan: AnyPlan, cluster: Cluster) -> None:
    """Refuse a plan that the cluster has too few devices for.

    Raises:
        PolylaneError: the plan takes more workers than there are devices.
    """
    if plan.workers > cluster.count:
        raise PolylaneError(
            f"the plan takes {format_plural(plan.workers, 'worker')}, but the cluster has "
            f"{format_plural(cluster.count, 'device')}"
        )


def slow_down_cluster(cluster: Cluster, options: Sequence[str]) -> Cluster:
    """Return the cluster with stragglers: ``3=0.8`` makes the device of rank 3 four fifths as fast.

    Raises:
        PolylaneError: a text that is not RANK=SPEED, or a rank that the cluster lacks.
    """
    speeds = dict(cluster.speeds)
    for option in options:
        form = re.fullmatch(r"([0-9]+)=((?:[0-9]+|[0-9]*\.[0-9]+))", option.strip())
        if form is None:
            raise PolylaneError(f"--slow takes RANK=SPEED, as in 3=0.8, not {option!r}")
        speeds[parse_whole("--slow", form[1])] = float(form[2])
    return replace(cluster, speeds=speeds) if options else cluster


# Plain data ----------------------------------------------------------------------------------------------------------


def summary(graph: Graph, cluster: Cluster, prediction: Prediction, method: TrainingOptions) -> dict[str, Any]:
    """Return the figures of a step, as plain data."""
    plan, step = prediction.plan, prediction.seconds
    # Recomputation is left out, so that MFU compares plans by useful work.
    flops = planning.model_flops(graph, prediction.batch)
    device_flops = flops / (step * plan.workers) if step else 0.0
    device = cluster.device(0)
    return {
        "plan": plan.spec,
        "workers": plan.workers,
        "batch": prediction.batch,
        "method": {**asdict(method), "shard": plan.sync.shard},
        "step_seconds": step,
        "overlap_seconds": prediction.overlap,
        "samples_per_second": prediction.samples_per_second,
        "model_flops": flops,
        "flops_per_second_per_device": device_flops,
        "mfu": device_flops / device.peak(method.dtype),
        "utilization": prediction.utilization,
        "moving": prediction.moving,
        "waiting": prediction.waiting,
        "bubble": prediction.bubble,
        "bytes": sent_bytes(prediction, cluster),
        "stages": [_stage(prediction, index, cluster) for index in range(len(plan.first_chunks))],
        "price": cluster.price * plan.workers / cluster.count * step / 3600,
    }


def sent_bytes(prediction: Prediction, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the busiest rank's bytes of a step, by kind of traffic, with the cluster level that each kind crosses."""
    # Under local SGD there are two timelines: of a step that ends with an average, and of one without.
    counted = {
        id(t): _bytes(prediction, t) for t in (prediction.timeline, prediction.local_step_timeline) if t is not None
    }

    def mean(key: tuple[str, int]) -> int:
        """Return a count averaged over the period: of local SGD only one step in ``every`` averages parameters."""
        return round(prediction.mean_over_period(lambda timeline: counted[id(timeline)][key]))

    lanes = {key: mean(key) for key in set().union(*counted.values())}
    rows = []
    for kind in ("operators", "pipeline", "data"):
        peak = max((bytes_ for (traffic, _), bytes_ in lanes.items() if traffic == kind), default=0)
        if peak:
            rows.append({"traffic": kind, "level": _widest_level(prediction.plan, kind, cluster), "bytes": peak})
    return rows


def _bytes(prediction: Prediction, timeline: Timeline) -> Counter[tuple[str, int]]:
    """Return the bytes that are sent in a step, by kind of traffic and lane."""
    from polylane.schedule.action import PASSES, ActionKind

    kinds = {ActionKind.SEND: "pipeline", ActionKind.REDUCE: "data", ActionKind.STEP: "data"}
    shared = [prediction.stages[prediction.plan.group_of(rank)].shard_traffic_share for rank in prediction.lanes]
    lanes = Counter[tuple[str, int]]()
    for span in timeline.spans:
        parts = {kinds[span.action.kind]: span.bytes} if span.action.kind in kinds else {}
        # Collectives inside a pass belong to split operators, but for the gathers of sharded parameters (ZeRO-3).
        if span.action.kind in PASSES:
            data = round(shared[span.rank] * span.bytes)
            parts = {"data": data, "operators": span.bytes - data}
        for kind, bytes_ in parts.items():
            lanes[kind, span.rank] += bytes_
    return lanes


def _widest_level(plan: Plan, kind: str, cluster: Cluster) -> str:
    """Return the widest level of the cluster (host, rack, site, ...) that a kind of traffic crosses."""
    groups: list[Sequence[int]] = []
    for stage, next_stage in zip(plan.stages, [*plan.stages[1:], plan.stages[0]], strict=True):
        rank = stage.devices[0]
        if kind == "pipeline":
            groups.append((rank, next_stage.devices[0]))
        else:
            axes = ("data",) if kind == "data" else ("sequence", "tensor")
            groups.append(plan.group(rank, axes))
    # Traffic of a kind whose groups have one rank each: gradients of tied weights, or statistics that replicas share.
    if all(len(set(group)) == 1 for group in groups):
        groups = [range(plan.workers)]
    return max(cluster.level(group) for group in groups).name.lower()


def _stage(prediction: Prediction, index: int, cluster: Cluster) -> dict[str, Any]:
    stage, devices = prediction.stages[index], prediction.plan.stages[prediction.plan.first_chunks[index]].devices
    return {
        "stage": index,
        "mesh": str(stage.mesh),
        "samples": stage.samples,
        "forward": stage.passes.forward,
        "backward": stage.passes.backward,
        "waits": stage.collective_seconds,
        "update": stage.update_seconds,
        "memory": stage.memory.as_dict(),
        "limit": min(device.memory for device in cluster.devices(devices)),
    }


def break_down_stages(basis: Any, partition: Partition, prediction: Prediction) -> list[dict[str, Any]]:
    """Return the seconds of a microbatch by kind of operator, on the busiest rank of every stage."""
    from polylane.cost.plan_cost import PlanCost

    breakdown, costs = [], PlanCost(basis, partition, prediction.plan, prediction.batch)
    for index in range(prediction.plan.pipeline):
        table, kinds, rows = costs.table(index), defaultdict[str, list[int]](list), list[dict[str, Any]]()
        for start, end in costs.node_ranges(index):
            for at in range(start, end):
                kinds[partition.graph.nodes[at].op.removeprefix("aten.").split(".")[0]].append(at)
        for kind, nodes in kinds.items():
            forward, backward, forward_waits, back = (
                sum(table.between(name, at, at + 1) for at in nodes)
                for name in ("forward", "backward", "waits", "backward_waits")
            )
            times = {"forward": forward, "backward": backward, "waits": forward_waits + back}
            rows.append({"stage": index, "operator": kind, "nodes": len(nodes), **times})
        breakdown += sorted(rows, key=lambda row: -(row["forward"] + row["backward"] + row["waits"]))
    return breakdown


# For people ----------------------------------------------------------------------------------------------------------


def print_prediction(facts: dict[str, Any]) -> None:
    """Print the figures of `summary` for people."""
    screen = printing.console()
    rate = f"{facts['samples_per_second']:,.1f} samples/s"
    if "tokens_per_second" in facts:
        rate += f", {facts['tokens_per_second']:,.0f} tokens/s"
    price = f", {facts['price']:.2g} per step" if facts["price"] else ""
    mean = f" on average, with a sum of parameters every {facts['every']} steps" if facts["every"] > 1 else ""
    screen.print(
        f"A step of {format_plural(facts['batch'], 'sample')} takes "
        f"{printing.format_duration(facts['step_seconds'])} on "
        f"{format_plural(facts['workers'], 'worker')}: {rate}{price}{mean}."
    )
    screen.print(
        f"{facts['flops_per_second_per_device'] / 1e12:.1f} TFLOP/s per device of the model's own work, "
        f"{facts['mfu']:.1%} of the peak; workers compute {facts['utilization']:.1%} of the time, move bytes "
        f"{facts['moving']:.1%}, wait for slower workers {facts['waiting']:.1%}, bubbles {facts['bubble']:.1%}."
    )
    if facts["overlap_seconds"]:
        early = printing.format_duration(facts["overlap_seconds"])
        screen.print(f"Each step begins {early} before the last worker is done with the one before it.")
    if facts.get("apart"):
        screen.print(f"Replicas are up to {format_plural(facts['apart'], 'step')} apart.")
    for row in facts["bytes"]:
        reach = "between sites" if row["level"] == "cluster" else f"within a {row['level']}"
        sent = printing.format_count(row["bytes"], "B")
        screen.print(f"{row['traffic']}: {sent} sent per worker and step, {reach}")
    _show_stages(facts["stages"])
    if "breakdown" in facts:
        _show_breakdown(facts["breakdown"])


def _show_stages(stages: Sequence[dict[str, Any]]) -> None:
    columns = ("stage", "mesh", "samples", "forward", "backward", "collectives", "optimizer's step")
    times = printing.make_table("One microbatch on the busiest worker of each stage", *columns, left=["mesh"])
    heads = ("parameters", "gradients", "optimizer", "activations", "messages", "margin", "all")
    sizes = printing.make_table("Memory of that worker", "stage", *heads)
    for row in stages:
        memory = row["memory"]
        cells = (printing.format_duration(row[name]) for name in ("forward", "backward", "waits", "update"))
        times.add_words(str(row["stage"]), row["mesh"], str(row["samples"]), *cells)
        parts = ("parameters", "gradients", "optimizer", "activations", "communication", "margin", "total")
        over = memory["total"] > row["limit"]
        sizes.add_words(
            str(row["stage"]),
            *(format_size(memory[name]) for name in parts),
            style="red" if over else "",
        )
    printing.print_table(printing.console(), times)
    printing.print_table(printing.console(), sizes)
    for row in stages:
        over = row["memory"]["total"] - row["limit"]
        if over > 0:
            printing.console().print(f"Stage {row['stage']} does not fit: {format_size(over)} more than a device has.")


def _show_breakdown(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("stage", "operator", "nodes", "forward", "backward", "waits")
    grid, shown = (
        printing.make_table("Seconds of a microbatch by operator", *columns, left=["operator"]),
        Counter[int](),
    )
    for row in rows:
        shown[row["stage"]] += 1
        if shown[row["stage"]] <= TOP:
            times = (printing.format_duration(row[name]) for name in ("forward", "backward", "waits"))
            grid.add_words(str(row["stage"]), row["operator"], str(row["nodes"]), *times)
    printing.print_table(printing.console(), grid)
