"""Loading a checkpoint: rank 0 finds it, every worker reads its own parts, and all learn whether all succeeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polylane.checkpoint.commit import MANIFEST
from polylane.checkpoint.manifest import Manifest, read_manifest
from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.checkpoint.store import name_another, open_checkpoint
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.resumed_choices import note_changed_choices
from polylane.runtime.checkpoint.save import Gather, Position
from polylane.runtime.plain_data.serialization import from_json

# Makes a worker's state that of a checkpoint: the number of steps, a reader of tensors, and the plain state.
Restore = Callable[[int, CheckpointReader, Mapping[str, Any]], None]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that all workers have loaded.

    Attributes:
        folder: folder of the checkpoint.
        manifest: what it says of itself.
        plain: its plain state, decoded: what of the training is no tensor.

    Examples:
        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 1)
        >>> batch = torch.ones(16, 8), torch.zeros(16, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> job = polylane.parallelize(model, torch.nn.MSELoss(), sgd, example=batch, audit="off")
        >>> job.save_checkpoint("checkpoints")
        >>> loaded = job.load_checkpoint("checkpoints")
        >>> loaded.folder.name
        'step-00000000'
    """

    folder: Path
    manifest: Manifest = field(repr=False)  # these two are long: states of random number generators are among them
    plain: Mapping[str, Any] = field(repr=False)

    def tell_changes(self, choices: Mapping[str, Any], rank: int, warn: Callable[[str], None]) -> None:
        """Warn on rank 0 of each choice that differs from the one of the run that saved the checkpoint.

        Args:
            choices: those of this run, as of :func:`.resumed_choices.describe_choices`.
            rank: rank of this process.
            warn: called with a sentence for each.
        """
        for note in note_changed_choices(self.manifest.run, choices) if rank == 0 else ():
            warn(note)

    @property
    def position(self) -> Position:
        """Where the training was.

        Examples:
            >>> loaded.position.step
            0
        """
        return Position(self.manifest.step, self.manifest.epoch, self.manifest.samples)


def load_checkpoint(path: Path, rank: int, gather: Gather, restore: Restore) -> LoadedCheckpoint:
    """Load a checkpoint on every worker; a collective of all processes.

    Args:
        path: of the checkpoint, or of a folder of checkpoints, as rank 0 sees it.
        rank: rank of this process.
        gather: returns every process's plain value, by rank.
        restore: makes this worker's state that of the checkpoint.

    Raises:
        PolylaneError: on every worker, the first one's reason.
    """
    folder, error = "", ""
    if rank == 0:
        try:
            folder = str(open_checkpoint(path)[0].absolute())
        except PolylaneError as refused:
            error = str(refused)
    folder, error = gather((folder, error))[0]
    if error:
        raise PolylaneError(error)
    # Each reads the manifest by itself: it is in the same folder as the tensors, which each reads anyway.
    loaded: LoadedCheckpoint | None = None
    try:
        manifest = read_manifest(Path(folder))
        plain = _read_plain(Path(folder), manifest)
        loaded = LoadedCheckpoint(Path(folder), manifest, plain)
        restore(manifest.step, CheckpointReader(loaded.folder, manifest), plain)
    except PolylaneError as refused:
        error = str(refused) if str(refused).startswith("checkpoint ") else f"checkpoint {folder}: {refused}"
    # Also of the user's load_state_dict: a worker that raised here at once would leave the others in the gather below.
    except Exception as failed:
        why = (str(failed).strip().splitlines() or [""])[0][:200]
        error = (
            f"checkpoint {folder}: cannot be restored ({type(failed).__name__}: {why}): it is of another training, or "
            f"was edited; {name_another(Path(folder))}"
        )
    errors = gather(error)
    reason = next((message for message in errors if message), "")
    if reason or loaded is None:
        raise PolylaneError(reason)
    return loaded


def _read_plain(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the plain state of a checkpoint.

    Raises:
        PolylaneError: it is not what a checkpoint has.
    """
    try:
        plain = from_json(manifest.plain)
    except PolylaneError as error:
        raise PolylaneError(f"checkpoint {folder / MANIFEST}: plain: {error}; {name_another(folder)}") from None
    if not isinstance(plain, dict):
        kind = type(plain).__name__
        raise PolylaneError(
            f"checkpoint {folder / MANIFEST}: plain is a {kind}, expected names with values; {name_another(folder)}"
        )
    return plain
