"""Optimizer state: bytes that an optimizer keeps per parameter and needs during a step, found by running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.graph.graph import Graph, TensorInfo
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.optim.modes import set_mode

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

# Dimensions of the parameters that an optimizer is probed with: distinct primes, so that each dimension of a state can
# be matched with one of the parameter.
_SIZES = (5, 7, 11, 13, 17, 19, 23)

# Enough parameters to tell an optimizer that steps one by one from one that steps on all at once (foreach).
_MANY = 32


@dataclass(frozen=True)
class StateTensor:
    """A state tensor that an optimizer keeps for a parameter.

    Attributes:
        sizes: one entry per dimension: ("dim", d) if as large as dimension d of the parameter, else ("size", n).
        itemsize: bytes of one element.
    """

    sizes: tuple[tuple[str, int], ...]
    itemsize: int

    def bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the state for a parameter of this shape."""
        return math.prod(shape[n] if kind == "dim" else n for kind, n in self.sizes) * self.itemsize


@dataclass(frozen=True)
class OptimizerState:
    """State tensors of an optimizer, and the memory of its step.

    Attributes:
        states: state tensors by name of the parameter.
        workspace_factor: temporary bytes of a step per byte of the parameters that it updates at once.
        steps_all_at_once: whether it updates all parameters at once (foreach), or one after another.
    """

    states: Mapping[str, tuple[StateTensor, ...]]
    workspace_factor: float = 0.0
    steps_all_at_once: bool = False

    def bytes(self, name: str, shape: Sequence[int]) -> int:
        """Return the bytes of a parameter's states, given its local shape on a rank."""
        return sum(state.bytes(shape) for state in self.states.get(name, ()))

    def step_bytes(self, parameters: Sequence[int]) -> int:
        """Return the temporary bytes of a step over parameters of these sizes in bytes."""
        return round(
            self.workspace_factor * (sum(parameters) if self.steps_all_at_once else max(parameters, default=0))
        )


def probe_optimizer_state(graph: Graph, factory: Factory, device: str = "cpu") -> OptimizerState:
    """Probe the user's optimizer for the states of a graph's trained parameters.

    The optimizer takes two steps on small parameters of the same names, dtypes and numbers of dimensions; what it then
    has for each of them is its state. The model itself is not touched.

    Args:
        graph: gives names, dtypes and ranks of the parameters.
        factory: (name, parameter) pairs -> the user's optimizer.
        device: device type; on "cuda" torch's own optimizers default to "foreach".
    """
    trained = {name: info for name, info in graph.parameters.items() if info.trainable}
    return probe_states(trained, factory, device, find_sparse_gradients(graph))


def probe_states(
    trained: Mapping[str, TensorInfo], factory: Factory, device: str = "cpu", sparse: Collection[str] = ()
) -> OptimizerState:
    """Probe the user's optimizer for the states of some parameters; see :func:`probe_optimizer_state`.

    Args:
        trained: forms of the trained parameters, by name.
        factory: (name, parameter) pairs -> the user's optimizer.
        device: device type; on "cuda" torch's own optimizers default to "foreach".
        sparse: names of the parameters whose gradients are sparse.
    """
    dims = {name: len(info.shape) for name, info in trained.items()}
    dtypes = {name: getattr(torch, info.dtype) for name, info in trained.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            return _run_optimizer(dims, dtypes, factory, device, sparse)
    except Exception:  # it does not run on small parameters: Adam's states are assumed
        return OptimizerState({n: _adam_states(d, dtypes[n].itemsize) for n, d in dims.items()})


def _run_optimizer(
    dims: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    factory: Factory,
    device: str,
    sparse: Collection[str],
) -> OptimizerState:
    def made() -> dict[str, nn.Parameter]:
        shapes = {n: [_SIZES[d % len(_SIZES)] for d in range(dim)] for n, dim in dims.items()}
        return {n: nn.Parameter(torch.ones(shape, dtype=dtypes[n])) for n, shape in shapes.items()}

    small = made()
    extra = [pair for _ in range(-(-_MANY // max(len(small), 1)) - 1) for pair in made().items()]
    pairs = [*extra, *small.items()]  # optimizers that key by name keep the last of equal names: the probed ones
    optimizer = factory(pairs)
    set_mode(optimizer, True)
    for group in optimizer.param_groups:
        if device == "cuda" and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    for name, parameter in pairs:
        gradient = torch.full_like(parameter, 0.5, requires_grad=False)
        parameter.grad = gradient.to_sparse(1) if name in sparse else gradient
    # The first step creates the states; the second shows the temporaries of every further one.
    optimizer.step()
    tensors = [t for _, p in pairs for t in (p, p.grad, *_find_tensors(optimizer.state.get(p, {}))) if t is not None]
    with (ledger := AllocationMeter(tensors)):
        optimizer.step()
    states = {n: tuple(_describe_states(optimizer.state.get(p, {}), tuple(p.shape))) for n, p in small.items()}
    sizes = [p.nbytes for group in optimizer.param_groups for p in group["params"]]
    # Step by step only a few temporaries are alive at a time; foreach has at least one for each parameter.
    steps_all_at_once = ledger.peak_pieces > max(len(sizes) // 4, 1)
    worked_on = sum(sizes) if steps_all_at_once else max(sizes, default=0)
    return OptimizerState(states, ledger.peak_bytes / max(worked_on, 1), steps_all_at_once)


def _describe_states(state: Mapping[str, Any], shape: tuple[int, ...]) -> list[StateTensor]:
    return [
        StateTensor(tuple(_match_dimension(size, shape) for size in t.shape), t.element_size())
        for t in _find_tensors(state)
    ]


def _match_dimension(size: int, shape: tuple[int, ...]) -> tuple[str, int]:
    return ("dim", shape.index(size)) if size in shape else ("size", size)


def _find_tensors(value: Any) -> list[Tensor]:
    """Return all tensors of an optimizer's state, from any nesting of dictionaries and lists."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _adam_states(dim: int, item: int) -> tuple[StateTensor, ...]:
    moment = StateTensor(tuple(("dim", d) for d in range(dim)), item)
    return (moment, moment, StateTensor((), 4))
