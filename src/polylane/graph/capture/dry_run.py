"""The dry run: one eager run of a loss before it is captured, which finds the user's own errors and side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError, read_text
from polylane.graph.batch import batch_structure, clone_leaves, is_sampled, sample_count, sampled_leaves
from polylane.graph.capture.export import BadLoss, ModelWithLoss, model_restored, snapshot_tensors, why_data_needed
from polylane.graph.capture.leaves import NormalizationWatch, source_line_of
from polylane.graph.capture.output_request import BadOutputs
from polylane.graph.nodes.user_lines import NotCaptured, format_line, reason_of
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
        is_undivided: whether the batch is one sample that is never divided.
        output_form: what the outputs are that are asked for beside the loss; None where there are none.
    """

    results: tuple[Tensor, ...]
    random: bool
    values: int | None
    is_mean: bool
    effects: SideEffects = field(default_factory=SideEffects)
    takes_gradients: bool = False
    is_undivided: bool = False
    output_form: Any = None


def dry_run(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], abstract: bool, batch_name: str = "the example batch"
) -> DryRun:
    """Run the loss once, eagerly. A loss that fails by itself is the user's error, not a limit of capture.

    Raises:
        BadLoss: the result is no loss; in training, it has no gradient; or the loss calls backward().
        PolylaneError: the run raises any other error.
    """
    old_states, drawn, tensors = generator_states(), False, snapshot_tensors(model_with_loss)
    parameters, written, moved = dict(model_with_loss.named_tensors("parameters")), set[str](), set[str]()

    def run(inputs: Sequence[Any] = leaves) -> tuple[Tensor, ...]:
        nonlocal drawn
        marks = {name: _mark_written(parameter) for name, parameter in parameters.items()}
        tables = [(path, module, dict(module._parameters)) for path, module in model_with_loss.named_modules()]
        result: tuple[Tensor, ...] = model_with_loss(*clone_leaves(inputs))
        drawn = drawn or not states_equal(old_states, generator_states())
        _refuse_replaced(model_with_loss, tables)
        for name, parameter in parameters.items():
            if (mark := _mark_written(parameter)) != marks[name]:
                written.add(name)
                moved.update([name] if mark[0] != marks[name][0] else [])
        return result

    with model_restored(model_with_loss), _errors_told(model_with_loss, leaves, abstract, batch_name):
        with torch.enable_grad(), NormalizationWatch() as normalizing, watch_backward() as backward_calls:
            results, effects = find_side_effects(
                model_with_loss.model,
                model_with_loss.functions,
                run,
                tensors,
                None if abstract else lambda: run(_repeat_first(leaves)),
            )
            effects = replace(effects, written_parameters=frozenset(written), moved_parameters=frozenset(moved))
        if any(backward_calls):
            raise BadLoss(
                "loss(model, batch) calls backward() itself, and its result is differentiated once more: leave "
                "that out, and return the loss (torch.autograd.grad may be used inside)"
            )
        if model_with_loss.training:
            _refuse_without_gradient(model_with_loss, results[0])
        values = tuple(result.detach() for result in results)
        return DryRun(
            values,
            drawn,
            normalizing.values,
            model_with_loss.mean,
            effects,
            bool(backward_calls),
            model_with_loss.is_undivided,
            model_with_loss.output_form,
        )


def _repeat_first(leaves: Sequence[Any]) -> list[Any]:
    """Return a batch of the same form that has the first sample in all places."""
    samples = sample_count(leaves)
    return [leaf[[0] * samples] if is_sampled(leaf, samples) else leaf for leaf in leaves]


def _refuse_replaced(model_with_loss: ModelWithLoss, tables: Sequence[tuple[str, nn.Module, dict[str, Any]]]) -> None:
    """Raise PolylaneError if a run has put another parameter in the place of one, or into a module."""
    for path, module, table in tables:
        for key, parameter in module._parameters.items():
            if parameter is not table.get(key) and (parameter is not None or table.get(key) is not None):
                name = f"{path}.{key}".removeprefix("model.").removeprefix(".")
                names = {
                    id(tensor): other_name
                    for other_name, tensor in model_with_loss.named_tensors("parameters")
                    if other_name != name
                }
                of = f"the parameter {names[id(parameter)]}" if id(parameter) in names else "another parameter"
                # The user's own forward around it: the module itself may be one of torch's.
                methods = [type(outer).forward for at, outer, _ in reversed(tables) if at != "" and is_inside(path, at)]
                lines = [source_line_of(function) for function in (*methods, model_with_loss.loss_function)]
                line = next((candidate for candidate in lines if is_project_file(candidate.rpartition(":")[0])), "")
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


