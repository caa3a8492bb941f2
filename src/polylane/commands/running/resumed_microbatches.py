"""Resumed microbatches: a plan that names no number of them takes the checkpoint's, where numbers depend on it.

checkpoint of   resumed by                  microbatches
data=2          pipeline=2                  the plan's default; with BatchNorm 1, as in the checkpoint
data=2          pipeline=2,microbatches=8   8, and with BatchNorm a note that the numbers are others
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.spec import Spec
from polylane.samples.split_dependence import depends_on_split

_REASON = "statistics of the batch, or random numbers that do not go by samples, are those of each microbatch"


def keep_microbatches(
    prepared: CompiledTraining,
    plan: AnyPlan,
    saved: Plan,
    compile_again: Callable[[Spec], CompiledTraining],
    warn: Callable[[str], None] = warnings.warn,
) -> CompiledTraining:
    """Return the training with the checkpoint's number of microbatches, where the plan leaves that open and it matters.

    Args:
        prepared: the training, compiled for the plan that is asked for.
        plan: that plan as it was asked for.
        saved: the plan of the checkpoint.
        compile_again: compiles the training for another plan.
        warn: called with the sentence that says what was taken, or why not.
    """
    default, original = prepared.plan.microbatches, saved.microbatches
    is_open = isinstance(plan, Spec) and plan.microbatches is None and not prepared.plan.is_asynchronous
    if not is_open or default == original or not _numbers_depend(prepared):
        return prepared
    assert isinstance(plan, Spec)
    try:
        compiled = compile_again(replace(plan, microbatches=original))
    except PolylaneError as refused:
        warn(f"the checkpoint's microbatches={original} do not go with this plan: {refused}")
        return prepared
    warn(f"microbatches={original} as in the checkpoint, and not {default}, the plan's default: {_REASON}")
    return compiled


def note_other_microbatches(prepared: CompiledTraining, saved: Plan) -> list[str]:
    """Return a note where the numbers are others than the checkpoint's run would have had, for its microbatches."""
    count, original = prepared.plan.microbatches, saved.microbatches
    if count == original or prepared.plan.is_asynchronous or not _numbers_depend(prepared):
        return []
    return [
        f"microbatches={count}, and the checkpoint is of microbatches={original}: the numbers are not those of the run "
        f"that it is of, since {_REASON}; a plan with microbatches={original} has the same"
    ]


def _numbers_depend(prepared: CompiledTraining) -> bool:
    return any(depends_on_split(graph.partition.graph.code) for graph in prepared.graphs.values())
