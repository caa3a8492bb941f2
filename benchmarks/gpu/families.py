"""Families of plans on two and four workers, which share the devices that are there."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.setting import Row, Setting, relative_difference
from benchmarks.gpu.trainings import train_by_plan, train_plainly
from polylane.runtime.workers.started_worker import WorkerContext

STEPS = 3
TOLERANCE = 1e-9  # relative, in float64
DIVERGED = 10.0  # a loss of the GPT: guessing one of 97 tokens has 4.6

# What computes the numbers of one device.
EQUAL = {
    2: (
        "data=2",
        "data=2,microbatches=2,shard=optimizer",
        "data=2,microbatches=2,shard=gradients",
        "data=2,microbatches=2,shard=parameters",
        "data=2,replicas=round-robin,microbatches=4",
        "tensor=2",
        "sequence=2",
        "pipeline=2,schedule=naive",
        "pipeline=2,schedule=afab,microbatches=4",
        "pipeline=2,schedule=1f1b,microbatches=4",
        "pipeline=2,schedule=interleaved,microbatches=4",
        "pipeline=2,schedule=zb-h1,microbatches=4",
        "pipeline=2,schedule=zb-h2,microbatches=4",
        "pipeline=2,schedule=zb-v,microbatches=4",
        "pipeline=2,microbatches=4,recompute=full",
        "data=2,servers=1",
        "data=2,servers=2",
    ),
    4: (
        "data=4",
        "data=2,pipeline=2,microbatches=4",
        "data=2,tensor=2",
        "sequence=2,tensor=2",
        "pipeline=2,tensor=2,microbatches=2",
        "data=2,pipeline=2,microbatches=2,shard=gradients",
        "data=2,sequence=2,shard=parameters",
        "pipeline=4,schedule=zb-h1,microbatches=4",
        "[data=2 | tensor=2],microbatches=2",
    ),
}

# What computes numbers of its own, which are compared with the same plan on the CPU.
OWN = {
    2: ("data=2,every=2", "data=2,compress=powersgd:2:1", "data=2,wire=bfloat16", "pipeline=2,schedule=pipedream"),
    4: ("pipeline=4,schedule=pipedream-2bw,microbatches=4", "data=4,every=2"),
}

# What depends on which worker is faster: only that it does not diverge; how near it is to the CPU's is shown.
TIMED = {2: ("data=2,servers=1,staleness=2",), 4: ("data=4,servers=1,staleness=2",)}


def plans_of(workers: int, quick: bool) -> tuple[str, ...]:
    """Return the plans for so many workers; in a quick run one of each kind of communication."""
    if not quick:
        return (*EQUAL[workers], *OWN[workers], *TIMED[workers])
    return (EQUAL[workers][0], EQUAL[workers][3 if workers == 2 else 1], OWN[workers][0])


def run_plans(plans: tuple[str, ...], setting: Setting, context: WorkerContext) -> None:
    """Train by each plan in turn; rank 0 sends the parent what came of it. Runs in every worker of a team."""
    wanted = train_plainly("gpt", STEPS, torch.device("cpu")) if context.rank == 0 else {}
    for plan in plans:
        start = time.perf_counter()
        # Stages that update at different times cannot share the tied weight.
        state, loss = train_by_plan("gpt, untied" if "pipedream" in plan else "gpt", STEPS, plan)
        if context.rank == 0:
            figures = {
                "device": str(context.device),
                "carried by": describe_transport(context),
                "to one device": relative_difference(state, wanted),
                "loss": loss,
                "seconds": time.perf_counter() - start,
            }
            numbers = {name: tensor.double().norm().item() for name, tensor in state.items()}
            context.send_message({"plan": plan, "figures": figures, "norms": numbers})


def describe_transport(context: WorkerContext) -> str:
    """Return in words what carries the tensors of a worker."""
    world = context.world
    if world.size == 1:
        return "nothing"
    return "host memory" if world.is_staged else {"nccl": "NCCL", "gloo": "shared memory"}[str(world.backend)]


def rows_of(workers: int, plans: tuple[str, ...], found: dict[str, dict], host: dict[str, dict]) -> list[Row]:
    """Judge what the teams on the device and on the CPU found.

    Args:
        workers: number of workers.
        plans: the plans that were asked for.
        found: by plan, what rank 0 of the team sent, or {"failed": reason}.
        host: the same of the team on the CPU; empty where that is what was measured.
    """
    rows = []
    for plan in plans:
        own, other = found.get(plan, {"failed": "it was not run"}), host.get(plan, {})
        name = f"{workers} workers: {plan}"
        if "failed" in own:
            rows.append(Row("families", name, {"failed": own["failed"]}, False))
            continue
        figures = dict(own["figures"])
        if "figures" in other:
            figures["seconds on the CPU"] = other["figures"]["seconds"]
            figures["to the CPU"] = _far(own["norms"], other["norms"])
        if plan in EQUAL[workers]:
            holds: bool | None = figures["to one device"] < TOLERANCE
        elif plan in OWN[workers]:
            holds = figures["to the CPU"] < 1e-7 if "to the CPU" in figures else None
        else:
            holds = figures["loss"] < DIVERGED
        rows.append(Row("families", name, figures, holds))
    return rows


def _far(norms: dict[str, float], other: dict[str, float]) -> float:
    return max(abs(norms[name] - other[name]) / (abs(other[name]) or 1.0) for name in other)
