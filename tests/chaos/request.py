"""What is asked of a campaign of faults."""

from __future__ import annotations

from dataclasses import dataclass

from polylane.commands.requests import RecipeRequest


@dataclass(frozen=True, kw_only=True)
class ChaosRequest(RecipeRequest):
    """The options of ``python -m tests.chaos``; the seed is that of the faults as well.

    Attributes:
        plans: lines of plans, or paths of plan files, on which faults are tried.
        transports: values of POLYLANE_TRANSPORT under which they are tried; empty: all.
        launchers: "own" where polylane starts the workers, "torchrun" where torchrun does; empty: "own".
        only: names of the faults that are tried; empty: all.
        minutes: time after which no other fault is tried; None: none.
        faults: number of faults after which there is no other; None: as many as there is time for.
        steps: optimizer steps of every training.
        save_every: steps between two checkpoints.
        hang_after: seconds without progress after which a worker hangs.
        clip_norm: bound on the 2-norm of all gradients; None: gradients are not clipped.
    """

    plans: tuple[str, ...]
    transports: tuple[str, ...]
    launchers: tuple[str, ...]
    only: tuple[str, ...] = ()
    minutes: float | None = None
    faults: int | None = None
    steps: int = 60
    save_every: int = 10
    hang_after: float = 3.0
    clip_norm: float | None = None
