"""Model tensors: a worker's view of the user's model, parameters and buffers by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import named_parameters


@dataclass
class ModelTensors:
    """A worker's view of the user's model: parameters and buffers by name, on its device once it holds them.

    Attributes:
        model: the user's module, whose tensors are replaced in place.
        losses: the losses of all objectives, some of which may be modules.
        device: device of this worker, to which held tensors are moved.
    """

    model: nn.Module
    losses: Sequence[Any]
    device: torch.device

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by canonical name."""
        return dict(named_parameters(self.model, self.losses))

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by canonical name."""
        named = dict(self.model.named_buffers())
        for loss in self.losses:
            if isinstance(loss, nn.Module):
                named |= {f"loss.{name}": buffer for name, buffer in loss.named_buffers()}
        return named

    def list_state(self, losses: bool) -> dict[str, Tensor]:
        """Return what the model's ``state_dict`` has, by the model's names, and what those of losses have, if asked."""
        state = dict(self.model.state_dict(keep_vars=True))
        for loss in self.losses if losses else ():
            if isinstance(loss, nn.Module):
                values = loss.state_dict(keep_vars=True).items()
                state |= {f"loss.{name}": value for name, value in values if isinstance(value, Tensor)}
        return state

    def move_to_device(self, names: Collection[str]) -> None:
        """Move parameters and buffers to the worker's device; the rest stays where the user built it."""
        tensors = {n: t for n, t in {**self.parameters(), **self.buffers()}.items() if n in names}
        self.replace_values({n: t.data.to(self.device) for n, t in tensors.items() if t.device != self.device})

    def replace_values(self, values: Mapping[str, Tensor]) -> None:
        """Replace the values of parameters and buffers, also by other shapes; parameters stay the same objects."""
        # Optimizers and the user's own code hold parameters by identity, so only their data is exchanged.
        for name, parameter in self.parameters().items():
            if name in values:
                replace_data(parameter, values[name])
        for root, prefix in [(self.model, ""), *[(m, "loss.") for m in self.losses if isinstance(m, nn.Module)]]:
            for path, module in root.named_modules():
                for key, buffer in module._buffers.items():
                    name = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                    if name in values and buffer is not None:
                        module._buffers[key] = values[name]


def replace_data(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another tensor for its values, also one of another shape.

    As long as any autograd graph that read the parameter is alive (a loss that the user's script still has), torch
    keeps the node that accumulates its gradient, which refuses gradients of another shape. A change of dtype drops it.

    Args:
        parameter: the parameter, which stays the same object.
        value: its values from now on, whose memory it shares.
    """
    if value.shape != parameter.shape:
        other_dtype = torch.float64 if parameter.dtype != torch.float64 else torch.float32
        parameter.data = parameter.data.new_empty(0, dtype=other_dtype)
    parameter.data = value
