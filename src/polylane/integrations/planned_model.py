"""Planned model: a model in another library's training loop, which calls it, or the modules inside of it.

A script that calls ``prepare`` gets a prepared model, and calls that. A trainer of another library keeps the model that
it was given, and a step written as a method of the model calls the modules inside of it: so the modules record their
calls themselves. They stay what they are for everything else, and a copy of one records nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from polylane.errors import PolylaneError
from polylane.graph.python_state.compiler import without_compiler
from polylane.plan.plan import AnyPlan
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World
from polylane.script.model_results import ModelCall
from polylane.script.prepare import open_loop
from polylane.script.session import current_session


class PlannedModel:
    """Has a plan train a model, of which the outermost calls are recorded; collective.

    Modules without parameters and buffers run as they are: on deferred tensors their functions are recorded.

    Args:
        model: the model, with whole weights on every worker.
        optimizers: the optimizers of its parameters.
        plan: the plan; a line, or a plan read from a file.

    Raises:
        PolylaneError: ``polylane run`` was asked for checkpoints of its own.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: str | AnyPlan) -> None:
        if current_session().progress.is_active:
            raise PolylaneError(
                "--save-every and --resume are for scripts with a loop of their own: this Trainer writes checkpoints, "
                "and goes on from them, as the script tells it"
            )
        self._is_inside, model = False, without_compiler(model)
        self._loop = open_loop([model], optimizers, plan)
        self._modules = [
            module for module in model.modules() if any(True for _ in (*module.parameters(), *module.buffers()))
        ]
        paths = {module: path for path, module in model.named_modules()}
        for module in self._modules:
            # Where torch looks for what a call runs instead of forward and hooks; copies and pickles go without.
            module._compiled_call_impl = self._record_calls_of(module, ModelCall(0, paths[module]))

    def _record_calls_of(self, module: nn.Module, target: ModelCall) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self._loop.runner.is_running:
                return module._call_impl(*args, **kwargs)
            self._is_inside = True
            try:
                return self._loop.call_model(target, args, kwargs)
            finally:
                self._is_inside = False

        return call

    @property
    def world(self) -> World:
        """This worker among all workers."""
        return self._loop.world

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state, whole on every worker; collective."""
        return self._loop.weights.state_dict(ModelCall(0))

    @collective("a checkpoint")
    def wait_for_workers(self) -> None:
        """Wait until every worker has come here."""
        if self.world.size > 1:
            self.world.all_gather_object(None)

    def release(self) -> None:
        """End the training: model and optimizers are whole on every worker, and compute by themselves; collective."""
        self._loop.release()
        for module in self._modules:
            module._compiled_call_impl = None
