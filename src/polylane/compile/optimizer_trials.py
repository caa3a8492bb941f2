"""Trials of an optimizer: parameters to try it on, small ones and ones as large as the model's, and their gradients."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from polylane.compile.objectives import OptimizerFactory
from polylane.optim.modes import set_mode

SIZE = 4  # length of every dimension of small parameters
ELEMENTS = 1 << 15  # elements of a larger one: 181 x 181, past the sizes from which optimizers factor or quantize
LARGE = 1e6  # factor of a last gradient, past the bounds from which gradients are clipped; half precision ends before
TOTAL = 1 << 18  # elements of all parameters together, up to which every one is tried in its own shape
TAIL = 32  # elements at the end of a loop that may not fill a vector
_OF_EVERY_GROUP = ("params", "param_names", "lr", "initial_lr", "weight_decay")  # options that change no formula

Shape = tuple[int, ...]
Parameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Trial:
    """What an optimizer is tried on.

    Attributes:
        values: initial values of parameters by name.
        steps: gradients of each step by name; several steps, so that states (moments, momentum) take part.
        is_true: whether every parameter has the model's own shape.
    """

    values: dict[str, Tensor]
    steps: list[dict[str, Tensor]]
    is_true: bool = False

    @property
    def cut_dims(self) -> list[int]:
        """Indices of the dimensions along which parts are to be tried: those that are longer than the small ones.

        Of small parameters all are.
        """
        dim_count = max((v.dim() for v in self.values.values()), default=0)
        longest = [max(v.shape[dim] for v in self.values.values() if v.dim() > dim) for dim in range(dim_count)]
        return [dim for dim, length in enumerate(longest) if length > SIZE or max(longest) <= SIZE]


def draw_trial(
    parameters: Parameters,
    sparse: Collection[str] = (),
    shapes: Mapping[str, Shape] | None = None,
    types: Mapping[str, torch.dtype] | None = None,
) -> Trial:
    """Draw values for parameters of these names and numbers of dimensions, and gradients.

    Args:
        parameters: (name, parameter) of what is to be tried.
        sparse: names of the parameters whose gradients are sparse tensors.
        shapes: shapes by name; other parameters are small.
        types: dtypes by name; other parameters are float64, so that only the algorithm makes a difference.
    """
    random, true, types = torch.Generator().manual_seed(0), shapes or {}, types or {}

    def draw(name: str, dims: int) -> Tensor:
        shape = true.get(name, (SIZE,) * dims)
        drawn = torch.randn(shape, generator=random, dtype=torch.float64)
        # Of other magnitude in every part: the norms of halves of many equal draws are as good as equal.
        for dim, size in enumerate(shape if name in true else ()):
            ramp = torch.linspace(0.5, 1.5, size, dtype=torch.float64)
            drawn *= ramp.view(-1, *[1] * (len(shape) - dim - 1))
        return drawn.to(types.get(name, torch.float64))

    values = {name: draw(name, parameter.dim()) for name, parameter in parameters}
    # Of small ones three steps: a mask of signs, as cautious optimizers take it, is that of all elements until then.
    steps = [{n: draw(n, v.dim()) for n, v in values.items()} for _ in ("12" if true else "123")]
    steps.append({n: g * min(LARGE, torch.finfo(g.dtype).max / 100) for n, g in steps[0].items()})
    # Whole rows are orthogonal to their gradients at first, parts of them are not: AdamP looks at that.
    steps[0] = {n: _without_component(g, values[n]) for n, g in steps[0].items()}
    return Trial(
        values,
        [{n: g.to_sparse(1) if n in sparse else g for n, g in step.items()} for step in steps],
        all(tuple(values[n].shape) == tuple(p.shape) for n, p in parameters),
    )


def _without_component(gradient: Tensor, value: Tensor) -> Tensor:
    """Return a gradient less its component along the value of each row; as it is where a row has one element."""
    if value.dim() < 2 or value[0].numel() < 2:
        return gradient
    rows, along = gradient.double().flatten(1), value.double().flatten(1)
    share = (rows * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True)
    return (rows - share * along).view_as(gradient).to(gradient.dtype)


def draw_true_trials(
    parameters: Parameters,
    factory: OptimizerFactory,
    known_names: Collection[str],
    sparse: Collection[str] = (),
    sides: Mapping[str, object] | None = None,
) -> Iterator[Trial]:
    """Yield trials on parameters as large as the model's, in float64 and in their own half precision.

    Some optimizers treat a parameter by its size: Adafactor of other libraries factors dimensions from 32 or 128 on,
    8-bit Adam quantizes from 4,096 elements on. Of a large model one parameter is tried for all of its shape, dtype and
    options; one with more than :data:`ELEMENTS` has its longest dimensions shortened, and is tried again with each of
    these as long as it is, and the others short.

    Args:
        parameters: (name, parameter) of all parameters with dimensions.
        factory: the user's optimizer factory.
        known_names: names of the parameters that need no further trial.
        sparse: names of the parameters whose gradients are sparse.
        sides: by name what else tells parameters of a large model apart, of which one is tried for all.
    """
    types = {name: p.dtype for name, p in parameters if p.dtype in (torch.float16, torch.bfloat16)}
    for i, shapes in enumerate(_find_true_shapes(parameters, factory, known_names, sparse, sides or {})):
        yield draw_trial(parameters, sparse, shapes)
        if types and i == 0:
            yield draw_trial(parameters, sparse, shapes, types)


def small_parameters(values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return new parameters with these values, by name."""
    return {n: nn.Parameter(v.clone()) for n, v in values.items()}


