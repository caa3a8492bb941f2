"""Weights of a script's modules: state dicts, whole on every worker, and gradients that are cleared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World
from polylane.script.model_results import ModelCall
from polylane.script.tape_runner import TapeRunner


class ModuleWeights:
    """The weights of a loop's models, and of modules inside of them.

    Args:
        runner: runs the loop's tapes, and has its models.
    """

    def __init__(self, runner: TapeRunner) -> None:
        self._runner = runner

    @property
    def world(self) -> World:
        """This worker among all workers."""
        return self._runner.world

    def _model_of(self, target: ModelCall) -> nn.Module:
        return list(self._runner.models.children())[target.model]

    def _prefix(self, target: ModelCall) -> str:
        """Return what names of a module's tensors begin with, of those of all models."""
        return ".".join(filter(None, (self._runner.models.child_name(target.model), target.path))) + "."

    def zero_grad(self, target: ModelCall) -> None:
        """Clear the gradients of a module's parameters."""
        prefix, module = self._prefix(target), self._model_of(target).get_submodule(target.path)
        with self._runner.running():
            self.clear_gradients([prefix + name for name, _ in module.named_parameters()])
            module.zero_grad()

    def clear_gradients(self, names: Sequence[str]) -> None:
        """Take the gradients of parameters away, by name, from what workers have of them."""
        if self._runner.job is not None:
            self._runner.role.clear_gradients(names)

    @collective("model.state_dict")
    def state_dict(self, target: ModelCall) -> dict[str, Any]:
        """Return the state of a module, whole on every worker; collective under a plan."""
        self._runner.pending.settle_models([target.model])
        with self._runner.running():
            tensors = self._model_of(target).get_submodule(target.path).state_dict()
        prefix, state = self._prefix(target), {} if self._runner.job is None else self._runner.job.state_dict()
        # In the module's own dict, with its versions and with what is no tensor.
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                full = state.get(prefix + name)
                tensors[name] = value.detach().clone() if full is None else full.to(value.device)
        return tensors

    def load_state_dict(self, target: ModelCall, state: Mapping[str, Tensor], strict: bool) -> Any:
        """Load the state of a module, the same on every worker, each of which takes its part."""
        module = self._model_of(target).get_submodule(target.path)
        if self._runner.job is None:
            with self._runner.running():
                return module.load_state_dict(state, strict)
        with self._runner.running():
            tensors = module.state_dict(keep_vars=True)
        missing, unexpected = sorted(tensors.keys() - state.keys()), sorted(state.keys() - tensors.keys())
        if strict and (missing or unexpected):
            raise RuntimeError(f"load_state_dict: missing keys: {missing}; unexpected keys: {unexpected}")
        prefix = self._prefix(target)
        # By tensor: a state may have one name of several that are tied.
        values = {id(tensor): state[name] for name, tensor in tensors.items() if name in state}
        new_values = {prefix + name: values[id(tensor)] for name, tensor in tensors.items() if id(tensor) in values}
        self._runner.job.load_state_dict(self._runner.job.state_dict() | new_values)
        return nn.Module().load_state_dict({})._replace(missing_keys=missing, unexpected_keys=unexpected)
