"""Capture attempts: export, turn what cannot be captured into leaves, and check the result against the model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import clone_leaves, sample_count, take_first_samples
from polylane.graph.capture import inline as rewrite
from polylane.graph.capture import self_check
from polylane.graph.capture.aliasing import functionalize_writes
from polylane.graph.capture.describe_nodes import refuse_function_transforms
from polylane.graph.capture.export import (
    BadLoss,
    ModelWithLoss,
    NotCaptured,
    export,
    format_line,
    model_restored,
    reason_of,
    snapshot_tensors,
    why_data_needed,
)
from polylane.graph.capture.leaves import (
    LeafCall,
    NormalizationWatch,
    ObservedCalls,
    leaves_kept,
    observe_calls,
    opaque_call,
    source_line_of,
)
from polylane.graph.capture.open_dimensions import OpenedProgram, find_open_sizes
from polylane.graph.capture.python_operators import FunctionCall, forget_sites
from polylane.graph.capture.recomputed_norms import buffers_written_again, repeat_moves
from polylane.graph.capture.self_check import Difference
from polylane.graph.graph import is_inside
from polylane.graph.precision import unwrap_autocast, wrap_autocast
from polylane.graph.python_state.random_generators import generator_states, states_equal
from polylane.graph.python_state.run_watch import watch_backward
from polylane.graph.python_state.side_effects import SideEffects, find_side_effects
from polylane.graph.symbolic_sizes import allowed_sizes, compute_sizes_locally, refused_sizes, symbolic_inputs


@dataclass(frozen=True)
class CaptureAttempt:
    """Captured code before anything is keyed or described.

    Attributes:
        graph: flat ATen code of model and loss.
        constants: tensors that the code closes over, by placeholder name.
        shared_memory_groups: groups of nodes that share memory which some node writes.
        refused_sizes: numbers of samples that the code does not hold for, as far as tried.
        is_fixed_size: whether the code holds for the example's number of samples alone.
        is_opaque: whether the code is a single leaf.
        opened: what it leaves open beside the number of samples; None: nothing.
        notes: one sentence for everything that could not be captured, and why.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    shared_memory_groups: list[list[fx.Node]]
    refused_sizes: list[int]
    is_fixed_size: bool = False
    is_opaque: bool = False
    opened: OpenedProgram | None = None
    notes: tuple[str, ...] = ()


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

    def run() -> tuple[Tensor, ...]:
        nonlocal drawn
        result: tuple[Tensor, ...] = whole(*clone_leaves(leaves))
        drawn = drawn or not states_equal(before, generator_states())
        return result

    with model_restored(whole):
        try:
            with torch.enable_grad(), NormalizationWatch() as normalizing, watch_backward() as taken:
                results, effects = find_side_effects(whole.model, whole.given_loss, run, tensors)
            if any(taken):
                raise BadLoss(
                    "loss(model, batch) calls backward() itself, and its result is differentiated once more: leave "
                    "that out, and return the loss (torch.autograd.grad may be used inside)"
                )
            if whole.training:
                _refuse_without_gradient(whole, results[0])
            values = tuple(each.detach() for each in results)
            return DryRun(values, drawn, normalizing.values, whole.mean, effects, bool(taken))
        except BadLoss as error:
            raise BadLoss(f"{error}{format_line(source_line_of(whole.loss_function))}") from None
        except PolylaneError:
            raise
        except Exception as error:
            fault = NotCaptured.of(whole, error)
            if abstract and (unknown := why_data_needed(error)):
                raise PolylaneError(
                    f"{fault.path or 'loss(model, batch)'} depends on {unknown}{format_line(fault.line)}, and "
                    "predictions are made without data: keep the sizes, as torch.where or a product with the mask "
                    "does, or leave plan and simulate out and give train a plan of your own"
                ) from error
            where = f"{'on the meta device ' if abstract else ''}on {which}{f' in {fault.path}' if fault.path else ''}"
            raise PolylaneError(
                f"loss(model, batch) fails {where}: {reason_of(error)}{format_line(fault.line)}"
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


def capture_with_leaves(whole: ModelWithLoss, leaves: Sequence[Any], dry: DryRun, abstract: bool) -> CaptureAttempt:
    """Export, turning what cannot be captured into leaves, until the self-check holds; with one note per leaf."""
    kept = _modules_with_effects(dry.effects)
    if "" in kept:
        if abstract:
            raise PolylaneError(f"the model cannot be captured on the meta device: it {kept['']}")
        return _capture_opaque(whole, leaves, dry, f"it {kept['']}")
    if dry.takes_gradients:  # export would keep what autograd saved as constants
        why = "it takes gradients inside itself (torch.autograd.grad), which cannot be captured"
        if abstract:
            raise PolylaneError(f"the model cannot be captured on the meta device: {why}")
        return _capture_opaque(whole, leaves, dry, why)
    while True:  # each round makes one more module a leaf, or a larger one; at the latest the whole model
        try:
            draft = attempt_capture(whole, leaves, kept)
        except NotCaptured as fault:
            path, why = fault.path, f"{fault.reason}{format_line(fault.line)}"
            if abstract:
                raise PolylaneError(f"{path or 'the model'} cannot be captured on the meta device: {why}") from fault
            if path is None:  # export failed after the forward, for what some module has left behind
                path = next(iter(_find_culprits(whole, leaves, list(kept), "")), "")
        else:
            _attach_effects(draft, dry.effects)
            difference = None if abstract else run_self_check(whole, draft, leaves)
            if difference is None:
                return replace(draft, notes=describe_leaves(whole, kept))
            path, why = _find_faulty_module(whole, draft, leaves, kept, difference)
        while path and path in kept:  # already a leaf and still failing: make its parent the leaf
            path = path.rpartition(".")[0]
        if not path:
            return _capture_opaque(whole, leaves, dry, why)
        # A leaf contains its submodules: drop those that were leaves by themselves.
        kept = {other: note for other, note in kept.items() if not other.startswith(f"{path}.")}
        kept[path] = f"{path} is a leaf, kept whole: {why}"


def _modules_with_effects(effects: SideEffects) -> dict[str, str]:
    """Return the modules that do more than compute, and why each is a leaf; key "" for model and loss together."""
    paths = sorted({effect.path for effect in effects.found})
    outermost = [p for p in paths if not any(is_inside(p, other) for other in paths if other != p)]
    kept = {p: "; ".join(effect.describe for effect in effects.found if is_inside(effect.path, p)) for p in outermost}
    return {path: f"{path} is a leaf, kept whole: it {why}" if path else why for path, why in kept.items()}


def _attach_effects(draft: CaptureAttempt, effects: SideEffects) -> None:
    """Set on every leaf what it does besides computing."""
    for node in draft.graph.nodes:
        if isinstance(node.target, LeafCall):
            node.target.effects = tuple(e for e in effects.found if is_inside(e.path, node.target.path))


def describe_leaves(whole: ModelWithLoss, kept: dict[str, str]) -> tuple[str, ...]:
    parameters = whole.named_tensors("parameters")
    empty = ", ".join(name for name, tensor in parameters if tensor.requires_grad and not tensor.numel())
    nothing = f"nothing is trained of parameters without elements (a width of 0?): {empty}"
    return (*kept.values(), *([nothing] if empty else []))


def run_self_check(
    whole: ModelWithLoss, draft: CaptureAttempt, leaves: Sequence[Any], others: Sequence[Sequence[Any]] = ()
) -> Difference | None:
    # One sample, and sizes for which export itself says that the code takes another branch.
    sizes = sorted({1, *draft.refused_sizes[:3], *draft.refused_sizes[-1:]})
    noted = _watch_random(draft.graph)  # before settings are around the functions
    wrap_autocast(draft.graph)
    try:
        opened = None if draft.opened is None else draft.opened.sizes
        return self_check.first_difference(whole, draft.graph, draft.constants, leaves, sizes, opened, others)
    finally:
        unwrap_autocast(draft.graph)
        for node, target in noted.items():
            node.target = target


def _watch_random(graph: fx.Graph) -> dict[fx.Node, FunctionCall]:
    """Wrap custom functions so that they record, during the self-check, whether they draw random numbers."""

    def noting(function: FunctionCall) -> Any:
        def run(part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
            before = generator_states()
            result = function(part, tensors)
            function.random = function.random or not states_equal(before, generator_states())
            return result

        run.__module__, run.__name__ = "polylane", function.__name__
        return run

    noted = {node: node.target for node in graph.nodes if isinstance(node.target, FunctionCall)}
    for node, function in noted.items():
        node.target = noting(function)
    return noted


def attempt_capture(
    whole: ModelWithLoss, leaves: Sequence[Any], paths: Collection[str], dims: Collection[tuple[int, int]] = ()
) -> CaptureAttempt:
    with ExitStack() as stack:  # on exit the model is restored first, then the call sites are forgotten
        stack.callback(forget_sites)
        stack.enter_context(model_restored(whole))
        if paths:
            modules = {path: whole.model.get_submodule(path) for path in paths}
            stack.enter_context(leaves_kept(modules, _observe_two_sizes(whole, modules, leaves), whole.tracing))
        program = export(whole, leaves, dims)
        graph, constants = rewrite.copy_with_roles(program)
        part = rewrite.add_slice_input(graph)
        rewrite.inline_sites(graph, part)
    # The checks that export inserted say for which sizes the code holds; read them before they are dropped.
    opened = find_open_sizes(program, graph, leaves) if dims else None
    symbols, nominal = ((), {}) if opened is None else (opened.symbols, opened.nominal)
    lowest, highest = allowed_sizes(program, symbols)
    refused = refused_sizes(graph, lowest, highest, 2 * sample_count(leaves), nominal)
    rewrite.drop_assertions(graph)
    refuse_function_transforms(graph)
    compute_sizes_locally(graph, part, symbols, () if opened is None else opened.sizes.nominal)
    rewrite.merge_tied(graph, whole.tied)
    together = functionalize_writes(graph)
    repeat_moves(graph, whole, leaves)
    graph.lint()
    return CaptureAttempt(graph, constants, together, refused, is_fixed_size=lowest == highest, opened=opened)


def _observe_two_sizes(
    whole: ModelWithLoss, modules: dict[str, nn.Module], leaves: Sequence[Any]
) -> list[tuple[int, ObservedCalls]]:
    """Return two batch sizes, each with the calls of ``modules`` at that size; one size twice if no other works."""
    one = take_first_samples(leaves, self_check.FEW)  # small sizes first: they are cheaper
    samples = sample_count(one)
    other = self_check.other_batch(one) if samples > 2 else self_check.resize_batch(one, 2 * samples)
    seen: dict[int, ObservedCalls] = {}
    for batch in (one, other, leaves, self_check.other_batch(leaves)):
        if len(seen) < 2 and sample_count(batch) not in seen:
            with suppress(NotCaptured):
                seen[sample_count(batch)] = _observe_once(whole, modules, batch)
    return (list(seen.items()) * 2)[:2]


def _observe_once(whole: ModelWithLoss, modules: dict[str, nn.Module], leaves: Sequence[Any]) -> ObservedCalls:
    try:  # with gradients where it needs them: a tensor without any refuses hooks
        needed = not self_check.runs_without_gradients(whole, leaves)
        with model_restored(whole):
            return observe_calls(modules, lambda: whole(*leaves), needed)
    except Exception as error:
        raise NotCaptured.of(whole, error) from error


def _find_faulty_module(
    whole: ModelWithLoss, draft: CaptureAttempt, leaves: Sequence[Any], kept: dict[str, str], difference: Difference
) -> tuple[str, str]:
    """Return the path of the module to keep whole, and why."""
    why = f"captured, {difference.what} came out different"
    if difference.buffer in buffers_written_again(draft.graph):
        why = (
            f"the recomputation of your torch.utils.checkpoint writes {difference.what} again, which cannot be "
            "captured: keep the module that writes it out of the checkpoint"
        )
    elif draft.is_fixed_size:  # int() or range() of a size
        why = f"it fixes the number of samples to the example's, and {difference.what} came out different"
    elif draft.refused_sizes:
        why = f"what it computes depends on the number of samples, and {difference.what} came out different with some"
    path = (difference.buffer or "").rpartition(".")[0]
    if not path or path in kept:
        path = next(iter(_find_culprits(whole, leaves, list(kept), "")), "")
    line = source_line_of(type(whole.model.get_submodule(path)).forward) if path else ""
    return path, f"{why}{format_line(line)}"


def _passes_self_check(whole: ModelWithLoss, leaves: Sequence[Any], paths: Sequence[str]) -> bool:
    if not paths:
        return False
    try:
        return run_self_check(whole, attempt_capture(whole, leaves, paths), leaves) is None
    except NotCaptured:
        return False


def _find_culprits(whole: ModelWithLoss, leaves: Sequence[Any], kept: list[str], prefix: str) -> list[str]:
    """Return the innermost modules within ``prefix`` that must be leaves for the self-check; [prefix] if it is one."""
    children = [path for path in _called_children(whole, leaves, prefix) if path not in kept]
    if not children or not _passes_self_check(whole, leaves, [*kept, *children]):
        return [prefix]
    needed = _minimize_leaves(whole, leaves, kept, children)
    found: list[str] = []
    for path in needed:
        found += _find_culprits(whole, leaves, [*kept, *(other for other in needed if other != path)], path)
    return found


def _minimize_leaves(whole: ModelWithLoss, leaves: Sequence[Any], kept: list[str], candidates: list[str]) -> list[str]:
    """Return a minimal subset of ``candidates`` that is needed as leaves (delta debugging, Zeller)."""
    if len(candidates) == 1:
        return candidates
    half = len(candidates) // 2
    first, second = candidates[:half], candidates[half:]
    for part in (first, second):
        if _passes_self_check(whole, leaves, [*kept, *part]):
            return _minimize_leaves(whole, leaves, kept, part)
    needed = _minimize_leaves(whole, leaves, [*kept, *second], first)  # neither half suffices alone
    return needed + _minimize_leaves(whole, leaves, [*kept, *needed], second)


def _called_children(whole: ModelWithLoss, leaves: Sequence[Any], prefix: str) -> list[str]:
    """Return the nearest modules within ``prefix`` that are called in a run; a ModuleList, say, is not called."""
    inside = {
        path: m for path, m in whole.model.named_modules() if path and path.startswith(f"{prefix}." if prefix else "")
    }
    called = [path for path, calls in _observe_once(whole, inside, leaves).items() if calls]
    return [path for path in called if not any(path.startswith(f"{other}.") for other in called)]


def _capture_opaque(whole: ModelWithLoss, leaves: Sequence[Any], dry: DryRun, why: str) -> CaptureAttempt:
    """Return model and loss as one leaf: the user's Python runs on every worker."""
    call = opaque_call(whole, leaves, dry.results, dry)
    call.source, call.effects = source_line_of(whole.loss_function), dry.effects.found
    call.takes_gradients = dry.takes_gradients
    graph, inputs, tied, opened = fx.Graph(), list[fx.Node](), whole.tied, symbolic_inputs(leaves)
    part = rewrite.add_slice_input(graph)

    def add_input(name: str, role: tuple[str, Any], val: Tensor) -> None:
        inputs.append(graph.placeholder(name))
        inputs[-1].meta |= {"role": role, "val": val}

    # Placeholders in the order in which LeafCall takes its tensors: parameters, buffers, then tensors of the batch.
    for kind in ("parameter", "buffer"):
        for name, tensor in whole.named_tensors(f"{kind}s"):
            if name not in tied:
                add_input(f"{kind[0]}_{name.replace('.', '_')}", (kind, name), tensor.detach().to("meta"))
    for i in call.tensor_positions:
        add_input(f"leaves_{i}", ("input", i), opened[i])
    node = graph.call_function(call, (part, inputs))
    node.meta["val"] = [value.detach().to("meta") for value in dry.results]
    outputs = list[fx.Node]()
    for i, value in enumerate(dry.results):
        outputs.append(graph.call_function(operator.getitem, (node, i)))
        outputs[-1].meta["val"] = value.detach().to("meta")
    graph.output(tuple(outputs))
    notes = (f"the model is opaque, without a graph: {why}",)
    return CaptureAttempt(graph, {}, functionalize_writes(graph), [], is_opaque=True, notes=notes)
