"""A plan for ``transformers.Trainer``: each worker runs the same Trainer, and the plan is what its one device is.

    from polylane.integrations.transformers import PlanTrainer as Trainer, PlanTrainingArguments as TrainingArguments

``polylane run script.py --workers 4 --plan data=2,pipeline=2``, torchrun with the variable ``POLYLANE_PLAN``, or
``PlanTrainingArguments(plan=...)`` say the plan; without one the Trainer is transformers' own.

    Trainer                            under a plan
    per_device_train_batch_size        the samples of a whole batch, of which each replica computes its share
    model(**inputs), loss.backward()   recorded, and run by the plan's programs
    compute_loss, compute_metrics      on whole values, on every worker
    checkpoints, logs, the hub         written by the first worker, whole: any plan goes on from them
    after train()                      the model and its optimizer are whole on every worker
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer, TrainingArguments

from polylane.errors import PolylaneError
from polylane.graph.capture.export import python_kept
from polylane.integrations.planned_model import PlannedModel
from polylane.runtime.workers.launch_environment import VARIABLES
from polylane.script.session import current_session

# Arguments that a plan takes the place of, or that no plan can serve, and what to say instead.
REFUSED = {
    "fsdp": "say shard=parameters in the plan",
    "deepspeed": "say shard=optimizer or shard=parameters in the plan",
    "parallelism_config": "say tensor=, sequence= and data= in the plan",
    "fp16": "say precision=float16 in the plan, which scales the loss",
    "bf16": "say precision=bfloat16 in the plan",
    "torch_compile": "say compile=yes in the plan",
    "auto_find_batch_size": "say per_device_train_batch_size, or microbatches= and recompute= in the plan",
    "neftune_noise_alpha": "add the noise in the model's own embedding",
    "enable_jit_checkpoint": "say save_steps: a signal comes to workers at different steps",
}


@dataclass
class PlanTrainingArguments(TrainingArguments):
    """``transformers.TrainingArguments`` with a plan.

    Attributes:
        plan: the plan. Default: that of ``polylane run --plan``, or of the environment variable ``POLYLANE_PLAN``.
        chosen_plan: the plan that trains; None where the Trainer is transformers' own.

    Raises:
        PolylaneError: an argument says what a plan says, or what no plan can do.

    Examples:
        >>> from polylane.integrations.transformers import PlanTrainingArguments
        >>> arguments = PlanTrainingArguments("out", per_device_train_batch_size=16, report_to="none")
        >>> arguments.chosen_plan is None
        True
    """

    plan: str | None = field(default=None, metadata={"help": "Plan of polylane, such as data=2,pipeline=2."})

    def __post_init__(self) -> None:
        session = current_session()
        self.chosen_plan, self._rank, self._local_rank = session.choose_plan(self.plan), 0, 0
        self._device: torch.device | None = None
        if self.chosen_plan is None:
            super().__post_init__()
            return
        for name, substitute in REFUSED.items():
            if getattr(self, name, None):
                raise PolylaneError(f"{name}={getattr(self, name)!r} is not for a Trainer under a plan: {substitute}")
        world = session.join_world()
        self._rank, self._local_rank = world.rank, world.local_rank
        with _alone():
            super().__post_init__()
            super().device  # noqa: B018  the process state of accelerate is made here, and stays
        if not self.use_cpu and world.device.type != "cpu":
            self._device = world.device
            torch.accelerator.set_device_index(world.device)

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        device: torch.device = self._device or super().device
        return device

    @property
    def n_gpu(self) -> int:
        """Number of devices of this process: under a plan one, or none."""
        return int(super().n_gpu) if self.chosen_plan is None else min(1, super().n_gpu)

    @property
    def should_save(self) -> bool:
        """Whether this process writes files: of a plan's workers, the first, or that of each host."""
        return bool(super().should_save) and not (self._local_rank if self.save_on_each_node else self._rank)

    @property
    def should_log(self) -> bool:
        """Whether this process writes logs: of a plan's workers, the first, or that of each host."""
        return bool(super().should_log) and not (self._local_rank if self.log_on_each_node else self._rank)


