"""Resumed choices: options that a resumed run may change although they change its numbers; a note names each change.

chosen by                 kept in a checkpoint
requires_grad, groups     names of the parameters that each objective's optimizer steps on
clip_norm, --clip-norm    the bound, or None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import clean_text, format_plural

SHOWN = 3  # most names in a note


def describe_choices(prepared: CompiledTraining, clip_norm: float | None) -> dict[str, Any]:
    """Return the choices of a training, as the plain facts that a checkpoint keeps.

    Args:
        prepared: the training, compiled for its plan.
        clip_norm: bound on the 2-norm of all gradients, or None.
    """
    trained = {name: prepared.trained_names(name) for name in prepared.partitions}
    return {"trained": trained, "clip_norm": None if clip_norm is None else float(clip_norm)}


def note_changed_choices(saved: Mapping[str, Any], choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note for each choice that is another than in the checkpoint's run; none where that is not known.

    Args:
        saved: facts of the checkpoint's run, those of :func:`describe_choices` among them.
        choices: the choices of this run.
    """
    notes = []
    saved_trained = saved["trained"] if isinstance(saved.get("trained"), dict) else {}
    for name, trained in choices["trained"].items():
        # Types are checked since facts of a run are plain JSON, and older checkpoints have fewer.
        if not isinstance(saved_trained.get(name), list):
            continue
        saved_names = [entry for entry in saved_trained[name] if isinstance(entry, str)]
        of = f"objective {name}: " if len(choices["trained"]) > 1 else ""
        if frozen := _missing(saved_names, trained):
            notes.append(f"{of}{_list_names(frozen, 'trained')} frozen now")
        if trained_now := _missing(trained, saved_names):
            notes.append(f"{of}{_list_names(trained_now, 'frozen')} trained now")
    is_known = "clip_norm" in saved and isinstance(saved["clip_norm"], float | None)
    if is_known and saved["clip_norm"] != choices["clip_norm"]:
        bound, then = (_format_bound(record["clip_norm"]) for record in (choices, saved))
        notes.append(f"{bound}, and the checkpoint's run had {then}: the numbers are not those of that run")
    return tuple(notes)


def _missing(names: Sequence[str], among: Sequence[str]) -> list[str]:
    known_names = set(among)
    return [name for name in names if name not in known_names]


def _list_names(names: Sequence[str], old_state: str) -> str:
    shown = ", ".join(clean_text(name) for name in names[:SHOWN])
    other_count = len(names) - SHOWN
    head = shown if other_count <= 0 else f"{shown} and {format_plural(other_count, 'other')}"
    was, verb = ("was", "is") if len(names) == 1 else ("were", "are")
    return f"{head} {was} {old_state} in the checkpoint's run and {verb}"


def _format_bound(clip_norm: float | None) -> str:
    return "no clip_norm" if clip_norm is None else f"clip_norm={clip_norm:g}"
