"""Commands of the command line that look at machines and predict: doctor, probe, simulate, plan, advise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polylane.cli_options import Batch, Json, Recipe, Set
from polylane.commands.learning.advise_request import AdviseRequest
from polylane.commands.requests import PlanRequest, ProbeRequest, RecipeRequest, SimulateRequest, build_request


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    # Registered here and not by decorators: the application is in cli.py, which imports this module.
    for command in (doctor, probe, simulate, plan, advise):
        app.command()(command)


# Options of simulate and plan.
_Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Devices and links: a cluster file, or a line such as 8:h100-80g, 16x8:a100-80g,hosts=roce-200 or "
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
        help="Activations to recompute instead of saving them: none, selective (of attention) or full; with a "
        "given plan also a budget (budget:200MB) or modules (blocks.3:full+blocks.5:selective). Default: "
        "that of the plan, or what a found plan needs to fit.",
    ),
]
_Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="State to shard over replicas: none, optimizer, gradients or parameters (ZeRO-1, -2, -3). "
        "Default: that of the plan, or what the search finds.",
    ),
]
_Every = Annotated[
    int | None,
    typer.Option(
        "--every",
        metavar="N",
        help="Average the parameters of replicas every N steps; 1: average gradients in each step.",
    ),
]


_Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Pipeline schedule: 1f1b, afab, interleaved, zb-h1, ... Default: that of the plan, or what the "
        "search finds.",
    ),
]
_Chunks = Annotated[
    int | None,
    typer.Option("--chunks", metavar="V", help="Number of stages per worker (makes 1f1b interleaved)."),
]
_Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="SHARE|SIZE",
        help='Memory to leave free on each device when searching: 5% or "2 GiB". Default: 5%.',
    ),
]


def probe(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the measurements to a cluster file.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Number of workers that will train here. Default: up to four."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="RECIPE",
            help="Measure the operators of a recipe, for --profile of plan and simulate. Repeatable.",
        ),
    ] = None,
    batch: Batch = 64,
    settings: Set = None,
    json: Json = False,
) -> None:
    """Measure this machine or all hosts, for plan and simulate.

    -o measures operators, memory, communication, and how much workers that run side by side slow each other, in under a
    minute, and writes a cluster file. Started by torchrun or srun on several hosts, it measures one host of each kind,
    every device's speed and the links between all pairs of hosts, and rank 0 writes the file. --profile measures the
    operators of a recipe, which is more accurate on a CPU. Nothing else should run meanwhile.

    \b
    Examples:
      polylane probe -o cluster.yaml --workers 2
      polylane probe --profile examples/gpt.py --batch 32
      torchrun --nnodes 2 --nproc-per-node 4 ... -m -- polylane probe -o cluster.yaml
    """
    from polylane.commands import probe as command

    recipes = [
        RecipeRequest(recipe=path, batch=batch, settings=tuple(settings or ()), json=json) for path in profile or []
    ]
    command.run(ProbeRequest(output=output, workers=workers, recipes=tuple(recipes), json=json))


def doctor(
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="The run's folder, which all hosts must see."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="A cluster file with the link that hosts are to have."),
    ] = None,
    json: Json = False,
) -> None:
    """Find what is wrong with a machine, or with the hosts of a cluster.

    Versions, devices and their speed, memory, limits and disks; of several hosts, when a launcher starts it on all of
    them, names, ports in both directions, clocks, the run's folder, and the links between every two of them as well.
    One line for each, with what to do. The exit code is 1 if a training would fail.

    \b
    Examples:
      polylane doctor
      torchrun --nnodes 2 --nproc-per-node 4 ... -m -- polylane doctor --run /shared/runs/a
      srun polylane doctor --run /shared/runs/a
    """
    from polylane.commands import doctor as command

    command.run(run, cluster, json)


_Profile = Annotated[
    bool,
    typer.Option("--profile", help="Use the operator times that polylane probe --profile measured for this recipe."),
]

# Options of simulate alone.
_SimulatedPlan = Annotated[
    str,
    typer.Option(
        "--plan",
        metavar="SPEC",
        help="The plan: a line, a plan file, or auto for the plan that polylane plan finds.",
    ),
]
_Overlap = Annotated[
    bool, typer.Option("--overlap/--no-overlap", help="Overlap gradient reduction with the backward pass.")
]
_Slow = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="RANK=SPEED",
        help="Simulate a straggler: 3=0.8 runs rank 3 at 0.8 times its speed. Repeatable.",
    ),
]
_Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the predicted timeline as an HTML page.")
]
_Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the predicted timeline as SVG.")]


def simulate(
    recipe: Recipe,
    cluster: _Cluster,
    plan: _SimulatedPlan,
    batch: Batch = 64,
    settings: Set = None,
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
    """Predict time, memory and traffic of a training step.

    Does not need the cluster: the model is built without weights, so a model of any size can be simulated. Prints the
    predicted time, utilization, bytes sent, memory of each stage, and price.

    \b
    Examples:
      polylane simulate examples/gpt.py --cluster 8:a100-80g --plan data=8 --batch 64 --dtype bfloat16
      polylane simulate examples/gpt.py --cluster 2x8:h100-80g --plan pipeline=2,tensor=8 --html lanes.html
      polylane simulate examples/gpt.py --cluster 4:a100-80g --plan pipeline=4,microbatches=8 --chunks 2
      polylane simulate examples/gpt.py --cluster 2x1x8:a100-80g,sites=internet-1g --plan data=16 --every 32
    """
    request = build_request(SimulateRequest, locals())
    from polylane.commands import simulate as command

    command.run(request)


# Options of plan alone.
_Fixed = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="KEYS",
        help="Keys that every considered plan must have, such as data=2,shard=parameters. Default: none.",
    ),
]
_MostWorkers = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="Maximum number of devices to use. Default: all.")
]
_Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help='Memory available to a worker, such as "30 GiB". Default: all but --reserve.'
    ),
]


def plan(
    recipe: Recipe,
    cluster: _Cluster,
    batch: Batch = 64,
    settings: Set = None,
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
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Number of plans to show.")] = 5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the best plan to a file.")
    ] = None,
    profile: _Profile = False,
    json: Json = False,
) -> None:
    """Find the fastest plan for a cluster, and say why.

    Estimates plans of every kind (data parallelism with sharded state, pipelines and their schedules, sharded
    operators, a mesh per stage, numbers of microbatches), and simulates the best of them. Reports what limits the best
    plan, what would make it faster, and which plans do not fit. Options that change the numbers of a training (every=,
    wire=, asynchronous schedules, ...) are only used if you request them.

    \b
    Examples:
      polylane plan examples/gpt.py --cluster 8:a100-80g --batch 256 --dtype bfloat16 -o plan.yaml
      polylane plan examples/gpt.py --cluster 8:a100-80g --plan data=4,shard=parameters --reserve "4 GiB"
      polylane plan examples/gpt.py --cluster 2x1:gtx-1080-ti --set hidden=1024 --set layers=24
    """
    request = build_request(PlanRequest, locals())
    from polylane.commands import plan as command

    command.run(request)


def advise(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of polylane train.", show_default=False)],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="CLUSTER", help="Devices to compare for, as for polylane plan. Default: this machine."
        ),
    ] = None,
    workers: _MostWorkers = None,
    batches: Annotated[
        list[int] | None,
        typer.Option(
            "--batches",
            metavar="B",
            min=1,
            help="Batch size to compare. Repeatable. Default: that of the run's latest steps, times powers of two "
            "from 1/4 to 32, to a quarter of the data at most.",
        ),
    ] = None,
    plan: _Fixed = None,
    dtype: _Dtype = None,
    json: Json = False,
) -> None:
    """Compare batch sizes for a run.

    Shows throughput, statistical efficiency at the run's gradient noise scale, learning rate and price. For each batch
    size, searches the fastest plan and multiplies its predicted throughput by what a sample of such a
    batch is worth. The run may still be training. More: the page "Statistical
    efficiency" of the documentation.

    \b
    Examples:
      polylane advise run/digits
      polylane advise run/gpt --cluster 8:a100-80g --dtype bfloat16
    """
    request = build_request(AdviseRequest, locals())
    from polylane.commands.learning import advise as command

    command.run(request)
