"""What a plan was predicted to take of a worker's memory, for the worker whose memory ran out."""

from __future__ import annotations

from dataclasses import replace

from polylane.compile.compiled_training import CompiledTraining
from polylane.inspection.plan_report import price_stages
from polylane.runtime.workers.out_of_memory import OutOfMemory


def with_predicted_memory(error: OutOfMemory, prepared: CompiledTraining, batch: int) -> OutOfMemory:
    """Return the error with the worker's stage and the bytes that were predicted for it, as far as they are known.

    Args:
        error: what ended the worker.
        prepared: the training, compiled for the plan.
        batch: number of samples of a step, over all workers.
    """
    need = error.need
    stages = [stage for stage, spec in enumerate(prepared.plan.stages) if need.rank in spec.devices]
    if not stages:  # a dedicated server
        return error
    stage = stages[0] if need.stage is None else need.stage
    try:
        predicted = predict_peak_bytes(prepared, batch, stage)
    except Exception:  # memory is short in this process, too: the sentence matters more
        return OutOfMemory(replace(need, stage=stage))
    return OutOfMemory(replace(need, stage=stage, predicted=predicted))


def predict_peak_bytes(prepared: CompiledTraining, batch: int, stage: int) -> int:
    """Return the bytes that a worker of a stage is predicted to take at the peak of a step, as ``inspect`` says it."""
    graph = prepared.main_partition.graph
    costs = price_stages(prepared, [(0.0, 0.0)] * len(graph.nodes), batch)  # memory does not depend on times
    return costs[stage].peak_memory(prepared.plan.first_chunk(stage)).total
