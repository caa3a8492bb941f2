"""``polylane.parallelize``, the public entry point: split the training of a plain model over the running workers.

No module directly in the package is called parallelize: importing it would replace the function of that name in
``polylane``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from polylane.auto.on_workers import resolve_plan
from polylane.auto.plan_broadcast import compile_on_all_ranks
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import Init, OptimizerFactory, SchedulerFactory, build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.diagnosis.page_layout import Phase
from polylane.errors import PolylaneError
from polylane.faults import told_as_fault
from polylane.graph.capture.export import Loss
from polylane.graph.capture.output_request import Function
from polylane.plan.options import OPTIONS
from polylane.plan.plan import AnyPlan
from polylane.plan.recompute import without_budgets
from polylane.plan.spec import Spec, default_microbatches
from polylane.runtime.job import Job
from polylane.runtime.progress.script_watch import ScriptOnHang, watch_script
from polylane.runtime.start_line import announce_training
from polylane.runtime.workers.threads import threads_of_idle_cores
from polylane.runtime.workers.world import World
from polylane.verify.audit import AuditMode
from polylane.verify.audit.audit_start import start_auditor
from polylane.verify.audit.training_audit import attach_audit

JobKind = TypeVar("JobKind", bound=Job)


@told_as_fault("polylane.parallelize")
def parallelize(
    model: nn.Module,
    loss: Loss | Mapping[str, Loss],
    optimizer: torch.optim.Optimizer | OptimizerFactory | Mapping[str, torch.optim.Optimizer | OptimizerFactory],
    *,
    example: Any,
    plan: str | AnyPlan = "data=1",
    scheduler: SchedulerFactory | Mapping[str, SchedulerFactory] | None = None,
    metrics: Function | None = None,
    batch_size: int | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    init: Init | None = None,
    alone: bool = False,
    on_hang: ScriptOnHang | None = "stop",
    hang_after: float | None = None,
    audit: AuditMode = "auto",
) -> Job:
    """Distribute the training of a model over the workers that torchrun started; each makes this same call.

    Args:
        model: an ordinary ``nn.Module``. If the weights of workers differ, those of rank 0 are used.
        loss: ``loss(model, batch)``, which returns a scalar mean or a ``polylane.Mean``; or a criterion, called as
            ``criterion(model(x), y)``; or a dict of several losses by name.
        optimizer: a torch.optim optimizer over the model's parameters; or a function that builds one from (name,
            parameter) pairs; or one for each loss. It steps on the parameters, or shards of them, that a worker holds.
        example: a batch that has the structure and, unless ``batch_size`` is given, the size of the training batches.
        plan: a line such as ``"data=2,pipeline=2,schedule=1f1b,microbatches=8"``, the path of a plan file, a
            ``polylane.plan.plan.Plan``, or ``"auto"``: rank 0 measures the model on the example and chooses the plan
            that is predicted to be the fastest on all workers. "auto" supports one loss, and workers on one host.
        scheduler: function that builds a learning-rate scheduler from the optimizer. It is stepped after every step;
            leave it out to step a scheduler yourself.
        metrics: ``metrics(model, batch)``, a dict of what ``polylane.Job.evaluate_dataset`` returns, by name.
        batch_size: number of samples in a training batch. Default: that of the example.
        clip_norm: maximum 2-norm of the gradients of all parameters of the optimizer. Default: no clipping.
        seed: seed of the order of samples and of the model's random numbers.
        init: for a model on the meta device: ``init(module)`` initializes the tensors that the module itself owns.
            Default: its ``reset_parameters()``. The weights equal those of ``torch.manual_seed(seed);
            model.to_empty(device=...); model.apply(init)``; a worker materializes its own part of them only.
        alone: allow a single process (``python script.py``) to train with a plan for several workers, as a reference.
            Options without a meaning on one worker (stale weights, averaging every n steps) are ignored.
        on_hang: what to do if a worker hangs while others wait for it: ``"stop"`` reports it on stderr and kills it,
            and the others raise ``polylane.errors.WorkerHung``; ``"wait"`` only reports it; None: no check.
        hang_after: seconds without progress after which a worker is considered hung. Default: 8 s more than a step.
        audit: repeat steps 1, 2, 4, 8, ... and the first of each epoch with your own code in a separate process, and
            compare the results. A difference is an error, or a warning with ``"warn"``; ``"auto"`` bounds the cost to
            1% of the training time; ``"off"`` disables audits.

    Returns:
        This worker's ``polylane.Job``.

    Raises:
        PolylaneError: the plan does not fit the workers or the model, or no plan does; the message says why.

    Examples:
        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 3)
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
        >>> job = polylane.parallelize(
        ...     model,
        ...     torch.nn.CrossEntropyLoss(),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     example=next(iter(torch.utils.data.DataLoader(data, batch_size=16))),
        ...     plan="data=2",
        ...     alone=True,  # so that this runs without torchrun, too
        ... )
        >>> for batch in job.batches(data, batch_size=16, epochs=2):
        ...     result = job.step(batch)
        >>> result.step
        7
        >>> job.close()
    """
    world = watch_script(World.join(), on_hang, hang_after)
    of_loss = build_objectives(loss, optimizer, scheduler, metrics)  # type: ignore[arg-type]  # see TrainingProblem
    problem = TrainingProblem(model, of_loss, example, batch_size, init, device=world.accelerator)
    compiled = compile_for(world, problem, resolve_plan(world, problem, plan), alone)
    return start_job(Job, world, compiled, audit, example=example, clip_norm=clip_norm, seed=seed)


def start_job(
    kind: type[JobKind], world: World, compiled: CompiledTraining, audit: AuditMode, **options: Any
) -> JobKind:
    """Say what is trained, and return this worker's job of it, whose steps are audited."""
    announce_training(compiled.plan, world)
    audits = start_auditor(audit, compiled, world, **options)
    # Workers were not forked from one process: their models may differ, and rank 0's weights are broadcast.
    job = kind(compiled, world, **options, same_weights=world.size == 1)
    attach_audit(audits, job)
    world.progress.enter(Phase.SCRIPT)
    return job


