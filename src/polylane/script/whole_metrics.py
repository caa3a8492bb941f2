"""Metric objects of a prepared script (torchmetrics): each worker updates them with whole values, and asks nobody else.

Under ``DistributedDataParallel`` every process has other samples, and a metric's ``compute()`` first adds up the states
of all processes, once torch.distributed is initialized. In a prepared script every worker has the values of the whole
batch, as one device has: added up, each sample would count once for every worker.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def keep_metrics_whole() -> None:
    """Let metrics compute from this worker's states alone; does nothing while torchmetrics is not imported.

    Not undone, since the script is that of a worker.
    """
    module: Any = sys.modules.get("torchmetrics.metric")
    if module is None or hasattr(module.Metric.sync, "is_whole"):
        return

    @functools.wraps(module.Metric.sync)
    def sync(self: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the states are those of all samples."""

    sync.is_whole = True  # type: ignore[attr-defined]
    module.Metric.sync = sync
