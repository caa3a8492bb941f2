"""Commands of the command line that predict: probe, simulate, plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polylane.cli_options import Batch, Json, Recipe, Set
from polylane.commands.requests import PlanRequest, ProbeRequest, RecipeRequest, SimulateRequest


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    # Registered here and not by decorators: the application is in cli.py, which imports this module.
    for command in (probe, simulate, plan):
        app.command()(command)


# Options of simulate and plan.
_Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Devices and links: a cluster file, or one line such as 8:h100-80g, 16x8:a100-80g,hosts=roce-200 or "
        "2x4x8:a100-80g,sites=internet-1g.",
    ),
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Data type of the passes: float32, bfloat16 or float16. Default: the plan's, else float32."
    ),
]
_Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        help="Activations that are recomputed instead of kept: none, selective (attention's), full; for a given plan "
        "also a budget such as budget:200MB, or modules: blocks.3:full+blocks.5:selective. Default: what the plan "
        "says, or what a search needs to fit.",
    ),
]
_Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="The plan's key shard: what is sharded over replicas: none, optimizer, gradients, parameters (ZeRO-1, -2, "
        "-3). Default: what the plan says, or the search finds.",
    ),
]
_Every = Annotated[
    int | None,
    typer.Option(
        "--every",
        metavar="N",
        help="The plan's key every: replicas average parameters every N steps; 1: gradients in each.",
    ),
]


_Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="The plan's key schedule: 1f1b, afab, interleaved, zb-h1, ... Default: what the plan says, or the search "
        "finds.",
    ),
]
_Chunks = Annotated[
    int | None,
    typer.Option("--chunks", metavar="V", help="The plan's key chunks: stages of every worker (1F1B: interleaved)."),
]
_Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="SHARE|SIZE",
        help='Memory that a found plan leaves free on every device, as in 5% or "2 GiB". Default: 5%.',
    ),
]


def probe(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Measure this machine into a cluster file.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Workers that will train here. Default: up to four.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile", metavar="RECIPE", help="Measure a recipe's own operators, for plan and simulate --profile."
        ),
    ] = None,
    batch: Batch = 64,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Measure this machine: speed of operators, memory, messages and collectives, and what workers cost each other.

    \b
    Examples:
      polylane probe -o cluster.yaml --workers 2
      polylane probe --profile examples/gpt.py --batch 32
    """
    from polylane.commands import probe as command

    settings = tuple(set_ or ())
    recipes = [RecipeRequest(recipe=path, batch=batch, settings=settings, json=json) for path in profile or []]
    command.run(ProbeRequest(output=output, workers=workers, recipes=tuple(recipes), json=json))


_Profile = Annotated[
    bool, typer.Option("--profile", help="Use the times that polylane probe --profile measured of this recipe.")
]

# Options of simulate alone.
_SimulatedPlan = Annotated[
    str,
    typer.Option(
        "--plan",
        metavar="SPEC",
        help="How to split it: a line, a file, or auto for the plan that polylane plan finds.",
    ),
]
_Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Reduce gradients during the backward pass.")]
_Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="RANK=SPEED", help="A straggler: with 3=0.8 rank 3 needs 1 / 0.8 of the time."),
]
_Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the predicted swimlanes as a page.")]
_Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the predicted swimlanes as a picture.")]


def simulate(
    recipe: Recipe,
    cluster: _Cluster,
    plan: _SimulatedPlan,
    batch: Batch = 64,
    set_: Set = None,
    dtype: _Dtype = None,
    recompute: _Recompute = None,
    shard: _Shard = None,
    overlap: _Overlap = True,
    slow: _Slow = None,
    html: _Html = None,
    svg: _Svg = None,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Print the times by kind of operator.")] = False,
    profile: _Profile = False,
    schedule: _Schedule = None,
    chunks: _Chunks = None,
    every: _Every = None,
    reserve: _Reserve = None,
    json: Json = False,
) -> None:
    """Predict a step of a plan on a cluster that need not be there.

    The model is built without its weights, so that any size fits. The programs of the workers are simulated with the
    costs of operators, messages and memory. Printed are time, utilization, bytes, memory of every stage, and price.

    \b
    Examples:
      polylane simulate examples/gpt.py --cluster 8:a100-80g --plan data=8 --batch 64 --dtype bfloat16
      polylane simulate examples/gpt.py --cluster 2x8:h100-80g --plan pipeline=2,tensor=8 --html lanes.html
      polylane simulate examples/gpt.py --cluster 4:a100-80g --plan pipeline=4,microbatches=8 --chunks 2
      polylane simulate examples/gpt.py --cluster 2x1x8:a100-80g,sites=internet-1g --plan data=16 --every 32
    """
    from polylane.commands import simulate as command

    request = SimulateRequest(
        recipe=recipe,
        batch=batch,
        settings=tuple(set_ or ()),
        json=json,
        cluster=cluster,
        dtype=dtype,
        recompute=recompute,
        shard=shard,
        overlap=overlap,
        reserve=reserve,
        profile=profile,
        plan=plan,
        slow=tuple(slow or ()),
        html=html,
        svg=svg,
        breakdown=breakdown,
        schedule=schedule,
        chunks=chunks,
        every=every,
    )
    command.run(request)


# Options of plan alone.
_Fixed = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="KEYS", help="Keys that the plan must have, as in data=2,shard=parameters. Default: none."
    ),
]
_MostWorkers = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="How many devices to use at most. Default: all.")
]
_Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help='Memory of a worker, as in "30 GiB". Default: all but --reserve.'),
]


def plan(
    recipe: Recipe,
    cluster: _Cluster,
    batch: Batch = 64,
    set_: Set = None,
    plan: _Fixed = None,
    workers: _MostWorkers = None,
    memory: _Memory = None,
    dtype: _Dtype = None,
    recompute: _Recompute = None,
    shard: _Shard = None,
    every: _Every = None,
    schedule: _Schedule = None,
    chunks: _Chunks = None,
    reserve: _Reserve = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="How many plans to show.")] = 5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the best plan as a file.")
    ] = None,
    profile: _Profile = False,
    json: Json = False,
) -> None:
    """Find the fastest plan for a cluster, and say why it is.

    Compares replicas and what they share out, pipelines and their schedules, split operators, stages with meshes of
    their own and numbers of microbatches by estimated times, and simulates the best of them. Says what bounds the best
    plan, what would make it faster, and what does not fit. What changes a training's numbers (every=, wire=, the
    asynchronous schedules, ...) is never chosen unasked.

    \b
    Examples:
      polylane plan examples/gpt.py --cluster 8:a100-80g --batch 256 --dtype bfloat16 -o plan.yaml
      polylane plan examples/gpt.py --cluster 8:a100-80g --plan data=4,shard=parameters --reserve "4 GiB"
      polylane plan examples/gpt.py --cluster 2x1:gtx-1080-ti --set hidden=1024 --set layers=24
    """
    from polylane.commands import plan as command

    request = PlanRequest(
        recipe=recipe,
        batch=batch,
        settings=tuple(set_ or ()),
        json=json,
        cluster=cluster,
        dtype=dtype,
        recompute=recompute,
        shard=shard,
        every=every,
        schedule=schedule,
        chunks=chunks,
        reserve=reserve,
        profile=profile,
        plan=plan,
        workers=workers,
        memory=memory,
        top=top,
        output=output,
    )
    command.run(request)