def build_on_trial(
    factory: OptimizerFactory,
    values: Mapping[str, Tensor],
    mark: Callable[[str, Tensor], None] = lambda name, parameter: None,
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Build an optimizer on new parameters with the values; return both.

    Args:
        factory: the user's optimizer factory.
        values: initial values of the parameters, by name.
        mark: called with each parameter before the optimizer is built.

    Raises:
        ValueError: the optimizer takes other parameters than those that its factory is given.
    """
    trial_parameters = small_parameters(values)
    for name, parameter in trial_parameters.items():
        mark(name, parameter)
    optimizer = factory(list(trial_parameters.items()))
    parameter_ids = {id(parameter) for parameter in trial_parameters.values()}
    if any(id(parameter) not in parameter_ids for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("optimizer(parameters) takes other parameters than those that it is given")
    set_mode(optimizer, True)
    return trial_parameters, optimizer


def _find_true_shapes(
    parameters: Parameters,
    factory: OptimizerFactory,
    known_names: Collection[str],
    sparse: Collection[str],
    sides: Mapping[str, object],
) -> list[dict[str, Shape]]:
    """Return, for every trial, shapes by name; a parameter that has none is small."""
    full = {name: tuple(p.shape) for name, p in parameters if p.dim() and p.numel()}
    if sum(map(math.prod, full.values())) > TOTAL:
        options, of = _describe_options(parameters, factory), dict(parameters)
        first_names = dict[object, str]()
        for name in full:
            if name not in known_names:
                traits = full[name], of[name].dtype, name in sparse, options.get(name), sides.get(name)
                first_names.setdefault(traits, name)
        full = {name: full[name] for name in first_names.values()}
    small = {name: (SIZE,) * p.dim() for name, p in parameters}
    if all(small[name] == shape or name in known_names for name, shape in full.items()):
        return []
    stand_ins = {name: list(_stand_ins(shape)) for name, shape in full.items()}
    trial_count = max(map(len, stand_ins.values()))
    return [{name: shapes[i] for name, shapes in stand_ins.items() if i < len(shapes)} for i in range(trial_count)]


def _describe_options(parameters: Parameters, factory: OptimizerFactory) -> dict[str, str]:
    """Return the options by which an optimizer steps each parameter, apart from rates; nothing if it is not built."""
    try:
        trial_parameters, built = build_on_trial(factory, {n: torch.zeros([SIZE] * p.dim()) for n, p in parameters})
    except Exception:  # a factory that knows the shapes of its own model
        return {}
    of = {
        id(p): repr(sorted((k, repr(v)) for k, v in group.items() if k not in _OF_EVERY_GROUP))
        for group in built.param_groups
        for p in group["params"]
    }
    return {name: of.get(id(p), "") for name, p in trial_parameters.items()}


def _stand_ins(shape: Shape) -> Iterator[Shape]:
    """Yield a shape if it is small enough, or several that stand for it."""
    if math.prod(shape) <= ELEMENTS:
        yield shape
        return
    level = _shorten(shape)
    yield level
    longest = sorted(range(len(shape)), key=lambda dim: -shape[dim])[:2]
    flat = _shorten(tuple(size if dim in longest else 1 for dim, size in enumerate(shape)))
    if flat != level:
        yield flat
    for dim, size in enumerate(shape):
        if level[dim] < size:
            other_sizes = _shorten((*shape[:dim], *shape[dim + 1 :]), max(1, ELEMENTS // size))
            yield (*other_sizes[:dim], size, *other_sizes[dim:])


def _shorten(shape: Shape, limit: int = ELEMENTS) -> Shape:
    """Return a shape with its longest dimensions shortened to one length, so that there are at most so many elements.

    Dimensions keep two rows where they have them.
    """
    lengths = range(2, max(shape, default=2) + 1)
    fits = bisect.bisect_right(lengths, limit, key=lambda length: math.prod(min(size, length) for size in shape))
    return tuple(min(size, lengths[max(fits - 1, 0)]) for size in shape)


@contextmanager
def empty_groups_clipped() -> Iterator[None]:
    """Context manager: let ``clip_grad_value_`` of no gradients do nothing, as ``clip_grad_norm_`` does.

    Where parameters are distributed, a worker may have none of a group. torch's function raises on that.
    """
    module: Any = clip_grad  # whose private name no type checker sees
    group_gradients = module._group_tensors_by_device_and_dtype

    def group(lists: Any, *args: Any, **kwargs: Any) -> Any:
        return group_gradients(lists, *args, **kwargs) if lists and lists[0] else {}

    with patch.object(module, "_group_tensors_by_device_and_dtype", group):
        yield


@contextmanager
def trying() -> Iterator[None]:
    """Context manager: train on trial, as workers do, with random draws that the caller does not see, by one thread.

    Tensors are small: threads would wait for each other, for long where other work has the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), empty_groups_clipped():
            yield
    finally:
        torch.set_num_threads(threads)


def are_equal(values: Tensor, other_values: Tensor, absolute: float, units: int = 2) -> bool:
    """Return whether results of a trial agree.

    Of float64 all elements agree to rounding. Of half precision nearly all agree to a few units in the last place: a
    ratio that is summed in another order may round the other way, and torch's vectorized loops round the products of
    the last few elements, which do not fill a vector, once more than others.

    Args:
        values, other_values: values of a parameter after two trainings.
        absolute: tolerance for the absolute difference of float64 values.
        units: tolerance for half precision, in units of the last place.
    """
    if values.dtype is torch.float64:
        return torch.allclose(values, other_values, rtol=1e-9, atol=absolute)
    unlike = ~torch.isclose(values, other_values, rtol=units * torch.finfo(values.dtype).eps, atol=0, equal_nan=True)
    return int(unlike.sum()) <= TAIL + values.numel() / 1000
