"""A plan for Lightning: each worker runs the same ``Trainer``, and the plan is what its one device is.

    trainer = Trainer(strategy=PlanStrategy(), ...)

``polylane run script.py --workers 4 --plan data=2,pipeline=2``, torchrun with the variable ``POLYLANE_PLAN``, or
``PlanStrategy("data=2,pipeline=2")`` say the plan; without one the Trainer runs on one device.

    LightningModule                       under a plan
    self(x), self.net(x), loss            recorded, and run by the plan's programs
    self.log, metrics, callbacks          on whole values, on every worker
    batch_size of a loader                the samples of a whole batch, of which each replica computes its share
    checkpoints, loggers                  written by the first worker, whole: any plan goes on from them
    after fit()                           the module and its optimizers are whole on every worker
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torchmetrics import Metric

from polylane.errors import PolylaneError
from polylane.integrations.planned_model import PlannedModel
from polylane.plan.plan import AnyPlan
from polylane.script.deferred import DeferredTensor
from polylane.script.session import current_session


class PlanStrategy(SingleDeviceStrategy):
    """Strategy that trains a LightningModule under a plan.

    Args:
        plan: the plan; a line, or a plan read from a file. Default: that of ``polylane run --plan``, or of the
            environment variable ``POLYLANE_PLAN``.
        checkpoint_io: how checkpoints are written and read; default: by torch.
        precision_plugin: precision of the training; default: what the Trainer's ``precision`` says.

    Examples:
        >>> from lightning import Trainer
        >>> from polylane.integrations.lightning import PlanStrategy
        >>> trainer = Trainer(max_epochs=10, strategy=PlanStrategy(), logger=False)
    """

    strategy_name = "polylane"

    def __init__(
        self,
        plan: str | AnyPlan | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._planned: PlannedModel | None = None
        self._plan = current_session().choose_plan(plan)
        self._world = None if self._plan is None else current_session().join_world()
        device = torch.device("cpu") if self._world is None else self._world.device
        super().__init__(device, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        if self._world is not None:
            # To samplers and seeds all workers are the one device; files and downloads are the first one's.
            self.local_rank, rank_zero_only.rank = self._world.local_rank, self._world.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and logs: of a plan's workers, the first."""
        return self._world is None or self._world.rank == 0

    # ---- the training ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Create the optimizers, and have the calls of the module's parts recorded from here on."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        current_session().nudge_weights([self.lightning_module])
        current_session().hold(models=[self.lightning_module])
        if self._plan is not None:
            if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
                raise PolylaneError(
                    "BatchSizeFinder is not for a Trainer under a plan, whose workers run out of memory at different "
                    "sizes: say batch_size, or microbatches= and recompute= in the plan"
                )
            self._planned = PlannedModel(_parts_of(self.lightning_module), self.optimizers, self._plan)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Compute what the step has assigned to buffers, now that it has run: callbacks write into them."""
        self._compute_buffers()

    def _compute_buffers(self) -> None:
        for name, buffer in self.lightning_module.named_buffers(recurse=False):
            if isinstance(buffer, DeferredTensor):
                setattr(self.lightning_module, name, copy.deepcopy(buffer))

    def on_exception(self, exception: BaseException) -> None:
        """Leave the training as it is: the other workers may never come to its end."""
        self._planned = None

    def teardown(self) -> None:
        """Make the module and its optimizers whole; collective."""
        if self._planned is not None:
            self._planned.release()
            self._planned = None
        # After an error the module may be in the middle of a step, and cannot be moved: the first error is to be seen.
        with suppress(PolylaneError) if sys.exc_info()[0] else nullcontext():
            super().teardown()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, whole on every worker; collective."""
        self._compute_buffers()
        state = dict(super().lightning_module_state_dict())
        return state if self._planned is None else state | self._planned.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on the first worker, which the others wait for."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier()

    # ---- between workers ---------------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until every worker has come here."""
        self.broadcast(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one worker on all of them: names of files, and whether these exist."""
        if self._world is None or self._world.size == 1:
            return obj
        return self._world.all_gather_object(obj)[src]


def _parts_of(module: LightningModule) -> nn.Module:
    """Return a module of the parameters and submodules of another one, by the same names.

    Its Python is the script's, and so are its buffers, which a training_step may assign; it also knows the Trainer,
    which changes at each step. So do the metrics, which keep sums in attributes.
    """
    parts = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        parts.register_parameter(name, parameter)
    for name, child in module.named_children():
        if not isinstance(child, Metric):
            parts.add_module(name, child)
    return parts