def compile_for(world: World, problem: TrainingProblem, spec: AnyPlan, alone: bool) -> CompiledTraining:
    """Return the training, compiled for all workers, or what a single worker makes of the plan.

    Args:
        world: this worker among all workers.
        problem: what is to be trained.
        spec: the requested plan, in one line or complete.
        alone: whether it may be a plan for several workers.

    Raises:
        PolylaneError: it is one, and may not be.
    """
    if world.size > 1:
        return compile_on_all_ranks(world, problem, spec)
    if not alone:
        _refuse_single_process(spec)
    with threads_of_idle_cores(world):
        return compile_training(problem, _alone(spec, problem.samples), fewer=spec.microbatches is None)


def _refuse_single_process(spec: AnyPlan) -> None:
    """Refuse a plan for several workers in a single process.

    Raises:
        PolylaneError: the plan takes more than one worker.
    """
    if spec.processes == 1:
        return
    script = Path(sys.argv[0]).name
    script = script if script.endswith(".py") else "script.py"
    raise PolylaneError(
        f"the plan takes {spec.processes:,} workers, and this is one process: start it with torchrun --nproc-per-node "
        f"{spec.processes} {script}, or pass alone=True to train the same microbatches on one worker"
    )


def _alone(spec: AnyPlan, samples: int) -> Spec:
    """Return the same training for one worker: the same microbatches, without anything to schedule or synchronize.

    Args:
        spec: the plan for several workers.
        samples: number of samples of a batch, which decides how many microbatches there are where the plan does not.
    """
    options = {key: value for key, value in spec.option_values().items() if OPTIONS[key].applies_alone}
    options["microbatches"] = default_microbatches(spec, samples)
    # Budgets are of stages: what one of them can keep within, the whole model may not.
    options["recompute"] = without_budgets(spec.recompute)
    return Spec(**options)
