"""What an optimizer keeps for every parameter, and needs while it steps: asked of the optimizer itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.graph.graph import Graph

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

# Sizes of the dimensions of the parameters that an optimizer is tried on: all different, so that a state's dimensions
# tell which of the parameter's they are.
_SIZES = (5, 7, 11, 13, 17, 19, 23)

# Parameters that it takes to tell what is needed for one at a time from what is needed for all of them at once.
_MANY = 32


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for a parameter.

    Attributes:
        sizes: of its dimensions: the number of the parameter's dimension that it is as large as, or a plain size.
        itemsize: bytes of an element.
    """

    sizes: tuple[tuple[str, int], ...]
    itemsize: int

    def bytes(self, shape: Sequence[int]) -> int:
        """For a parameter of this shape."""
        return math.prod(shape[n] if kind == "dim" else n for kind, n in self.sizes) * self.itemsize


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps and needs.

    Attributes:
        states: of every parameter that it takes, by name.
        workspace_factor: bytes that a step needs meanwhile, for every byte of the parameters that it works on at once.
        steps_all_at_once: whether it works on all of them at once, or on one after the other.
        unknown_reason: why nothing is known, where the optimizer does not run on small parameters; it then counts as
            Adam.
    """

    states: Mapping[str, tuple[StateTensor, ...]]
    workspace_factor: float = 0.0
    steps_all_at_once: bool = False
    unknown_reason: str = ""

    def bytes(self, name: str, shape: Sequence[int]) -> int:
        """Kept for a parameter that has this shape on a rank."""
        return sum(state.bytes(shape) for state in self.states.get(name, ()))

    def bytes_per_element(self, name: str) -> float:
        """Bytes kept for each element of a parameter, as far as they grow with all its dimensions."""
        return float(
            sum(s.itemsize for s in self.states.get(name, ()) if len({n for k, n in s.sizes if k == "dim"}) > 0)
        )

    def step_bytes(self, parameters: Sequence[int]) -> int:
        """Bytes that a step over parameters of these bytes needs meanwhile."""
        return round(
            self.workspace_factor * (sum(parameters) if self.steps_all_at_once else max(parameters, default=0))
        )


def probe_optimizer_state(graph: Graph, factory: Factory, device: str = "cpu") -> OptimizerState:
    """What the user's optimizer keeps for the parameters that a graph trains.

    It takes two steps on small parameters of the same names, dtypes and numbers of dimensions; what it then has for
    each of them is its state. Nothing of the user's is touched.

    Args:
        graph: names the parameters.
        factory: (name, parameter) pairs -> an optimizer.
        device: on "cuda" torch's own optimizers work on all parameters at once ("foreach") unless told otherwise.
    """
    trained = {name: info for name, info in graph.parameters.items() if info.trainable}
    dims = {name: len(info.shape) for name, info in trained.items()}
    dtypes = {name: getattr(torch, info.dtype) for name, info in trained.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            return _run_optimizer(dims, dtypes, factory, device)
    except Exception as error:
        why = f"its optimizer does not run on small parameters ({type(error).__name__}: {error})"
        return OptimizerState({n: _adam_states(d, dtypes[n].itemsize) for n, d in dims.items()}, unknown_reason=why)


def _run_optimizer(
    dims: Mapping[str, int], dtypes: Mapping[str, torch.dtype], factory: Factory, device: str
) -> OptimizerState:
    def made() -> dict[str, nn.Parameter]:
        return {n: nn.Parameter(torch.ones(_probe_shape(dim), dtype=dtypes[n])) for n, dim in dims.items()}

    small = made()
    extra = [pair for _ in range(-(-_MANY // max(len(small), 1)) - 1) for pair in made().items()]
    every = [*extra, *small.items()]  # where names are made unique, the last ones stay
    optimizer = factory(every)
    for group in optimizer.param_groups:
        if device == "cuda" and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    for _, parameter in every:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    known = [t for _, p in every for t in (p, p.grad, *_find_tensors(optimizer.state.get(p, {}))) if t is not None]
    with (ledger := AllocationMeter(known)):
        optimizer.step()
    states = {n: tuple(_describe_states(optimizer.state.get(p, {}), tuple(p.shape))) for n, p in small.items()}
    sizes = [p.nbytes for group in optimizer.param_groups for p in group["params"]]
    # One by one there are a few temporary tensors at a time; all at once there are some for each parameter.
    together = ledger.peak_pieces > max(len(sizes) // 4, 1)
    worked_on = sum(sizes) if together else max(sizes, default=0)
    return OptimizerState(states, ledger.peak_bytes / max(worked_on, 1), together)


def _probe_shape(dim: int) -> tuple[int, ...]:
    return tuple(_SIZES[d % len(_SIZES)] for d in range(dim))


def _describe_states(state: Mapping[str, Any], shape: tuple[int, ...]) -> list[StateTensor]:
    return [
        StateTensor(tuple(_match_dimension(size, shape) for size in t.shape), t.element_size())
        for t in _find_tensors(state)
    ]


def _match_dimension(size: int, shape: tuple[int, ...]) -> tuple[str, int]:
    return ("dim", shape.index(size)) if size in shape else ("size", size)


def _find_tensors(value: Any) -> list[Tensor]:
    """All tensors in an optimizer's state, however it holds them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in _find_tensors(v)]
    return [t for v in value for t in _find_tensors(v)] if isinstance(value, (list, tuple)) else []


def _adam_states(dim: int, item: int) -> tuple[StateTensor, ...]:
    whole = StateTensor(tuple(("dim", d) for d in range(dim)), item)
    return (whole, whole, StateTensor((), 4))
