"""Commit: makes a folder of written files a checkpoint, and removes old ones; by the standard library alone.

The writer process does it, without torch, so that the training does not wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection

MANIFEST = "manifest.json"
# A writer that died leaves a folder of the second kind; what is being removed has a name of the third.
STEP = re.compile(r"step-(\d{8,18})\Z")
UNFINISHED = re.compile(r"\.step-(\d{8,18})\.[0-9a-f]{8}\Z")
REMOVED = re.compile(r"\.removed-[0-9a-f]{8}\Z")


def list_steps(root: str, form: re.Pattern[str] = STEP) -> list[tuple[int, str]]:
    """Return (step, folder) of the folders with a manifest, the oldest first.

    A folder whose manifest cannot be looked up, for lack of permission say, counts: reading it raises the error.

    Args:
        root: folder of the run's checkpoints.
        form: pattern of the folders' names, whose first group is the step.

    Raises:
        OSError: what is in the folder cannot be read.
    """
    steps = []
    # A run that has saved nothing yet has no folder of checkpoints.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(root):
            folder = os.path.join(root, name)
            if (match := form.match(name)) and _may_exist(os.path.join(folder, MANIFEST)):
                steps.append((int(match[1]), folder))
    return sorted(steps)


def _may_exist(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # no permission, a disk that fails
        return True
    return True


def commit_folder(root: str, unfinished: str, step: int, manifest: str, keep: int | None) -> str:
    """Write the manifest, give the folder its name, and remove the checkpoints that are not to be kept.

    An earlier checkpoint of the same step is replaced. None is removed before the new one is on the disk.

    Args:
        root: folder of the run's checkpoints.
        unfinished: folder below it, whose files are on the disk.
        step: the checkpoint's step, by which it is named.
        manifest: text of its manifest.
        keep: number of newest complete ones that are kept; None: all.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: a file cannot be written; earlier checkpoints are as they were.
    """
    with open(os.path.join(unfinished, MANIFEST), "x", encoding="utf-8") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    folder = os.path.join(root, f"step-{step:08d}")
    # Two renames, since no system call replaces a folder that has files by another one.
    if os.path.exists(folder):
        os.rename(folder, _removed_name(root))
    os.rename(unfinished, folder)
    _sync_folder(root)
    other_folders = [path for _, path in list_steps(root) if path != folder]
    for old in other_folders[: max(len(other_folders) + 1 - keep, 0)] if keep is not None else []:
        _put_aside(root, old)
    _remove_put_aside(root)
    return folder


def remove_steps(root: str, best_steps: Collection[int]) -> None:
    """Remove the checkpoints of a folder but those of some steps, and never the newest one.

    Args:
        root: folder of a run's checkpoints.
        best_steps: steps whose checkpoints stay.

    Raises:
        OSError: what is in the folder cannot be read.
    """
    for step, folder in list_steps(root)[:-1]:
        if step not in best_steps:
            _put_aside(root, folder)
    _remove_put_aside(root)


def remove_unfinished(root: str) -> None:
    """Remove folders without a name yet, and what is left of removed ones, as far as that is possible.

    A writer that outlived its worker may be about to give such a folder its name. It fails then, since the folder is
    put aside before its first file is removed: no checkpoint lacks files.
    """
    # A folder that cannot be removed costs space on the disk, and no training ends for that.
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if UNFINISHED.match(name):
                _put_aside(root, os.path.join(root, name))
    _remove_put_aside(root)


def _put_aside(root: str, folder: str) -> None:
    """Rename a folder that is to be removed: without some of its files it must not look like a checkpoint."""
    with contextlib.suppress(OSError):  # then it stays, whole
        os.rename(folder, _removed_name(root))


def _remove_put_aside(root: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if REMOVED.match(name):
                _remove(os.path.join(root, name))


def _remove(path: str) -> None:
    """Remove a folder; of one that is a link to another disk, the link alone."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _removed_name(root: str) -> str:
    return os.path.join(root, f".removed-{secrets.token_hex(4)}")


def _sync_folder(folder: str) -> None:
    """Wait until a folder's entries are on the disk."""
    # Some file systems cannot sync a folder: their renames are on the disk in order, or this is all that can be done.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
