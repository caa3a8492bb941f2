"""Optimizers over several workers: full parameters replaced by parts or taken out, and which optimizers allow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import OptimizerFactory
from polylane.compile.optimizer_trace import trace_updates
from polylane.compile.optimizer_trials import (
    Trial,
    are_equal,
    build_on_trial,
    draw_trial,
    draw_true_trials,
    small_parameters,
    trying,
)
from polylane.errors import PolylaneError, describe_error
from polylane.graph.python_state.gradient_hooks import hooked_names

SIDES = 4  # most groups that distinguish parameters which are otherwise alike


@dataclass(frozen=True)
class OptimizerPart:
    """The part of a parameter that one worker updates.

    Attributes:
        parameter: what the optimizer has instead of the full parameter: its elements ``begin`` to ``end`` as a vector,
            or all of it in its own shape, if the optimizer depends on the shape.
        begin: index of the first element, in row-major order.
        end: index behind the last element, in row-major order.
    """

    parameter: nn.Parameter
    begin: int
    end: int

    def slice_of(self, full_tensor: Tensor) -> Tensor:
        """Return the same part of a tensor of the full parameter's shape, as a view if that is contiguous."""
        if full_tensor.is_sparse and self.end - self.begin == full_tensor.numel():
            return full_tensor
        return full_tensor.reshape(-1)[self.begin : self.end].view(self.parameter.shape)


# Attributes that torch's own optimizers have.
BASE_ATTRIBUTES = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))


def own_attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes that an optimizer's own class has set, such as a count of steps."""
    yield from ((name, value) for name, value in vars(optimizer).items() if name not in BASE_ATTRIBUTES)


def find_tensors(value: Any, seen_ids: Collection[int] = ()) -> list[Tensor]:
    """Return the tensors in nested lists and mappings, and in optimizers in these."""
    if isinstance(value, Tensor):
        return [value]
    values = vars(value) if isinstance(value, torch.optim.Optimizer) else value
    values = (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, (list, tuple, deque)) else ()
    )
    within = {*seen_ids, id(value)}
    return [tensor for item in values if id(item) not in within for tensor in find_tensors(item, within)]


def replace_parameters(optimizer: torch.optim.Optimizer, pieces: Mapping[nn.Parameter, OptimizerPart | None]) -> None:
    """Replace full parameters by parts in an optimizer, in the same groups with the same options.

    States of the full shape, which the optimizer allocated in its constructor, are cut in the same way.

    Args:
        optimizer: optimizer that was built on full parameters.
        pieces: part of each full parameter; None where this worker updates nothing of it.
    """
    replaced = {parameter: None if piece is None else piece.parameter for parameter, piece in pieces.items()}
    for group in optimizer.param_groups:
        parameters = [replaced.get(parameter, parameter) for parameter in group["params"]]
        if "param_names" in group:
            group["param_names"] = [n for n, p in zip(group["param_names"], parameters, strict=True) if p is not None]
        group["params"] = [parameter for parameter in parameters if parameter is not None]
    for parameter, piece in pieces.items():
        state = optimizer.state.pop(parameter, {})
        if piece is not None and state:
            optimizer.state[piece.parameter] = {
                key: piece.slice_of(value).clone()
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for key, value in state.items()
            }


def find_unshardable(
    parameters: Sequence[tuple[str, nn.Parameter]], optimizers: Iterable[OptimizerFactory]
) -> set[str]:
    """Return names of the parameters that an optimizer can only update as a whole, in their own shape.

    Scalars are among them: there is nothing to cut. So are those with a hook of the user's on the gradient. Each
    optimizer is tried on small parameters of the same names and numbers of dimensions: full, and in two parts. One with
    an attribute ``sum_over_holders`` declares that it works on parts. If a trial fails, the parameters are kept whole.

    Args:
        parameters: (name, parameter) of all parameters of the model and its losses.
        optimizers: the user's optimizer factories, one for each objective.

    Raises:
        PolylaneError: an optimizer's update of one parameter depends on others, so that they cannot be distributed.
    """
    names = {name for name, parameter in parameters if parameter.dim() == 0} | set(hooked_names(parameters))
    for factory in optimizers:
        try:
            different = _find_different(parameters, factory)
        except PolylaneError:
            raise
        except Exception:  # the user's own optimizer may fail on small parameters in any way
            different = {name for name, _ in parameters}
        names |= different
    return names


