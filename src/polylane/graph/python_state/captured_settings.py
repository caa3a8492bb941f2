"""Captured settings: values that a graph took for constant although the user may change them between steps.

Attributes of modules that are plain values (a temperature, dropout's p), tensors that are no buffers, numpy arrays,
lists and other objects, training flags of submodules, whether parameters require a gradient, globals and closure
variables that the loss reads, files that it reads or looks for, and the environment. They are compared before every
step with their values at capture; if one differs, another graph is needed.

Only names that occur in the functions which ran are watched: a number that a training loop keeps on the model for
itself does not concern the graph. Neither do attributes of leaves, which run the user's Python anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from polylane.errors import PolylaneError
from polylane.graph.python_state.side_effects import SideEffects, modules_of_losses
from polylane.graph.python_state.state import find_python_names
from polylane.graph.python_state.watched_values import WatchList


class CapturedSettings:
    """Values at capture that a graph depends on, and their comparison with the present.

    Args:
        model: the user's model, whose modules are watched.
        losses: the user's losses; those that are modules are watched as well.
        effects: what the capture's run was seen to read and write; None: whatever is in reach is watched.
        leaves: paths of modules that read their own attributes on every run; "": all modules.
        training: whether the training mode was captured.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[Any],
        effects: SideEffects | None,
        leaves: Collection[str],
        training: bool,
    ) -> None:
        self._training = training
        named, of_losses = list(model.named_modules()), modules_of_losses(losses)
        modules = [*named, *of_losses]
        self._paths = [path for path, _ in named]
        self._inside = [module for _, module in named]
        self._others = [module for _, module in of_losses]
        self._children = [(path, module, tuple(module._modules.values())) for path, module in modules]
        self._slots = [
            (module._parameters, key, f"{path}.{key}" if path else key)
            for path, module in modules
            for key, value in module._parameters.items()
            if value is not None
        ]
        self._parameters = [table[key] for table, key, _ in self._slots]
        self._modes, self._gradients = self._modes_now(), self._gradients_now()
        # The graph reads them at every step, wherever else the user keeps them: an LSTM has its weights in a list.
        read = {
            id(tensor) for _, module in modules for tensor in (*module._parameters.values(), *module._buffers.values())
        }
        self.watched = WatchList(effects, leaves, read)
        for path, module in modules:
            self.watched.module(path, module)
        functions = [loss for loss in losses if not isinstance(loss, nn.Module)]
        for name in find_python_names(modules, functions, None if effects is None else effects.functions_run):
            if name.path is None:
                self.watched.watch_name(name)

    def _modes_now(self) -> list[bool]:
        # A capture puts the whole model into its mode; submodules that the user froze in another mode keep theirs.
        modes = [module.training for module in self._inside]
        if modes[0] is not self._training:
            modes = [self._training] * len(modes)
        return modes + [module.training for module in self._others]

    def _gradients_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def find_change(self) -> str | None:
        """Return the first difference from the capture but in files, in words; None if there is none.

        Raises:
            PolylaneError: a parameter or a module was replaced by another one.
        """
        for path, module, children in self._children:
            if tuple(module._modules.values()) != children:
                raise PolylaneError(_describe_replaced(path, module, children))
        for (table, key, label), parameter in zip(self._slots, self._parameters, strict=True):
            if table.get(key) is not parameter:
                raise PolylaneError(
                    f"{label} was replaced by another parameter after the training was prepared, which no optimizer "
                    f"knows: write into the one that is there, {label}.data.copy_(values)"
                )
        if self._modes_now() != self._modes:
            modes, paths = self._modes_now(), [*self._paths, *["loss"] * len(self._others)]
            at = next(i for i, (a, b) in enumerate(zip(modes, self._modes, strict=True)) if a is not b)
            return f"{paths[at] or 'the model'}.training"
        if self._gradients_now() != self._gradients:
            return f"{self.changed_requires_grad()[0]}.requires_grad"
        return self.watched.find_change()

    @property
    def files(self) -> dict[str, tuple[int, ...] | None]:
        """The files that were read or looked for, with what tells whether they have changed."""
        return self.watched.files

    def find_changed_file(self) -> str | None:
        """Return the first file that has changed since the capture, in words; None if there is none."""
        changed = self.watched.find_changed_file()
        return None if changed is None else f"the file {changed}"

    def find_replaced_module(self) -> str | None:
        """Return the path of the first module that has other modules inside now; None if there is none."""
        for path, module, children in self._children:
            if tuple(module._modules.values()) != children:
                return path or "the model"
        return None

    def read_modes(self) -> list[bool]:
        """Return of every module, in order, whether it is in training mode."""
        return [module.training for module in (*self._inside, *self._others)]

    def write_modes(self, modes: Sequence[bool]) -> None:
        """Set the modes that another process with the same modules has read."""
        for module, training in zip((*self._inside, *self._others), modes, strict=True):
            module.training = training

    def changed_requires_grad(self) -> list[str]:
        """Return names of the parameters whose ``requires_grad`` has changed."""
        pairs = zip(self._slots, self._gradients_now(), self._gradients, strict=True)
        return [label for (_, _, label), flag, old_flag in pairs if flag is not old_flag]


def _describe_replaced(path: str, module: nn.Module, old_children: Sequence[Any]) -> str:
    children = list(module._modules.items())
    key = next((k for i, (k, m) in enumerate(children) if i >= len(old_children) or m is not old_children[i]), "")
    name = ".".join(part for part in (path, key) if part) or "the model"
    return (
        f"{name} was replaced by another module after the training was prepared: build the model with both, and let an "
        "attribute say which of them runs"
    )
