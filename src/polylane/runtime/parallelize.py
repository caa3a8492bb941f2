"""The front door: split the training of a plain model over the workers that are here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, sample_count
from polylane.graph.export import Loss
from polylane.plan.plan import Plan, default_microbatches
from polylane.plan.spec import Spec
from polylane.plan.sync import SUM
from polylane.runtime.agreement import prepare_together
from polylane.runtime.automatic import settled
from polylane.runtime.job import Job
from polylane.runtime.materialize import Init
from polylane.runtime.prepare import OptimizerFactory, SchedulerFactory, objectives_of, prepare
from polylane.runtime.world import World


def parallelize(
    model: nn.Module,
    loss: Loss | Mapping[str, Loss],
    optimizer: OptimizerFactory | Mapping[str, OptimizerFactory],
    *,
    example: Any,
    plan: str | Spec | Plan = "data=1",
    scheduler: SchedulerFactory | Mapping[str, SchedulerFactory] | None = None,
    batch_size: int | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    init: Init | None = None,
    alone: bool = False,
) -> Job:
    """Split the training of a plain model over the workers that torchrun started.

    A process that nothing started others beside is refused a plan for several, unless it may train alone.

    Args:
        model: an ordinary ``nn.Module``. If workers built it with different weights, those of rank 0 count.
        loss: ``loss(model, batch)`` -> a scalar mean over the batch, or :class:`polylane.Mean`; or several by name.
        optimizer: (name, parameter) pairs -> a torch.optim optimizer; or one for each loss.
        example: a batch, for its form and size.
        plan: ``"data=2,pipeline=2,schedule=1f1b,microbatches=8"``, or a :class:`polylane.plan.plan.Plan`; ``"auto"``
        for the best one that takes every worker: rank 0 measures the model on the example, and says on stderr what
        it chose. For one loss, and workers of one host.
        scheduler: optimizer -> learning-rate scheduler, which is stepped after every step; leave it out to step your
        own.
        batch_size: of the training, if it is another than the example's.
        clip_norm: bound on the gradients' 2-norm over all parameters that the optimizer takes.
        seed: of the order of samples and of all random numbers.
        init: for a model built on the meta device: ``init(module)`` fills the tensors that the module itself owns;
        default: its ``reset_parameters()``. The weights are those of ``torch.manual_seed(seed);
        model.to_empty(device=...); model.apply(init)``, and no worker holds more of them than its part and one module.
        alone: where this process is the only worker (``python script.py``), train the plan's microbatches on it, the
        reference of what the plan computes; where there are others it changes nothing.

    Raises:
        PolylaneError: the plan does not fit the workers or the model, or there is none that does; one sentence says
        how.
    """
    world = World.join()
    objectives = objectives_of(loss, optimizer, scheduler)
    spec = settled(world, model, objectives, example, plan, batch_size)
    if world.size == 1:
        if not alone:
            _refuse_alone(spec)
        samples = batch_size or sample_count(flatten(example)[0])
        chosen = prepare(
            model,
            objectives,
            example,
            _alone(spec, samples),
            batch_size=batch_size,
            fewer=spec.microbatches is None,
            init=init,
        )
        return Job(chosen, world, example=example, clip_norm=clip_norm, seed=seed)
    together = prepare_together(world, model, objectives, example, spec, batch_size, init)
    return Job(together, world, example=example, clip_norm=clip_norm, seed=seed, same_weights=False)


def _refuse_alone(spec: Spec | Plan) -> None:
    """One process does not do what a plan for several says, however well it computes the same.

    Raises:
        PolylaneError: the plan takes more than one.
    """
    if spec.processes == 1:
        return
    script = Path(sys.argv[0]).name
    script = script if script.endswith(".py") else "script.py"
    raise PolylaneError(
        f"the plan takes {spec.processes:,} workers, and this is one process: start it with torchrun --nproc-per-node "
        f"{spec.processes} {script}, or pass alone=True to train the same microbatches on one worker"
    )


def _alone(spec: Spec | Plan, samples: int) -> Spec:
    """The same training, of batches of so many samples, on one worker, with the same microbatches.

    A single replica has nobody to agree with.
    """
    if isinstance(spec, Plan):
        return Spec(schedule=spec.schedule, microbatches=spec.microbatches, precision=spec.precision)
    microbatches = default_microbatches(spec, samples)
    plain = replace(spec, data=1, pipeline=1, sequence=1, tensor=1, stages=(), sync=SUM, slow=())
    return replace(plain, microbatches=microbatches)
