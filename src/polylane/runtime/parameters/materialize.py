"""Deferred initialization: gives a model on the meta device its values, module by module, keeping local shards only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import Init
from polylane.errors import PolylaneError


def reset_parameters(module: nn.Module) -> None:
    """Initialize a module's own tensors as torch's modules do in their constructors."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def is_on_meta(model: nn.Module) -> bool:
    """Return whether any parameter or buffer is still on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module,
    init: Init | None,
    seed: int,
    device: torch.device,
    keep: Callable[[str, Tensor], Tensor | None],
) -> None:
    """Give every parameter and buffer that is on the meta device its value, or this worker's shard of it.

    The values are those of ``torch.manual_seed(seed); model.to_empty(device=device); model.apply(init)``, but only one
    module's own tensors are full at a time.

    Args:
        model: the model to initialize; its parameters are replaced by new objects.
        init: fills the tensors that a module itself owns; default: its ``reset_parameters()``.
        seed: integer seed of the random numbers, equal on every worker.
        device: device on which values are computed and kept.
        keep: (name, full value) -> the shard that this worker keeps; None for nothing: the tensor stays on the
            meta device.

    Raises:
        PolylaneError: ``init`` left a tensor without a value.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    weights: dict[int, nn.Parameter] = {}
    unkept: dict[int, nn.Parameter] = {}  # id of the materialized parameter -> the meta parameter to put back
    originals = dict(model.named_parameters())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        # Children first, as Module.apply does; shared modules once for each place, as it does too.
        places = list(_children_first(model, ""))
        # A tied weight, or one of a shared module, stays full until the last module that owns it has been initialized.
        last_place = {id(t): i for i, (_, m) in enumerate(places) for t in _own_tensors(m) if t.is_meta}
        waiting: dict[int, list[tuple[str, nn.Module, Tensor]]] = {}
        for index, (path, module) in enumerate(places):
            for name, tensor, meta_id in _allocate_tensors(module, device, names, weights):
                waiting.setdefault(last_place[meta_id], []).append((name, module, tensor))
            with torch.no_grad():
                (init or reset_parameters)(module)
            for name, owner, tensor in waiting.pop(index, []):
                # _allocate_unwritten filled it with NaN: any that is left was not written by init.
                if tensor.is_floating_point() and bool(tensor.isnan().any()):
                    raise PolylaneError(
                        f"{name} has no value: the model is on the meta device, and init({path or 'the model itself'}) "
                        "does not write it; give an init(module) that fills all tensors that a module itself owns"
                    )
                shard = keep(name, tensor.data)
                if isinstance(tensor, nn.Parameter) and shard is not None:
                    tensor.data = shard
                elif isinstance(tensor, nn.Parameter):
                    unkept[id(tensor)] = originals[name]
                    tensor.data = tensor.data.new_empty(0)  # frees the memory: nothing reads it any more
                else:
                    owner._buffers[name.rpartition(".")[2]] = tensor.to("meta") if shard is None else shard
        # At the end only: until then other modules that share a parameter find it by its materialized object.
        for module in model.modules():
            for key, parameter in module._parameters.items():
                module._parameters[key] = unkept.get(id(parameter), parameter)


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _allocate_tensors(
    module: nn.Module, device: torch.device, names: Mapping[int, str], weights: dict[int, nn.Parameter]
) -> list[tuple[str, Tensor, int]]:
    """Allocate a module's own meta tensors; return (name in the model, new tensor, id of the meta tensor) of each."""
    entries: list[tuple[str, Tensor, int]] = []
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in weights:  # tied ones are made once
                weights[id(parameter)] = nn.Parameter(_allocate_unwritten(parameter, device), parameter.requires_grad)
                entries.append((names[id(parameter)], weights[id(parameter)], id(parameter)))
            module._parameters[key] = weights[id(parameter)]
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _allocate_unwritten(buffer, device)
            entries.append((names[id(buffer)], module._buffers[key], id(buffer)))  # type: ignore[arg-type]
    return entries


def _allocate_unwritten(like: Tensor, device: torch.device) -> Tensor:
    """Return memory filled with NaN, so that elements that ``init`` does not write can be detected."""
    fresh = torch.empty_like(like, device=device, requires_grad=False)
    return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh.zero_()


@contextmanager
def whole_shapes_only(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Context manager: give a model meta tensors of the full shapes, so that its graph can be captured again.

    Args:
        model: the model whose parameters and buffers are replaced; restored at the end.
        shapes: full shapes of parameters and buffers by name; others have their full shape already.
    """
    originals = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    abstract: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        meta = torch.empty(shapes.get(name, tuple(tensor.shape)), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        abstract[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
    for module, parameters, buffers in originals:
        module._parameters.update({k: abstract.get(id(p), p) for k, p in parameters.items()})
        module._buffers.update({k: abstract.get(id(b), b) for k, b in buffers.items()})
    try:
        yield
    finally:
        for module, parameters, buffers in originals:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