def explain_coupling(
    parameters: Sequence[tuple[str, nn.Parameter]],
    factory: OptimizerFactory,
    groups: Iterable[Collection[str]],
    sparse: Collection[str] = (),
    moved: bool = False,
) -> str:
    """Return why an optimizer cannot update groups of parameters, each alone, as it updates all of them together.

    It cannot if it looks at several parameters at once (a norm over all of them, an estimate of the distance to the
    solution as D-Adaptation makes it), draws random numbers, or keeps tensors for its parameters where nobody finds
    them. Its steps are traced; and it is tried on small parameters of the same names and numbers of dimensions, and on
    ones as large as the model's, for some optimizers go by the size. The exceptions of a user's optimizer on such
    parameters are passed on, unless it runs on the model's own shapes.

    Args:
        parameters: (name, parameter) of all parameters of the model and its losses.
        factory: the user's optimizer factory.
        groups: names of the parameters that one worker updates, for each worker.
        sparse: names of the parameters whose gradients are sparse.
        moved: whether the optimizer gets others in the place of the model's own parameters, as under ``shard``: what
            keeps these in a list of its own, such as a hook that clips, then sees no gradients.

    Returns:
        The reason, as what the optimizer does: "draws random numbers (recipe.py:12)"; "" if it can.
    """
    groups, trace = [set(group) for group in groups], trace_updates(parameters, factory, sparse)
    if any(map(trace.joins, groups)):
        return f"looks at several parameters at once{_format_place(trace.line)}"
    if trace.draws:
        return f"draws random numbers{_format_place(trace.draws)}"
    attribute = _find_kept_tensors(parameters, factory)
    location = "where no plan finds them (torch's optimizers have them in self.state[parameter])"
    keeps = f"keeps tensors for its parameters in self.{attribute}, {location}" if attribute else ""
    try:
        if _are_updates_separate(parameters, factory, groups, sparse, moved):
            return ""
    except _ShareFailed as failed:
        if not (keeps or moved):
            raise failed.error from None
        words = describe_error(failed.error)
        return keeps or f"does not run with other tensors in the place of its parameters ({words})"
    return keeps or "looks at several parameters at once"


def _format_place(line: str) -> str:
    return "" if line in ("", "?") else f" ({line})"


def _find_kept_tensors(parameters: Sequence[tuple[str, nn.Parameter]], factory: OptimizerFactory) -> str:
    """Return the first attribute in which an optimizer keeps tensors, beside its state; "" without any."""
    try:
        _, built = build_on_trial(factory, draw_trial(parameters).values)
    except Exception:  # a factory that knows the shapes of its own model
        return ""
    attributes = ((n, v) for n, v in own_attributes(built) if not isinstance(v, torch.optim.Optimizer))
    return next((name for name, value in attributes if find_tensors(value)), "")