@contextmanager
def _alone() -> Iterator[None]:
    """Context manager: to accelerate, this process is one that no launcher has started."""
    hidden = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class PlanTrainer(Trainer):
    """``transformers.Trainer`` whose model is trained under the plan of its arguments.

    After ``train`` model and optimizer are whole on every worker, and compute by themselves. A Trainer of another
    class is ``class MyTrainer(PlanTrainer, Seq2SeqTrainer)``.

    Args:
        model: the model to train.
        args: the arguments, with the plan.
        options: further arguments of ``transformers.Trainer``.

    Raises:
        PolylaneError: the arguments are not ``PlanTrainingArguments``, or the model is divided in another way.

    Examples:
        >>> import torch
        >>> from polylane.integrations.transformers import PlanTrainer, PlanTrainingArguments
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(8, 3)
        ...
        ...     def forward(self, inputs, labels):
        ...         logits = self.layer(inputs)
        ...         return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
        >>> samples = [{"inputs": torch.ones(8), "labels": torch.tensor(1)} for _ in range(32)]
        >>> arguments = PlanTrainingArguments("out", max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True)
        >>> trainer = PlanTrainer(Model(), arguments, train_dataset=samples)
        >>> trainer.train().global_step
        {...}
        2
    """

    def __init__(self, model: Any = None, args: Any = None, **options: Any) -> None:
        if not isinstance(args, PlanTrainingArguments):
            raise PolylaneError(
                "PlanTrainer takes PlanTrainingArguments(...), which leave the workers to the plan, in place of "
                "transformers' TrainingArguments"
            )
        self._planned: PlannedModel | None = None
        super().__init__(model=model, args=args, **options)
        if args.chosen_plan is not None and (
            self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_model_parallel
        ):
            raise PolylaneError(
                "the model is divided already, by FSDP, DeepSpeed or a device_map: build it as for one device, and say "
                "shard=parameters, tensor= or pipeline= in the plan"
            )

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, and have the model's calls recorded from here on."""
        optimizer = super().create_optimizer(model)
        current_session().nudge_weights([self.model])
        current_session().hold(models=[self.model])
        if self.args.chosen_plan is not None and self._planned is None:
            # That of an earlier train() is accelerate's, which has the optimizer itself.
            optimizers = [getattr(optimizer, "optimizer", optimizer)]
            self._planned = PlannedModel(self.model, optimizers, self.args.chosen_plan)
        return optimizer

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, and make the model and its optimizer whole; collective."""
        result = super().train(*args, **options)
        if self._planned is not None:
            self._planned.release()
            self._planned = None
        return result

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Search without a plan; with one, each worker would draw trials of its own.

        Raises:
            PolylaneError: there is a plan.
        """
        if self.args.chosen_plan is None:
            return super().hyperparameter_search(*args, **options)
        raise PolylaneError(
            "hyperparameter_search() is not for a Trainer under a plan, as each worker would draw trials of its own: "
            "start a training for each trial"
        )

    # ---- files, which the first worker writes ------------------------------------------------------------------------

    def save_model(self, *args: Any, **options: Any) -> None:
        """Write the whole model; collective while it is trained."""
        if self._planned is None:
            super().save_model(*args, **options)
            return
        state = self._planned.state_dict()
        # Writing changes the model's config, on the worker that writes: to the plan's programs, that is another model.
        state_given = patch.object(self.model, "state_dict", lambda *_, **__: state)
        with python_kept(self.model, is_trial=False), state_given:
            super().save_model(*args, **options)
        self._planned.wait_for_workers()  # which look for the checkpoint

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        if self._planned is None:
            super()._save_checkpoint(*args, **options)
            return
        optimizer = self.optimizer.optimizer  # of accelerate's
        state = optimizer.state_dict()  # a collective: the first worker alone asks for it in what follows
        with patch.object(optimizer, "state_dict", lambda: state):
            super()._save_checkpoint(*args, **options)

    def is_world_process_zero(self) -> bool:
        """Whether this process is the first of all workers."""
        return bool(super().is_world_process_zero()) and not self.args._rank

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first worker of its host."""
        return bool(super().is_local_process_zero()) and not self.args._local_rank
