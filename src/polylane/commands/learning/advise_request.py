"""Request of ``polylane advise``: plain data, made before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class AdviseRequest:
    """The options of ``polylane advise``.

    Attributes:
        run: folder of a run of ``polylane train``, which may still be training.
        cluster: the devices that are to be compared for, as for ``polylane plan``; None: this machine.
        workers: number of devices to use at most; None: as many as the run has, or all of the cluster's.
        batches: the batches to compare; empty: the run's times powers of two.
        plan: keys that every plan must have, as in "data=2"; None: all are searched.
        dtype: of the passes, see ``polylane plan``.
        json: print the result as one JSON object.
    """

    run: Path
    cluster: str | None = None
    workers: int | None = None
    batches: tuple[int, ...] = ()
    plan: str | None = None
    dtype: str | None = None
    json: bool = False
