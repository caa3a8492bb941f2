"""Measure the state of a training: how much a checkpoint has, and how long it takes to save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polylane.commands import planning
from polylane.commands import user_inputs as inputs
from polylane.commands.launching.cluster_job import CheckpointCost
from polylane.commands.requests import RecipeRequest
from polylane.commands.run import check_script
from polylane.commands.running.resume import FOLDER

if TYPE_CHECKING:
    from polylane.commands.launching.launch_request import LaunchRequest
    from polylane.recipe import Recipe

DISK_RATE = 200e6  # bytes/s that all workers together write to a shared disk, where nothing was measured
SCRIPT_SECONDS = 60.0  # to save the state of a script, which is known once it runs


def measure_state(request: LaunchRequest, folder: Path, replicas: int) -> CheckpointCost:
    """Return what a checkpoint has: of the run's folder, if one is there; else of the recipe's model and optimizer.

    Args:
        request: the options of the command.
        folder: the run's folder, which need not be on this machine.
        replicas: number of replicas that a checkpoint has, since they differ; 1: all are alike.

    Raises:
        PolylaneError: the recipe or the script is wrong, or the checkpoint cannot be read.
    """
    if request.is_script:
        check_script(request.program)
    else:
        settings = tuple(request.values.get("settings") or ())
        recipe = inputs.open_recipe(RecipeRequest(recipe=request.program, batch=1, settings=settings))
    from polylane.checkpoint.manifest import read_manifest
    from polylane.checkpoint.store import CheckpointStore

    if steps := CheckpointStore(folder / FOLDER).list_steps():
        step, checkpoint = steps[-1]
        manifest = read_manifest(checkpoint)
        size, seconds = sum(manifest.files.values()), manifest.write_seconds
        if seconds is not None:
            return CheckpointCost(size, seconds, f"as step {step} of this run took")
    elif request.is_script:
        return CheckpointCost(None, SCRIPT_SECONDS, "assumed: a script's state is known once it runs")
    else:
        size = replicas * count_state_bytes(recipe)
    return CheckpointCost(size, size / DISK_RATE, f"at {DISK_RATE / 1e6:.0f} MB/s, which is assumed")


def count_state_bytes(recipe: Recipe) -> int:
    """Return the bytes of a recipe's parameters, buffers and optimizer state, without making them.

    Raises:
        PolylaneError: a function of the recipe raised, or did not return what it should.
    """
    from polylane.compile.objectives import named_parameters
    from polylane.compile.optimizer_sequence import JoinedFactory
    from polylane.cost.memory.optimizer_state import probe_states
    from polylane.graph.graph import TensorInfo

    model = planning.build_without_weights(recipe)
    forms = {
        name: TensorInfo(tuple(p.shape), str(p.dtype).removeprefix("torch."), p.nbytes, p.requires_grad)
        for name, p in named_parameters(model, [recipe.loss])
    }
    states = probe_states({n: form for n, form in forms.items() if form.trainable}, JoinedFactory(recipe.optimizer))
    size = sum(form.bytes + states.bytes(name, form.shape) for name, form in forms.items())
    buffers: int = sum(buffer.nbytes for buffer in model.buffers())
    return size + buffers
