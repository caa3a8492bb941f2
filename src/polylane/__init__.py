"""Polylane: split the training of an ordinary PyTorch model over devices, with the same numbers as one device."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # not typing's: the command line, whose first import this package is, does not wait for it
if TYPE_CHECKING:
    from typing import Any

    from polylane.auto.parallelize import parallelize
    from polylane.callbacks.callback import Callback as Callback
    from polylane.errors import PolylaneError as PolylaneError
    from polylane.recipe import Mean as Mean
    from polylane.runtime.data.sample_order import LengthSampler as LengthSampler
    from polylane.runtime.data_parallel import data_parallel
    from polylane.runtime.job import Job as Job
    from polylane.runtime.step_result import StepResult
    from polylane.script.launch import launch
    from polylane.script.prepare import epochs, prepare, resumed

__version__ = "0.2.0"

# Names are imported when first asked for, so that `import polylane` and `polylane --help` do not wait for torch.
_HOMES = {
    "Callback": "polylane.callbacks.callback",
    "Job": "polylane.runtime.job",
    "LengthSampler": "polylane.runtime.data.sample_order",
    "Mean": "polylane.recipe",
    "PolylaneError": "polylane.errors",
    "StepResult": "polylane.runtime.step_result",
    "data_parallel": "polylane.runtime.data_parallel",
    "epochs": "polylane.script.prepare",
    "launch": "polylane.script.launch",
    "parallelize": "polylane.auto.parallelize",
    "prepare": "polylane.script.prepare",
    "resumed": "polylane.script.prepare",
}
__all__ = [
    "Callback",
    "Job",
    "LengthSampler",
    "Mean",
    "PolylaneError",
    "StepResult",
    "__version__",
    "data_parallel",
    "epochs",
    "launch",
    "parallelize",
    "prepare",
    "resumed",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import random  # here for the same reason

        # An imported module may draw, as rich does, and the script would shuffle otherwise than without polylane.
        state = random.getstate()
        try:
            return getattr(import_module(_HOMES[name]), name)
        finally:
            random.setstate(state)
    raise AttributeError(f"module 'polylane' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
