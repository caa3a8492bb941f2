"""Saved script: a checkpoint of a prepared script, and its state for whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polylane.checkpoint.manifest import Manifest, read_manifest
from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.compile.optimizer_sequence import OptimizerSequence
from polylane.errors import PolylaneError
from polylane.runtime.plain_data.serialization import from_json
from polylane.runtime.state.held_tensors import whole_region
from polylane.runtime.state.model_state import PREFIX, name_weight
from polylane.runtime.state.optimizer_attributes import restore_attributes
from polylane.runtime.state.optimizer_state import OptimizedPart, restore_optimizer, restore_options
from polylane.runtime.state.saved_state import SavedState
from polylane.script.training import OBJECTIVE

PLAIN = "script"  # what a checkpoint's plain state has of the script itself


class SavedScript:
    """The checkpoint of a script.

    Args:
        folder: folder of the checkpoint, which is complete.

    Attributes:
        manifest: what the checkpoint says of itself.
        plain: its plain state, decoded.
        script: what of it is the script's.
        epoch: number of epochs that were finished.
        has_epochs: whether it was in ``polylane.epochs``.
        loader: number of the loader that was asked for a batch; None at the end of all epochs.

    Raises:
        PolylaneError: it is not of a script.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        plain = from_json(self.manifest.plain)
        if not isinstance(plain, dict) or PLAIN not in plain:
            raise PolylaneError(f"checkpoint {folder}: is not of a script that polylane.prepare() has prepared")
        self.plain: dict[str, Any] = plain
        self.script: dict[str, Any] = plain[PLAIN]
        self.epoch, self.has_epochs = int(self.script["epoch"]), bool(self.script["has_epochs"])
        self.loader: int | None = self.script["loader"]

    def open_reader(self) -> CheckpointReader:
        """Return a reader of its tensors."""
        return CheckpointReader(self.folder, self.manifest)


def restore_whole(models: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: SavedScript) -> None:
    """Give whole models and their optimizers the state of a checkpoint, before workers take their parts.

    Args:
        models: the script's models as one.
        optimizers: the optimizers of the script.
        saved: the checkpoint, whichever plan has written it.

    Raises:
        PolylaneError: it is of other models or optimizers, or damaged.
    """
    source = SavedState(saved.open_reader(), saved.plain, 1)
    source.refuse_other_weights({name_weight(models, name): name for name in models.state_dict(keep_vars=True)})
    parameters = dict(models.named_parameters())
    for name, tensor in (*parameters.items(), *models.named_buffers()):
        source.fill(PREFIX + name, whole_region(tensor.shape), tensor.detach())
    optimizer = optimizers[0] if len(optimizers) == 1 else OptimizerSequence(optimizers)
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parts = {n: OptimizedPart(p, whole_region(p.shape)) for n, p in parameters.items() if id(p) in trained}
    restore_options(OBJECTIVE, optimizer, None, saved.plain)
    restore_optimizer(OBJECTIVE, optimizer, parts, saved.plain, source.fill)
    names = {id(parameter): name for name, parameter in parameters.items()}
    restore_attributes(OBJECTIVE, optimizer, names, parts, saved.plain, source.fill)
