"""Random state: the states of a process's generators, from which the user's own code may draw, as plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from polylane.graph.python_state.random_generators import generator_states
from polylane.runtime.state.plain_values import numpy_state


def collect_generators(accelerator: torch.device | None) -> dict[str, Any]:
    """Return the states of the global generators by name: "torch", "python", "numpy" if it is imported, "cuda".

    Args:
        accelerator: the device whose generator is among them; None: there is none.
    """
    torchs, python, *arrays = generator_states()
    states = {"torch": torchs, "python": python}
    if accelerator is not None:
        states[accelerator.type] = _device_module(accelerator).get_rng_state(accelerator).cpu()
    for kind, keys, *fields in arrays:
        states["numpy"] = (kind, keys.tolist(), *fields)
    return states


def restore_generators(states: Mapping[str, Any], accelerator: torch.device | None) -> None:
    """Restore states of :func:`collect_generators`; generators that are not among them stay as they are.

    Args:
        states: states by the names of the generators.
        accelerator: the device whose generator is restored; None: there is none.
    """
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    # States of workers on the CPU, or of another kind of accelerator, have none for this one.
    if accelerator is not None and accelerator.type in states:
        _device_module(accelerator).set_rng_state(states[accelerator.type], accelerator)
    if "python" in states:
        random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(numpy_state(states["numpy"]))


def _device_module(accelerator: torch.device) -> Any:
    """Return torch's module of a kind of accelerator, such as ``torch.cuda``."""
    return torch.get_device_module(accelerator)
