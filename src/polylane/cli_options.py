"""The options that several commands have."""

from __future__ import annotations

from typing import Annotated

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
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="S", min=0, max=2**32 - 1, help="Of the weights, the samples' order and all dropout."
    ),
]
ClipNorm = Annotated[
    float | None, typer.Option("--clip-norm", metavar="X", help="Bound on the 2-norm of all gradients together.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
