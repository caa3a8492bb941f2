"""Whose line is it: the user's, or torch's and our own."""

from __future__ import annotations

from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parent.parent) + "/", "<", "torch/")


def is_users(file: str) -> bool:
    """Whether a source file is the user's own (or of a library they use), rather than torch's or polylane's."""
    return bool(file) and not file.startswith(_NOT_THE_USERS)
