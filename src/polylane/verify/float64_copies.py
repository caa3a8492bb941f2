"""Copies in float64 of what is compared: the model, an objective, a batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.graph.batch import cast_leaves, clone_leaves, flatten, sample_count
from polylane.graph.capture.export import model_restored
from polylane.graph.precision import to_float64
from polylane.graph.sample_slice import SampleSlice
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.verify.whole_graph import run_graph


def objective_in_float64(objective: Objective) -> Objective:
    """Return the objective with a copy of its loss in float64, where the loss is a module."""
    if not isinstance(objective.loss, nn.Module):
        return objective
    return replace(objective, loss=to_float64(copied_module(objective.loss)))


def copied_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module.

    Raises:
        PolylaneError: copy.deepcopy failed; the message says what to do.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PolylaneError(
            f"the model cannot be copied for a proof, copy.deepcopy says: {reason} (torch.nn.utils.weight_norm does "
            "this; torch.nn.utils.parametrizations.weight_norm does not)"
        ) from error


def batch_in_float64(batch: Any) -> Any:
    """Return a copy of a batch with its floating-point numbers in float64."""
    leaves, rebuild = flatten(batch)
    return rebuild(clone_leaves(cast_leaves(leaves, torch.float64)))


def check_it_runs(prepared: CompiledTraining, batch: Any) -> None:
    """Run a batch through the model's graph, since some kernels have no float64: this fails before any worker starts.

    Raises:
        PolylaneError: an operator of the graph raised.
    """
    leaves, _ = flatten(batch_in_float64(batch))
    tensors = ModelTensors(prepared.model, prepared.losses, torch.device("cpu"))
    samples = sample_count(leaves)
    # The run writes buffers such as running statistics.
    try:
        with model_restored(prepared.model, *prepared.losses), torch.no_grad():
            run_graph(prepared.main_partition.graph.code, tensors, leaves, SampleSlice(samples, batch=samples))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise PolylaneError(f"the model does not run in float64, which a proof needs: {why}") from error
