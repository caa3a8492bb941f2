"""This machine as a cluster, unmeasured: presets, and as many cores as there are."""

from __future__ import annotations

import os

from polylane.cluster.cluster import Cluster
from polylane.cluster.line import parse


def here(workers: int) -> Cluster:
    """The CPU of this machine, for so many workers."""
    return parse(f"{workers}:cpu,cores={len(os.sched_getaffinity(0))}")
