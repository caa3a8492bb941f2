"""Required gradients: what is frozen, kept alike in the model, in what optimizers hold of it, and on all workers.

changed by                                            seen by
the script between steps, on the model                every worker, in its model
the optimizer or scheduler, through its groups        the workers whose parameters, or ZeRO shards of them, these are

A step's result carries how many parameters an update has frozen or unfrozen, summed over workers: where there are any,
workers tell each other which before the next step, which is then captured for that choice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from polylane.errors import PolylaneError
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.step_result import StepResult
from polylane.runtime.sync.objective_update import ObjectiveUpdate


class RequiredGradients:
    """Which parameters of the model require a gradient, on one worker.

    Args:
        local_model: the part of the model that this worker keeps up to date, with the whole model's parameters.
        updates: the optimizers of all objectives, which hold parameters or shards of them.
    """

    def __init__(self, local_model: LocalModel, updates: Mapping[str, ObjectiveUpdate]) -> None:
        plan = local_model.prepared.plan
        self._transport, self._size = local_model.transport, local_model.world.size
        # Elsewhere every worker's optimizer has all parameters, and does the same to them.
        self._apart = len(plan.first_chunks) > 1 or bool(local_model.shards.flat_buffers)
        # What an update freezes is known on the host before the next step, but for accelerators, for which none waits.
        self._waits = (
            local_model.world.device.type == "cpu" and not plan.sync.is_replica_local and not plan.is_asynchronous
        )
        pairs: list[tuple[str, Tensor]] = list(local_model.tensors.parameters().items())
        known_ids = {id(tensor) for _, tensor in pairs}
        parts = {id(p): (name, p) for update in updates.values() for name, p in update.local_parameters.items()}
        pairs += [pair for key, pair in parts.items() if key not in known_ids]
        self._names, self._tensors = [name for name, _ in pairs], [tensor for _, tensor in pairs]
        self._first = self._known = [tensor.requires_grad for tensor in self._tensors]
        self._told: list[str] = []  # what the last update changed here
        self._updates, self._sizes = updates, {name: _count_held(update) for name, update in updates.items()}
        self._result: StepResult | None = None

    def changed_names(self) -> list[str]:
        """Return names of the parameters that were frozen or unfrozen since the last call of :meth:`follow`."""
        flags = [tensor.requires_grad for tensor in self._tensors]
        if flags == self._known:
            return []
        pairs = zip(self._names, flags, self._known, strict=True)
        return list(dict.fromkeys(name for name, flag, old_flag in pairs if flag is not old_flag))

    def follow(self, names: list[str] | None = None) -> None:
        """Make a change that was made to a parameter, or to an optimizer's shard of it, a change of both.

        Args:
            names: parameters whose choice is another than before; default: those of :meth:`changed_names`.
        """
        turned = set(self.changed_names() if names is None else names)
        if not turned:
            return
        self._known = [flag is not (name in turned) for name, flag in zip(self._names, self._known, strict=True)]
        for tensor, flag in zip(self._tensors, self._known, strict=True):
            if tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)

    def refuse_changes(self) -> None:
        """Refuse a parameter that the user's own Python has frozen or unfrozen within a pass of several workers.

        Raises:
            PolylaneError: a parameter was frozen or unfrozen.
        """
        if self._size > 1 and (names := self.changed_names()):
            raise PolylaneError(
                f"the model's own forward has set requires_grad of {names[0]}, and on several workers what a step "
                "trains is decided before its passes: set it between steps, or in the optimizer's step()"
            )

    def follow_update(self) -> int:
        """Follow what an update has changed; return for how many parameters of this worker.

        Raises:
            PolylaneError: other workers do not learn of it in time.
        """
        self._told = self.changed_names()
        if self._told and self._apart and self._size > 1 and not self._waits:
            raise PolylaneError(
                f"the optimizer's step() has set requires_grad of {self._told[0]}, of which other workers, which do "
                "not have it, learn too late here: set it in the script between steps, on the model's parameters"
            )
        self.follow(self._told)
        return len(self._told)

    def record_result(self, result: StepResult) -> None:
        """Record the result of a step, which tells whether any worker's update has changed something."""
        self._result = result

    def agree(self) -> None:
        """Follow what the last update has changed on other workers; a collective of all that train.

        Raises:
            PolylaneError: an optimizer has got further parameters since the training was prepared.
        """
        for name, update in self._updates.items():
            if _count_held(update) > self._sizes[name]:
                raise PolylaneError(
                    "the optimizer has got further parameters after the training was prepared (add_param_group?): give "
                    "it all of them at first, in groups, and freeze with requires_grad_(False) those that are to wait"
                )
        self.follow()
        result, self._result = self._result, None
        if result is None or not self._apart or not self._waits or self._size == 1 or not result.changes:
            return
        changed_names = {name for names in self._transport.all_gather_object(self._told) for name in names}
        self.follow([name for name in self._names if name in changed_names and name not in self._told])

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def turned_names(self) -> dict[str, bool]:
        """Return what requires a gradient now and did not at the start, or the other way round, by name."""
        pairs = zip(self._names, self._first, self._known, strict=True)
        return {name: flag for name, first_flag, flag in pairs if flag is not first_flag}

    def restore(self, turned: Mapping[str, bool]) -> None:
        """Freeze and unfreeze what was frozen or unfrozen in a run; all else is as it was at the start of this one.

        Args:
            turned: what :meth:`turned_names` returned in that run.
        """
        self.follow()
        states = zip(self._names, self._first, self._known, strict=True)
        self.follow([name for name, first_flag, flag in states if turned.get(name, first_flag) is not flag])


def _count_held(update: ObjectiveUpdate) -> int:
    """Return how many parameters, or shards of them, an optimizer has on this worker."""
    return sum(len(group["params"]) for group in update.optimizer.param_groups)
