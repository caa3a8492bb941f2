"""Nameless file: shared memory without a name in the file system, freed when the last process that has it open ends."""

from __future__ import annotations

import os
import tempfile


def open_nameless_file(label: str) -> int:
    """Return the descriptor of a new, empty file without a name: in memory, where the system has such files.

    Only the same user may open it (mode 0600). A program that this process starts has it only where it is passed on.

    Args:
        label: what the file is for, as lists of open files show it.

    Raises:
        OSError: the system allows none.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"polylane-{label}", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        return descriptor
    with tempfile.TemporaryFile() as file:  # mode 0600, unlinked at once
        return os.dup(file.fileno())
