"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A Python file, or a package.module.", show_default=False)
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="SPEC",
        help="How to split: one line of data=, pipeline=, sequence=, tensor=, ..., a plan file, or auto for the best "
        "plan on this machine. Default: data=N.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, max=2**20, help="How many workers: what the plan takes, which is the default."
    ),
]
Batch = Annotated[int, typer.Option("--batch", metavar="B", min=1, help="Samples in a batch, over all workers.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A keyword argument of the recipe's functions. Repeatable."),
]
Epochs = Annotated[int | None, typer.Option("--epochs", metavar="E", min=1, help="Times through the data. Default: 1.")]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="S", min=1, help="Optimizer steps, in place of --epochs.")
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="Where the files go. Default: a new run/NAME, run/NAME-2, ..."),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="S", min=0, max=2**32 - 1, help="Of the weights, the samples' order and all dropout."
    ),
]
ClipNorm = Annotated[
    float | None, typer.Option("--clip-norm", metavar="X", help="Bound on the 2-norm of all gradients together.")
]
OnNan = Annotated[
    Literal["stop", "warn"],
    typer.Option("--on-nan", help="Of a loss that is not finite: stop, naming the first operator; or go on."),
]
StopOnNan = Annotated[bool, typer.Option("--stop-on-nan", help="The same as --on-nan stop.", hidden=True)]
DropLast = Annotated[bool, typer.Option("--drop-last", help="Leave out a last batch that is shorter than the others.")]
LargeBatchOptimizer = Annotated[
    Literal["lars", "lamb"] | None,
    typer.Option("--optimizer", help="For large batches, in place of the recipe's, at the rate --lr."),
]
LearningRate = Annotated[float | None, typer.Option("--lr", metavar="X", help="The learning rate of --optimizer.")]
ScaleRate = Annotated[
    Literal["linear", "sqrt"] | None,
    typer.Option("--scale-lr", help="Scale learning rates with the batch; they are meant for --base-batch."),
]
BaseBatch = Annotated[
    int | None, typer.Option("--base-batch", metavar="B", min=1, help="The batch that --scale-lr scales from.")
]
Warmup = Annotated[
    int, typer.Option("--warmup", metavar="S", min=0, help="Steps in which learning rates rise to what they are.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
