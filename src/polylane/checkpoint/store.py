"""Checkpoint store: a folder with one folder for each step, of which those with a manifest are complete.

    checkpoints/
        step-00000500/              complete: its manifest is there
            rank-00000.safetensors
            rank-00001.safetensors
            manifest.json
        .step-00001000.9c41e07a/    being written, or left by a writer that died

Files are on the disk before their folder gets its name. The newest one is found by listing the folders: a file that
names it could itself be half written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polylane.checkpoint.commit import MANIFEST, UNFINISHED, commit_folder, list_steps, remove_unfinished
from polylane.checkpoint.manifest import Manifest, format_manifest, read_manifest
from polylane.errors import PolylaneError

Check = Callable[[Path, Manifest], None]


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of a run.

    Attributes:
        root: the folder that they are in.
        keep: number of newest complete ones that are kept; None: all.
    """

    root: Path
    keep: int | None = None

    def list_steps(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of the complete checkpoints, the oldest first.

        One without its name yet is among them where no other is: the run died after it had put aside the earlier
        checkpoint of the same step, which this one replaces.

        Raises:
            PolylaneError: the folder cannot be read, or is none.
        """
        root = str(self.root)
        # A run without the folder has no checkpoints; a file or a broken link in its place is a mistake.
        if os.path.lexists(root) and not os.path.isdir(root):
            raise PolylaneError(f"checkpoints {root}: cannot be read: it is no folder, or a link to none")
        try:
            return [(step, Path(folder)) for step, folder in list_steps(root) or list_steps(root, UNFINISHED)]
        except OSError as error:
            raise PolylaneError(f"checkpoints {root}: cannot be read: {error.strerror or error}") from None

    def find_newest(self, warn: Callable[[str], None] | None = None, check: Check | None = None) -> Path | None:
        """Return the folder of the newest complete checkpoint; None if there is none.

        Complete is one with a whole manifest, and files of the sizes that it says. Others are passed over.

        Args:
            warn: called with a sentence about each that is passed over.
            check: further test of one that is complete, which raises PolylaneError for one to be passed over.

        Raises:
            PolylaneError: the folder cannot be read.
        """
        for _, folder in reversed(self.list_steps()):
            if not (reason := _why_incomplete(folder) or _why_refused(folder, check)):
                return folder
            if warn is not None:
                warn(f"{reason}: this checkpoint is passed over")
        return None

    def begin(self, step: int) -> Path:
        """Make and return the folder that a checkpoint of a step is written into.

        Raises:
            OSError: it cannot be made.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self.root / f".step-{step:08d}.{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def commit(self, unfinished: Path, manifest: Manifest) -> Path:
        """Write the manifest, give the folder its name, and remove old ones: see :func:`.commit.commit_folder`.

        Raises:
            OSError: a file cannot be written; earlier checkpoints are as they were.
        """
        root, text = str(self.root), format_manifest(manifest)
        return Path(commit_folder(root, str(unfinished), manifest.step, text, self.keep))

    def remove_leftovers(self) -> None:
        """Remove what interrupted writers and removals have left; a folder that lacks nothing but its name gets it.

        Only where no other process writes here.
        """
        with contextlib.suppress(OSError):
            for step, folder in list_steps(str(self.root), UNFINISHED):
                named = self.root / f"step-{step:08d}"
                if not _why_incomplete(Path(folder)) and not named.exists():
                    Path(folder).rename(named)
        remove_unfinished(str(self.root))


def _why_refused(folder: Path, check: Check | None) -> str:
    """Return what a test of a complete checkpoint has against it, or an empty text."""
    try:
        if check is not None:
            check(folder, read_manifest(folder))
    except PolylaneError as refusal:
        return str(refusal)
    return ""


def open_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a checkpoint.

    Args:
        path: of the checkpoint's folder; or a run's folder or one with checkpoints, whose newest complete one is meant.

    Raises:
        PolylaneError: there is none, or it is damaged.
    """
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise PolylaneError(f"checkpoint {path}: is a file, and a checkpoint is a folder")
    except (FileNotFoundError, NotADirectoryError):
        raise PolylaneError(f"checkpoint {path}: there is no such folder") from None
    except OSError as error:
        raise PolylaneError(f"checkpoint {path}: cannot be read: {error.strerror or error}") from None
    # Users give the run's folder as well as that of its checkpoints.
    for root in (path, path / "checkpoints"):
        if not os.path.lexists(path / MANIFEST) and CheckpointStore(root).list_steps():
            newest = CheckpointStore(root).find_newest()
            if newest is None:
                raise PolylaneError(f"checkpoint {root}: none of the checkpoints in it is complete")
            return newest, read_manifest(newest)
    if not os.path.lexists(path / MANIFEST) and (path / "metrics.jsonl").exists():
        weights = path / "model.safetensors"
        hint = f"; the weights with which it ended are in {weights}" if weights.exists() else ""
        raise PolylaneError(
            f"checkpoint {path}: this run has written no checkpoint: train with --save-every STEPS to have some{hint}"
        )
    manifest = read_manifest(path)
    check_files(path, manifest)
    return path, manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that the files of a checkpoint are there, in the sizes that they were written in.

    Raises:
        PolylaneError: one is missing or has another size; it names the file.
    """
    for name, size in manifest.files.items():
        actual_size, description = _measure_file(folder / name)
        if actual_size != size:
            tensor_name = next(_held_in(manifest, name), "no tensor")
            raise PolylaneError(
                f"checkpoint {folder / name}: {description}, expected {size} bytes; it holds {tensor_name} and others: "
                f"{name_another(folder)}"
            )


def name_another(folder: Path) -> str:
    """Return what to do about a checkpoint that is damaged: the path of the newest other one that is complete."""
    for _, candidate in reversed(CheckpointStore(folder.parent).list_steps()):
        if candidate.name != folder.name and not _why_incomplete(candidate):
            return f"take another checkpoint, such as {candidate}"
    return f"take another checkpoint; {folder.parent} has no other complete one"


def _why_incomplete(folder: Path) -> str:
    """Return why a folder lacks a whole manifest or files of the sizes that it says; empty where it has all."""
    try:
        files = read_manifest(folder).files
    except PolylaneError as error:
        return str(error)
    for name, size in files.items():
        actual_size, description = _measure_file(folder / name)
        if actual_size != size:
            return f"checkpoint {folder / name}: {description}, expected {size} bytes"
    return ""


def _measure_file(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes, -1 where there is none, and what an error says of it."""
    try:
        status = path.stat()
        # Opened for the error's sake: of a file without permission to read, safetensors says that it does not exist.
        if stat.S_ISREG(status.st_mode):
            os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return -1, f"cannot be read ({error.strerror or error})"
    return (status.st_size, f"has {status.st_size} bytes") if stat.S_ISREG(status.st_mode) else (-1, "is no file")


def _held_in(manifest: Manifest, file: str) -> Iterator[str]:
    return (name for name, tensor in manifest.tensors.items() if any(chunk.file == file for chunk in tensor.chunks))
