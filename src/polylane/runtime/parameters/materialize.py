"""Give a model that was built on the meta device its values, module by module: no worker ever holds all of it."""

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
    """What torch's own modules do when they are built."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def is_on_meta(model: nn.Module) -> bool:
    """Whether any value is still to come."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module,
    init: Init | None,
    seed: int,
    device: torch.device,
    keep: Callable[[str, Tensor], Tensor | None],
) -> None:
    """Let every parameter and buffer that is on the meta device have its value, or this worker's part of it.

    The values are those of ``torch.manual_seed(seed); model.to_empty(device=device); model.apply(init)``, but only one
    module's own tensors are whole at a time.

    Args:
        model: its parameters become new objects.
        init: fills the tensors that a module itself owns; default: its ``reset_parameters()``.
        seed: of the random numbers.
        device: where values are made.
        keep: a tensor's name and whole value -> what this worker keeps of it; None for nothing: it stays on the meta
            device.

    Raises:
        PolylaneError: ``init`` left a tensor without a value.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    made: dict[int, nn.Parameter] = {}
    unkept: dict[int, nn.Parameter] = {}  # by the identity of what was made for it
    originals = dict(model.named_parameters())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        # Children first, as Module.apply does; shared modules once for each place, as it does too.
        places = list(_children_first(model, ""))
        # A tied weight, or one of a shared module, stays whole until the last of its places has been filled.
        last = {id(t): i for i, (_, m) in enumerate(places) for t in _own_tensors(m) if t.is_meta}
        waiting: dict[int, list[tuple[str, nn.Module, Tensor]]] = {}
        for place, (path, module) in enumerate(places):
            for name, tensor, before in _allocate_tensors(module, device, names, made):
                waiting.setdefault(last[before], []).append((name, module, tensor))
            with torch.no_grad():
                (init or reset_parameters)(module)
            for name, owner, tensor in waiting.pop(place, []):
                if tensor.is_floating_point() and bool(tensor.isnan().any()):
                    raise PolylaneError(
                        f"{name} has no value: the model is on the meta device, and init({path or 'the model itself'}) "
                        "does not write it; give an init(module) that fills all tensors that a module itself owns"
                    )
                kept = keep(name, tensor.data)
                if isinstance(tensor, nn.Parameter) and kept is not None:
                    tensor.data = kept
                elif isinstance(tensor, nn.Parameter):
                    unkept[id(tensor)] = originals[name]
                    tensor.data = tensor.data.new_empty(0)  # it is read no more
                else:
                    owner._buffers[name.rpartition(".")[2]] = tensor.to("meta") if kept is None else kept
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
    module: nn.Module, device: torch.device, names: Mapping[int, str], made: dict[int, nn.Parameter]
) -> list[tuple[str, Tensor, int]]:
    """A module's own tensors that are on the meta device, now with memory: name in the model, tensor, former id."""
    own: list[tuple[str, Tensor, int]] = []
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in made:  # tied ones are made once
                made[id(parameter)] = nn.Parameter(_allocate_unwritten(parameter, device), parameter.requires_grad)
                own.append((names[id(parameter)], made[id(parameter)], id(parameter)))
            module._parameters[key] = made[id(parameter)]
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _allocate_unwritten(buffer, device)
            own.append((names[id(buffer)], module._buffers[key], id(buffer)))  # type: ignore[arg-type]
    return own


def _allocate_unwritten(like: Tensor, device: torch.device) -> Tensor:
    """Memory in which it shows whether it was written."""
    fresh = torch.empty_like(like, device=device, requires_grad=False)
    return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh.zero_()


@contextmanager
def whole_shapes_only(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """For the while, let a model have whole tensors again, without any values: for capturing it once more."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    abstract: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        meta = torch.empty(shapes.get(name, tuple(tensor.shape)), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        abstract[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
    for module, parameters, buffers in before:
        module._parameters.update({k: abstract.get(id(p), p) for k, p in parameters.items()})
        module._buffers.update({k: abstract.get(id(b), b) for k, b in buffers.items()})
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
