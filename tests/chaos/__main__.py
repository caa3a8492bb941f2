"""``python -m tests.chaos RECIPE --plan SPEC``: faults at random moments of trainings, see ``make chaos``.

A command beside those of polylane, in whose command line it is entered here, so that errors are sentences as there.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from polylane import cli
from polylane import cli_options as options
from tests.chaos.request import ChaosRequest

ChaosPlans = Annotated[list[str], typer.Option("--plan", metavar="SPEC", help="A plan, as of train. Repeatable.")]
ChaosMinutes = Annotated[float | None, typer.Option("--minutes", metavar="M", min=0, help="Try faults so long.")]
ChaosFaults = Annotated[int | None, typer.Option("--faults", metavar="N", min=1, help="Try so many faults.")]
ChaosOnly = Annotated[
    list[str] | None, typer.Option("--only", metavar="FAULT", help="Faults to try. Repeatable. Default: all.")
]
ChaosTransports = Annotated[
    list[str] | None,
    typer.Option("--transport", metavar="NAME", help="shared_memory or gloo. Repeatable. Default: both."),
]
ChaosLaunchers = Annotated[
    list[str] | None,
    typer.Option("--launcher", metavar="NAME", help="own or torchrun: who starts workers. Repeatable. Default: own."),
]
ChaosSteps = Annotated[int, typer.Option("--steps", metavar="S", min=1, help="Optimizer steps of every training.")]
ChaosInterval = Annotated[int, typer.Option("--save-every", metavar="S", min=1, help="Steps between two checkpoints.")]
ChaosHang = Annotated[
    float, typer.Option("--hang-after", metavar="SECONDS", min=0.1, help="No progress for this long is a hang.")
]


def chaos(
    recipe: options.Recipe,
    plan: ChaosPlans,
    minutes: ChaosMinutes = None,
    faults: ChaosFaults = None,
    only: ChaosOnly = None,
    transport: ChaosTransports = None,
    launcher: ChaosLaunchers = None,
    batch: options.Batch = 64,
    steps: ChaosSteps = 60,
    save_every: ChaosInterval = 10,
    hang_after: ChaosHang = 3.0,
    seed: options.Seed = 0,
    set_: options.Set = None,
    clip_norm: options.ClipNorm = None,
    json: options.Json = False,
) -> None:
    """Try faults on trainings of a recipe: each must be named, be recovered from, and change no number.

    Kills, stops, freezes, crashes of workers, exceptions of the recipe's code, a full disk or stdout, damaged
    checkpoints, a closed terminal, files and processes that the system refuses, and a dead link between two hosts (as
    root, with --launcher torchrun), at moments that the seed draws. Every training is held against the unbroken one,
    bit for bit. Without --minutes and --faults one of each kind. Exit code 1 where a law was broken; the files of such
    trials are kept.

    \b
    Example:
      python -m tests.chaos examples/digits.py --plan data=2 --plan pipeline=2 --seed 7 --minutes 5
    """
    from tests.chaos import campaign

    request = ChaosRequest(
        recipe=recipe,
        batch=batch,
        settings=tuple(set_ or ()),
        seed=seed,
        json=json,
        plans=tuple(plan),
        transports=tuple(transport or ()),
        launchers=tuple(launcher or ()),
        only=tuple(only or ()),
        minutes=minutes,
        faults=faults,
        steps=steps,
        save_every=save_every,
        hang_after=hang_after,
        clip_norm=clip_norm,
    )
    if not campaign.run(request):
        raise typer.Exit(1)


if __name__ == "__main__":
    cli.app.command()(chaos)
    cli.main(["chaos", *sys.argv[1:]])
