"""The dry run: one eager run of a loss before it is captured, which finds the user's own errors and side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError, read_text
from polylane.graph.batch import clone_leaves, is_sampled, sample_count
from polylane.graph.capture.export import (
    BadLoss,
    ModelWithLoss,
    NotCaptured,
    format_line,
    model_restored,
    reason_of,
    snapshot_tensors,
    why_data_needed,
)
from polylane.graph.capture.failing_batch import describe_failing_batch
from polylane.graph.capture.leaves import NormalizationWatch, source_line_of
from polylane.graph.python_state.module_paths import is_inside
from polylane.graph.python_state.own_objects import is_project_file
from polylane.graph.python_state.random_generators import generator_states, states_equal
from polylane.graph.python_state.run_watch import watch_backward
from polylane.graph.python_state.side_effects import SideEffects, find_side_effects

_TWO_DEVICES = ("not on the expected device", "on the same device")  # what torch says of tensors that do not meet


@dataclass(frozen=True)
class DryRun:
    """One eager run of the loss.

    Attributes:
        results: the loss, or its total and count, detached.
        random: whether the run drew random numbers.
        values: least number of values per channel of any batch statistic; None without.
        is_mean: whether the loss returned a scalar, not a ``polylane.Mean``.
        effects: what the run did besides computing.
        takes_gradients: whether the run differentiated something itself (a gradient penalty, forces of an energy).
    """

    results: tuple[Tensor, ...]
    random: bool
    values: int | None
    is_mean: bool
    effects: SideEffects = field(default_factory=SideEffects)
    takes_gradients: bool = False


def dry_run(whole: ModelWithLoss, leaves: Sequence[Any], abstract: bool, which: str = "the example batch") -> DryRun:
    """Run the loss once, eagerly. A loss that fails by itself is the user's error, not a limit of capture.

    Raises:
        BadLoss: the result is no loss; in training, it has no gradient; or the loss calls backward().
        PolylaneError: the run raises any other error.
    """
    before, drawn, tensors = generator_states(), False, snapshot_tensors(whole)
    parameters, written, moved = dict(whole.named_tensors("parameters")), set[str](), set[str]()

    def run(given: Sequence[Any] = leaves) -> tuple[Tensor, ...]:
        nonlocal drawn
        marks = {name: _mark_written(parameter) for name, parameter in parameters.items()}
        tables = [(path, module, dict(module._parameters)) for path, module in whole.named_modules()]
        result: tuple[Tensor, ...] = whole(*clone_leaves(given))
        drawn = drawn or not states_equal(before, generator_states())
        _refuse_replaced(whole, tables)
        for name, parameter in parameters.items():
            if (mark := _mark_written(parameter)) != marks[name]:
                written.add(name)
                moved.update([name] if mark[0] != marks[name][0] else [])
        return result

    with model_restored(whole), _errors_told(whole, leaves, abstract, which):
        with torch.enable_grad(), NormalizationWatch() as normalizing, watch_backward() as taken:
            results, effects = find_side_effects(
                whole.model, whole.given_loss, run, tensors, None if abstract else lambda: run(_repeat_first(leaves))
            )
            effects = replace(effects, written_parameters=frozenset(written), moved_parameters=frozenset(moved))
        if any(taken):
            raise BadLoss(
                "loss(model, batch) calls backward() itself, and its result is differentiated once more: leave "
                "that out, and return the loss (torch.autograd.grad may be used inside)"
            )
        if whole.training:
            _refuse_without_gradient(whole, results[0])
        values = tuple(each.detach() for each in results)
        return DryRun(values, drawn, normalizing.values, whole.mean, effects, bool(taken))


def _repeat_first(leaves: Sequence[Any]) -> list[Any]:
    """Return a batch of the same form that has the first sample in all places."""
    samples = sample_count(leaves)
    return [leaf[[0] * samples] if is_sampled(leaf, samples) else leaf for leaf in leaves]


def _refuse_replaced(whole: ModelWithLoss, tables: Sequence[tuple[str, nn.Module, dict[str, Any]]]) -> None:
    """Raise PolylaneError if a run has put another parameter in the place of one, or into a module."""
    for path, module, before in tables:
        for key, now in module._parameters.items():
            if now is not before.get(key) and (now is not None or before.get(key) is not None):
                name = f"{path}.{key}".removeprefix("model.").removeprefix(".")
                known = {id(tensor): other for other, tensor in whole.named_tensors("parameters") if other != name}
                of = f"the parameter {known[id(now)]}" if id(now) in known else "another parameter"
                # The user's own forward around it: the module itself may be one of torch's.
                around = [type(outer).forward for at, outer, _ in reversed(tables) if at != "" and is_inside(path, at)]
                lines = [source_line_of(each) for each in (*around, whole.loss_function)]
                line = next((each for each in lines if is_project_file(each.rpartition(":")[0])), "")
                raise PolylaneError(
                    f"the loss puts {of} in the place of {name} while it runs{format_line(line)}, which the optimizer "
                    "was not given under that name: assign it before, where the model is built"
                )


def _mark_written(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a write changes: the address, the version that operators count, and sums, which ``.data`` changes."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return None, tensor._version
    with torch.no_grad():
        values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        sums = str([float(values.sum(dtype=torch.float64)), float(values.abs().sum(dtype=torch.float64))])
    return tensor.data_ptr(), tensor._version, sums


def run_forward(whole: ModelWithLoss, leaves: Sequence[Any], abstract: bool, which: str = "the example batch") -> None:
    """Run the loss once and look at nothing else; what fails is told as :func:`dry_run` tells it.

    Args:
        whole: model and loss, restored afterwards.
        leaves: flat leaves of the batch.
        abstract: whether the model is on the meta device.
        which: name of the batch in the message.

    Raises:
        PolylaneError: the run raises an error, or its result is no loss.
    """
    with model_restored(whole), _errors_told(whole, leaves, abstract, which), torch.enable_grad():
        whole(*clone_leaves(leaves))


@contextmanager
def _errors_told(whole: ModelWithLoss, leaves: Sequence[Any], abstract: bool, which: str) -> Iterator[None]:
    """Context manager: turn an exception of the user's model or loss into one sentence with their line."""
    try:
        yield
    except BadLoss as error:
        raise BadLoss(f"{error}{format_line(source_line_of(whole.loss_function))}") from None
    except PolylaneError:
        raise
    except Exception as error:
        fault = NotCaptured.of(whole, error)
        if abstract and any(words in read_text(error) for words in _TWO_DEVICES):
            raise PolylaneError(
                f"{fault.path or 'loss(model, batch)'} joins tensors of two devices{format_line(fault.line)}, and "
                "predictions are made on one without data: make each on the device of what it meets, as .to(x.device) "
                "does"
            ) from error
        if abstract and (unknown := why_data_needed(error)):
            raise PolylaneError(
                f"{fault.path or 'loss(model, batch)'} depends on {unknown}{format_line(fault.line)}, and "
                "predictions are made without data: keep the sizes, as torch.where or a product with the mask "
                "does, or leave plan and simulate out and give train a plan of your own"
            ) from error
        where = f"{'on the meta device ' if abstract else ''}on {which}{f' in {fault.path}' if fault.path else ''}"
        raise PolylaneError(
            f"loss(model, batch) fails {where}: {reason_of(error)}{format_line(fault.line)}"
            f"{describe_failing_batch(whole, leaves)}"
        ) from error


def _refuse_without_gradient(whole: ModelWithLoss, loss: Tensor) -> None:
    """Raise BadLoss if no parameter would be trained; plain PyTorch's backward() raises then, too."""
    if loss.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in whole.parameters()):
        raise BadLoss("no parameter of the model requires a gradient, so that there is nothing to train: unfreeze some")
    raise BadLoss(
        "the loss does not depend on any parameter that requires a gradient, so that nothing would be trained: return "
        "one that is differentiable, without argmax, detach() or no_grad() on the way"
    )
