"""Module paths: the names of a model's modules, as "layers.3.attn"."""

from __future__ import annotations


def is_inside(path: str, outer: str) -> bool:
    """Return whether a module is another one, or inside of it, by their paths; all are inside of the model, ""."""
    return not outer or path == outer or path.startswith(f"{outer}.")
