"""Modes of an optimizer: schedule-free methods train at other weights than they give (Defazio et al., NeurIPS 2024)."""

from __future__ import annotations

from typing import Any


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer, or one of several, has ``train()`` and ``eval()``, which exchange its weights."""
    has_methods = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    return has_methods or any(map(has_modes, getattr(optimizer, "optimizers", ())))


def set_mode(optimizer: Any, training: bool) -> bool:
    """Call an optimizer's own ``train()`` or ``eval()``, if it has both; return whether it has."""
    if not has_modes(optimizer):
        return False
    call = getattr(optimizer, "train" if training else "eval", None)
    if callable(call):
        call()
    else:
        for member in optimizer.optimizers:
            set_mode(member, training)
    return True
