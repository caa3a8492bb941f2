"""The user's source files: which lines are theirs, and which are torch's or polylane's."""

from __future__ import annotations

from pathlib import Path

import torch

# Whole folders, with a trailing slash: a user's own checkout may well be called polylane or torch.
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/", "<")


def is_users(file: str) -> bool:
    """Return whether a source file is the user's own (or of a library they use), not torch's or polylane's."""
    return bool(file) and not file.startswith(_NOT_THE_USERS)
