"""Memory: the most that torch's allocator held in a step, beside what polylane predicts."""

from __future__ import annotations

import gc

import torch

import polylane
from benchmarks.gpu import gpt
from benchmarks.gpu.setting import Row, Setting
from polylane.cluster.figures import format_size
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.cost.memory.peak import MARGINS
from polylane.inspection.memory_prediction import predict_peak_bytes
from polylane.plan.spec import parse

PLANS = ("data=1", "data=1,microbatches=4", "data=1,precision=bfloat16", "data=1,recompute=full")


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Measure the third step of each plan; runs in one worker."""
    figures = gpt.SMALL if setting.quick or device.type == "cpu" else {**gpt.LARGE, "layers": 8}
    rows = []
    for plan in PLANS:
        rows.append(_measure_plan(plan, figures, device))
        print(f"  {plan}: {rows[-1].figures}", flush=True)  # minutes each: whoever stops it keeps those that are done
    return rows


def _measure_plan(plan: str, figures: dict[str, int], device: torch.device) -> Row:
    batch = gpt.tokens(8, figures["length"], figures["vocabulary"])
    torch.manual_seed(0)
    gc.collect()  # of the plan before, whose tensors would be taken for memory that is held throughout
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    job = polylane.parallelize(gpt.model(**figures), gpt.loss, gpt.optimizer, example=batch, plan=plan)
    batch = tuple(tensor.to(device) for tensor in batch)
    for _ in range(2):
        job.step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        job.step(batch).wait_complete()
        found = torch.cuda.max_memory_allocated(device) - before
    else:
        held = sum(p.nbytes + sum(s.nbytes for s in state_tensors(job, p)) for p in job.model.parameters())
        with AllocationMeter() as meter:
            job.step(batch)
        found = meter.peak_bytes + held
    job.close()
    del job
    gc.collect()
    predicted = _predict(plan, figures, device)
    columns = {"measured": format_size(found), "predicted": format_size(round(predicted)), "ratio": predicted / found}
    return Row("memory", plan, columns, 0.8 < predicted / found < 1.25 if device.type == "cuda" else None)


def state_tensors(job: polylane.Job, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state of a parameter."""
    states = [each.optimizer.state.get(parameter, {}) for each in job.worker.stepping()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _predict(plan: str, figures: dict[str, int], device: torch.device) -> float:
    """Return the bytes of tensors that are predicted for the peak, without what the margin adds for the allocator."""
    torch.manual_seed(0)
    batch = gpt.tokens(8, figures["length"], figures["vocabulary"])
    objectives = build_objectives(gpt.loss, gpt.optimizer, None)
    # What is captured is checked against the model: on the device, for one core of the host takes minutes.
    problem = TrainingProblem(gpt.model(**figures), objectives, batch, device=None if device.type == "cpu" else device)
    compiled = compile_training(problem, parse(plan))
    compiled.model.to(device)  # its device decides which kernels' saved tensors are counted
    margin = MARGINS[device.type]
    return (predict_peak_bytes(compiled, 8, 0) - margin.fixed_bytes) / (1 + margin.share)
