"""One pass of torch.export over ``loss(model, batch)``, and whose line it was that could not be captured."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor, nn

from polylane.graph.batch import Rebuild, is_sampled, sample_count
from polylane.graph.opaque import functions_kept
from polylane.graph.source import is_users
from polylane.recipe import Mean

Loss = Callable[[nn.Module, Any], Any]


class Whole(nn.Module):
    """Model and loss as one module over flat leaves, so that any form of batch and output can be captured."""

    def __init__(self, model: nn.Module, loss: Loss, rebuild: Rebuild) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.loss = loss  # its buffers (class weights, say) are captured too
        self._call = loss
        self._rebuild = rebuild
        self.samples: Any = None
        self.mean = True

    def forward(self, *leaves: Any) -> tuple[Tensor, ...]:
        self.samples = sample_count(leaves)
        result = self._call(self.model, self._rebuild(leaves))
        if isinstance(result, Mean):
            self.mean = False
            count = result.count if isinstance(result.count, Tensor) else torch.as_tensor(result.count)
            return result.total, count.detach().to(result.total.dtype)
        self.mean = True
        if not isinstance(result, Tensor) or result.dim() > 0:
            form = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise TypeError(f"loss(model, batch) must return a scalar tensor or polylane.Mean(total, count), not {form}")
        return (result,)


@dataclass(eq=False)
class NotCaptured(Exception):
    """Export failed: in which module, at which of the user's lines, and why."""

    path: str | None  # innermost module whose forward was running; None when none was
    line: str
    reason: str


def export(whole: Whole, leaves: Sequence[Any]) -> torch.export.ExportedProgram:
    """Capture ``whole`` with the batch dimension left open.

    Raises:
        NotCaptured: naming the innermost module at fault.
    """
    samples = sample_count(leaves)
    dynamic = tuple({0: torch.export.Dim.AUTO} if is_sampled(leaf, samples) else None for leaf in leaves)
    try:
        # Oblivious sizes: without it a graph would hold for two samples or more, and silently broadcast one.
        with (
            symbolic_config.patch(backed_size_oblivious=True),
            functions_kept(),
            _caches_off(whole.model),
            torch.enable_grad(),
        ):
            return torch.export.export(
                whole, tuple(leaves), dynamic_shapes={"leaves": dynamic}, strict=False, prefer_deferred_runtime_asserts_over_guards=True
            )
    except Exception as error:
        raise _not_captured(whole, error) from error


@contextmanager
def _caches_off(model: nn.Module) -> Iterator[None]:
    """Generation caches (a config's ``use_cache``) do not belong to training and only get in a graph's way."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True


def _not_captured(whole: Whole, error: BaseException) -> NotCaptured:
    paths = {id(module): path for path, module in whole.model.named_modules()}
    path, line = None, ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and id(module) in paths:
            path = paths[id(module)]
        file = frame.f_code.co_filename
        if is_users(file):
            line = f"{file}:{number}"
    text = str(error).strip().splitlines() or [type(error).__name__]
    return NotCaptured(path, line, f"{type(error).__name__}: {text[0]}")


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Remember every parameter, buffer and gradient of ``model``, and torch's random state; the result restores them."""
    parameters = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    buffers = [
        (module, dict(module._buffers), {k: copy.copy(b) if b is None else b.detach().clone() for k, b in module._buffers.items()})
        for module in model.modules()
    ]
    random = torch.get_rng_state()

    def restore() -> None:
        with torch.no_grad():
            for parameter, value, grad in parameters:
                parameter.copy_(value)
                parameter.grad = grad
            for module, objects, values in buffers:
                for name, buffer in objects.items():
                    if buffer is not None:
                        buffer.copy_(values[name])
                    module._buffers[name] = buffer
        torch.set_rng_state(random)

    return restore
