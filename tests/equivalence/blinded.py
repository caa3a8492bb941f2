"""Blinded: what finds out about a training beforehand, switched off, so that what is below it shows what it catches.

Each kind of detection is replaced by one that finds nothing. A training that then differs must be caught by the audit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from polylane.graph.python_state.side_effects import SideEffects

Replaced = dict[str, Callable[..., Any]]


def nothing(*_: Any, **__: Any) -> None:
    return None


def _run_alone(model: Any, loss: Any, run: Callable[[], Any], *_: Any) -> tuple[Any, SideEffects]:
    return run(), SideEffects()


# By what is not seen any more: what is put in the place of which attribute, as "module:name" below polylane.
BLINDED: dict[str, Replaced] = {
    "effects": {
        "graph.capture.dry_run:find_side_effects": _run_alone,
        "compile.compiled_training:refuse_repeated_effects": nothing,
        "runtime.program_binder:refuse_effects": nothing,
        "compile.plan_checks:refuse_effects": nothing,
    },
    "self-check": {"graph.capture.attempt:run_self_check": nothing},
    "settings": {"graph.python_state.captured_settings:CapturedSettings.find_change": nothing},
    "division": {
        "compile.compiled_training:loss_couples_samples": lambda *_, **__: False,
        "runtime.program_binder:refuse_coupled_samples": nothing,
    },
    "optimizers": {
        "compile.plan_checks:explain_coupling": lambda *_, **__: "",
        "compile.plan_checks:refuse_kept_gradients": nothing,
        "compile.compiled_training:find_unshardable": lambda parameters, _: {n for n, p in parameters if not p.dim()},
        "compile.plan_checks:find_unshardable": lambda *_, **__: set(),
        "compile.compiled_training:find_whole_parameters": lambda *_, **__: {},
    },
    "ranks": {"auto.plan_broadcast:find_difference": nothing},
    "reads": {
        "runtime.data.batch_checks:BatchChecks.compare": nothing,
        "runtime.data.read_trial:try_reads": lambda *_, **__: _alike(),
    },
}


def _alike() -> Any:
    from polylane.runtime.data.read_trial import Reads

    return Reads()


@contextmanager
def blinded(kinds: Iterable[str]) -> Iterator[None]:
    """Context manager: these kinds of detection find nothing, in this process and in those that it forks."""
    with ExitStack() as stack:
        for kind in kinds:
            for where, put in BLINDED[kind].items():
                module, _, name = where.partition(":")
                owner: Any = importlib.import_module(f"polylane.{module}")
                *path, last = name.split(".")
                for each in path:
                    owner = getattr(owner, each)
                stack.enter_context(patch.object(owner, last, put))
        yield
