"""Large batches: LARS and LAMB, also on parts of parameters, and learning rates that follow the batch."""

from __future__ import annotations

from polylane.optim.lamb import LAMB
from polylane.optim.lars import LARS
from polylane.optim.rates import scale_rates, scaled, scaled_optimizer
from polylane.optim.trust import SumOverHolders, apart
from polylane.optim.warmup import Warmup, warmed_scheduler, warmup

__all__ = [
    "LAMB",
    "LARS",
    "SumOverHolders",
    "Warmup",
    "apart",
    "scale_rates",
    "scaled",
    "scaled_optimizer",
    "warmed_scheduler",
    "warmup",
]