class _ShareFailed(Exception):
    """An optimizer that runs on all parameters raised where some of them are missing, or replaced."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _are_updates_separate(
    parameters: Sequence[tuple[str, nn.Parameter]],
    factory: OptimizerFactory,
    groups: Sequence[Collection[str]],
    sparse: Collection[str],
    moved: bool,
) -> bool:
    """Return whether groups of parameters, each alone, come out of trials as all of them together do."""
    failed = None
    # Of a large model two parameters that are alike are only both large here if different workers update them.
    sides = {name: tuple(name in group for group in groups[:SIDES]) for name, _ in parameters}
    try:
        if not _are_shares_equal(factory, draw_trial(parameters, sparse), groups, moved):
            return False
    except Exception as error:
        failed = error
    for trial in draw_true_trials(parameters, factory, (), sparse, sides):
        if not _are_shares_equal(factory, trial, groups, moved):
            return False
        if trial.is_true:  # one that is written for the shapes of its model runs on these
            failed = None
    if failed is not None:
        raise failed
    return True


def _are_shares_equal(factory: OptimizerFactory, trial: Trial, groups: Iterable[Collection[str]], moved: bool) -> bool:
    full = {name: (0, value.numel()) for name, value in trial.values.items()} if moved else {}
    shares = [{**full, **{n: (0, 0) for n in trial.values if n not in group}} for group in groups]
    # Every training begins with the same random state, as workers do.
    with trying():
        random_state = torch.get_rng_state()
        full_values = _train_values(factory, trial, {})
        for share in shares:
            torch.set_rng_state(random_state)
            names = [name for name in trial.values if share.get(name) != (0, 0)]
            try:
                values = _train_values(factory, trial, share, False)
            except Exception as error:
                raise _ShareFailed(error) from error
            # The same operators on the same values: of half precision, too, nothing rounds in another way.
            if _find_unlike(full_values, [values], names, units=0):
                return False
    return True


def split_by_bits(names: Sequence[str]) -> list[list[str]]:
    """Split names in halves in so many ways that any two of them are in different halves at least once.

    The halves of the names' numbers by each binary digit: 0 1 | 2 3 and 0 2 | 1 3 of four.
    """
    digits = range(max(1, (len(names) - 1).bit_length()))
    return [[n for i, n in enumerate(names) if (i >> digit) % 2 == half] for digit in digits for half in (0, 1)]


def _find_different(parameters: Sequence[tuple[str, nn.Parameter]], factory: OptimizerFactory) -> set[str]:
    trial = draw_trial(parameters)
    built = factory(list(small_parameters(trial.values).items()))
    if hasattr(built, "sum_over_holders"):
        return set()
    trace = trace_updates(parameters, factory)
    different = _find_different_in(trial, factory) | trace.whole
    # Some optimizers go by a parameter's size.
    cuttable = [(name, parameter) for name, parameter in parameters if parameter.dim()]
    for larger in draw_true_trials(cuttable, factory, different):
        different |= _find_different_in(larger, factory)
    reason = different or trace.draws or _goes_by_place(factory, trial)
    if reason and (reason := explain_coupling(parameters, factory, split_by_bits(list(trial.values)), moved=True)):
        raise PolylaneError(
            f"shard: {type(built).__name__} {reason}, so that no replica can update a share of them: take shard out of "
            "the plan, or another optimizer"
        )
    return different


def _goes_by_place(factory: OptimizerFactory, trial: Trial) -> bool:
    """Return whether an optimizer treats parameters by their places in a group: a replica has parts of some alone."""
    try:
        return not _are_shares_equal(factory, trial, split_by_bits(list(trial.values))[:2], False)
    except _ShareFailed:  # it does not run on some of the parameters, as a replica would have it
        return True


def _find_different_in(trial: Trial, factory: OptimizerFactory) -> set[str]:
    """Return which parameters train otherwise if all that have their number of dimensions are two uneven vectors."""
    values, different = trial.values, set[str]()
    with trying():
        full_values = _train_values(factory, trial, {})
        for dim in sorted({value.dim() for value in values.values()} - {0}):
            cuts = {n: v.numel() * 2 // 5 + 1 for n, v in values.items() if v.dim() == dim}
            try:
                first_part = _train_values(factory, trial, {n: (0, cut) for n, cut in cuts.items()})
                second = _train_values(factory, trial, {n: (cut, values[n].numel()) for n, cut in cuts.items()})
                different |= _find_unlike(full_values, [first_part, second], cuts)
            except Exception:  # an optimizer may refuse vectors
                different |= set(cuts)
    return different


def _find_unlike(
    full_values: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], names: Iterable[str], units: int = 2
) -> set[str]:
    unlike_names = set[str]()
    for name in names:
        joined = torch.cat([part[name].reshape(-1) for part in parts if name in part])
        if not are_equal(full_values[name].reshape(-1), joined, 0, units):
            unlike_names.add(name)
    return unlike_names


def _train_values(
    factory: OptimizerFactory, trial: Trial, ends: Mapping[str, tuple[int, int]], flat: bool = True
) -> dict[str, Tensor]:
    """Return the values of parameters, or of parts of them, after some steps of an optimizer.

    Args:
        factory: the user's optimizer factory.
        trial: initial values of all parameters, and their gradients.
        ends: (begin, end) of the part of a parameter, by name; empty parts are left out; others are full.
        flat: whether parts are vectors; else they have the parameter's shape.
    """
    (parameters, optimizer), pieces = build_on_trial(factory, trial.values), dict[nn.Parameter, OptimizerPart | None]()
    for name, parameter in parameters.items():
        if name in ends:
            begin, end = ends[name]
            part = parameter.detach().reshape(-1)[begin:end].clone()
            cut = nn.Parameter(part if flat else part.view(parameter.shape)) if end > begin else None
            pieces[parameter] = None if cut is None else OptimizerPart(cut, begin, end)
    replace_parameters(optimizer, pieces)
    for step in trial.steps:
        for name, parameter in parameters.items():
            piece = pieces.get(parameter)
            if piece is not None:
                piece.parameter.grad = piece.slice_of(step[name]).clone()
            elif parameter not in pieces:
                parameter.grad = step[name].clone()
        optimizer.step()
    parts = {name: pieces.get(p, OptimizerPart(p, 0, p.numel())) for name, p in parameters.items()}
    return {name: piece.parameter.detach() for name, piece in parts.items() if piece is not None}
