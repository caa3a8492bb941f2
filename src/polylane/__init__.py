"""Polylane: split the training of an ordinary PyTorch model over devices, with the same numbers as one device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polylane.auto.parallelize import parallelize
    from polylane.errors import PolylaneError as PolylaneError
    from polylane.recipe import Mean as Mean
    from polylane.runtime.data_parallel import data_parallel
    from polylane.runtime.job import Job as Job
    from polylane.runtime.step_result import StepResult

__version__ = "0.1.0"

# Names are imported when first asked for, so that `import polylane` and `polylane --help` do not wait for torch.
_HOMES = {
    "Job": "polylane.runtime.job",
    "Mean": "polylane.recipe",
    "PolylaneError": "polylane.errors",
    "StepResult": "polylane.runtime.step_result",
    "data_parallel": "polylane.runtime.data_parallel",
    "parallelize": "polylane.auto.parallelize",
}
__all__ = ["Job", "Mean", "PolylaneError", "StepResult", "__version__", "data_parallel", "parallelize"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'polylane' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