def run_forward(model_with_loss: ModelWithLoss, leaves: Sequence[Any], abstract: bool) -> None:
    """Run the loss once and look at nothing else; what fails is told as :func:`dry_run` tells it.

    Args:
        model_with_loss: model and loss, restored afterwards.
        leaves: flat leaves of the batch.
        abstract: whether the model is on the meta device.

    Raises:
        PolylaneError: the run raises an error, or its result is no loss.
    """
    with (
        model_restored(model_with_loss),
        _errors_told(model_with_loss, leaves, abstract),
        torch.enable_grad(),
    ):
        model_with_loss(*clone_leaves(leaves))


@contextmanager
def _errors_told(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], abstract: bool, batch_name: str = "the example batch"
) -> Iterator[None]:
    """Context manager: turn an exception of the user's model or loss into one sentence with their line."""
    try:
        yield
    except (BadLoss, BadOutputs) as error:
        raise type(error)(f"{error}{format_line(source_line_of(model_with_loss.loss_function))}") from None
    except PolylaneError:  # is one sentence already
        raise
    except Exception as error:
        fault = NotCaptured.of(model_with_loss.model, error)
        if abstract and any(words in read_text(error) for words in _TWO_DEVICES):
            raise PolylaneError(
                f"{fault.path or model_with_loss.call} joins tensors of two devices{format_line(fault.line)}, and "
                "predictions are made on one without data: make each on the device of what it meets, as .to(x.device) "
                "does"
            ) from error
        if abstract and (unknown := why_data_needed(error)):
            raise PolylaneError(
                f"{fault.path or model_with_loss.call} depends on {unknown}{format_line(fault.line)}, and "
                "predictions are made without data: keep the sizes, as torch.where or a product with the mask "
                "does, or leave plan and simulate out and give train a plan of your own"
            ) from error
        scope = f"{'on the meta device ' if abstract else ''}on {batch_name}{f' in {fault.path}' if fault.path else ''}"
        raise PolylaneError(
            f"{model_with_loss.call} fails {scope}: {reason_of(error)}{format_line(fault.line)}"
            f"{describe_failing_batch(model_with_loss, leaves)}"
        ) from error


def _refuse_without_gradient(model_with_loss: ModelWithLoss, loss: Tensor) -> None:
    """Raise BadLoss if no parameter would be trained; plain PyTorch's backward() raises then, too."""
    if loss.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in model_with_loss.parameters()):
        raise BadLoss("no parameter of the model requires a gradient, so that there is nothing to train: unfreeze some")
    raise BadLoss(
        "the loss does not depend on any parameter that requires a gradient, so that nothing would be trained: return "
        "one that is differentiable, without argmax, detach() or no_grad() on the way"
    )


def describe_failing_batch(model_with_loss: ModelWithLoss, leaves: Sequence[Any]) -> str:
    """Return what is likely wrong with the data, as the end of a sentence; "" if nothing shows it.

    A dataset whose items are batches instead of samples gives batches of batches: each row of these is one on which the
    loss works. And data that are a tensor give batches that are one.

    Args:
        model_with_loss: model and loss, unchanged afterwards.
        leaves: flat leaves of the batch on which the loss failed.
    """
    if batch_structure(model_with_loss.rebuild(leaves)) is None:
        shape = list(leaves[0].shape)
        return f"; the batch is one tensor of shape {shape}: data that give inputs and labels give pairs of them"
    split = sampled_leaves(leaves)
    rows = [leaf[0] if is_split else leaf for leaf, is_split in zip(clone_leaves(leaves), split, strict=True)]
    inner = [row for row, is_split in zip(rows, split, strict=True) if is_split]
    if len({row.shape[0] if row.dim() else 0 for row in inner}) != 1 or not inner[0].dim():
        return ""
    try:
        with model_restored(model_with_loss), torch.enable_grad():
            result = model_with_loss.given_loss(model_with_loss.model, model_with_loss.rebuild(rows))
    except Exception:  # neither does one row work: the data are not what is wrong, as far as this shows
        return ""
    if isinstance(result, Tensor) and result.dim():
        return ""
    shapes = ", ".join(str(list(row.shape)) for row in inner)
    return (
        f"; it works on the first sample by itself (tensors of shape {shapes}): data must give single samples, which "
        "are put together to batches, and these seem to be batches already"
    )
