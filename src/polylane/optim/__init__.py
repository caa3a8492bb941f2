"""Optimizers and learning rates for large batches: LARS, LAMB, scaling rules, warm-up."""

from __future__ import annotations

from polylane.optim.averaging import averaged_optimizer
from polylane.optim.lamb import LAMB
from polylane.optim.lars import LARS
from polylane.optim.rates import Warmup, scale_rates, scaled, scaled_optimizer, warmed_scheduler, warmup
from polylane.optim.trust import SumOverHolders, split_decay_groups

# The name of before, kept for one release.
apart = split_decay_groups

__all__ = [
    "LAMB",
    "LARS",
    "SumOverHolders",
    "Warmup",
    "apart",
    "averaged_optimizer",
    "scale_rates",
    "scaled",
    "scaled_optimizer",
    "split_decay_groups",
    "warmed_scheduler",
    "warmup",
]
