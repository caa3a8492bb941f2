"""Capture attempts: export, turn what cannot be captured into leaves, and check the result against the model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import sample_count, take_first_samples
from polylane.graph.capture import inline as rewrite
from polylane.graph.capture import self_check
from polylane.graph.capture.describe_nodes import refuse_unfit_operators
from polylane.graph.capture.dry_run import DryRun
from polylane.graph.capture.export import ModelWithLoss, export, model_restored
from polylane.graph.capture.gradients.expand import expand_gradients
from polylane.graph.capture.leaves import (
    LeafCall,
    ObservedCalls,
    leaves_kept,
    observe_calls,
    opaque_call,
    source_line_of,
)
from polylane.graph.capture.open_dimensions import OpenedProgram, find_open_sizes
from polylane.graph.capture.python.drawn_functions import ObservedResults, functions_drawn, observe_functions
from polylane.graph.capture.python.python_operators import FunctionCall, forget_sites
from polylane.graph.capture.reassigned_buffers import copy_what_is_read
from polylane.graph.capture.recomputed_norms import buffers_written_again, repeat_moves
from polylane.graph.capture.repeated_operators import merge_repeated
from polylane.graph.capture.self_check import Difference
from polylane.graph.nodes.user_lines import NotCaptured, format_line
from polylane.graph.operators.functionalize import functionalize_writes, relax_views
from polylane.graph.precision import unwrap_autocast, wrap_autocast
from polylane.graph.python_state.module_paths import is_inside
from polylane.graph.python_state.random_generators import generator_states, states_equal
from polylane.graph.python_state.run_watch import SideEffect
from polylane.graph.readings.batch_readings import Reading
from polylane.graph.sample_lists import SampleList
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
        readings: questions to the batch that its Python asks, with the answers for which the code holds.
        notes: one sentence for everything that could not be captured, and why.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    shared_memory_groups: list[list[fx.Node]]
    refused_sizes: list[int]
    is_fixed_size: bool = False
    is_opaque: bool = False
    opened: OpenedProgram | None = None
    readings: tuple[Reading, ...] = ()
    notes: tuple[str, ...] = ()


def capture_with_leaves(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], dry: DryRun, abstract: bool
) -> CaptureAttempt:
    """Export, turning what cannot be captured into leaves, until the self-check holds; with one note per leaf."""
    # What draws is a leaf: where it is a function, the function alone, as long as its results can be followed.
    draws = [effect for effect in dry.effects.found if effect.function is not None]
    attempt = None
    if draws and not dry.takes_gradients:
        attempt = _capture_with_functions(model_with_loss, leaves, dry, abstract, draws)
    attempt = attempt or _capture_with_functions(model_with_loss, leaves, dry, abstract)
    assert attempt is not None
    return attempt


def _capture_with_functions(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], dry: DryRun, abstract: bool, draws: Sequence[SideEffect] = ()
) -> CaptureAttempt | None:
    """Capture with functions that draw as nodes of their own; None if that fails, so that they have to be in leaves.

    Args:
        model_with_loss: model and loss, unchanged afterwards.
        leaves: flat leaves of the example batch.
        dry: the eager run before, whose other effects make leaves of the modules that have them.
        abstract: whether the model is on the meta device, where no check against it can run.
        draws: effects of the functions that become nodes; without any the result is never None.
    """
    functions: Sequence[Any] = tuple(dict.fromkeys(effect.function for effect in draws))
    leaf_notes = _modules_with_effects([effect for effect in dry.effects.found if effect not in draws])
    if any(isinstance(leaf, SampleList) for leaf in leaves):
        leaf_notes = {"": "gets lists of samples, whose sizes differ from batch to batch"}
    if "" in leaf_notes:
        if abstract:
            raise PolylaneError(f"the model cannot be captured on the meta device: it {leaf_notes['']}")
        return _capture_opaque(model_with_loss, leaves, dry, f"it {leaf_notes['']}")
    while True:  # each round makes one more module a leaf, or a larger one; at the latest the whole model
        try:
            draft = attempt_capture(model_with_loss, leaves, leaf_notes, functions=functions)
        except NotCaptured as fault:
            path, why = fault.path, f"{fault.reason}{format_line(fault.line)}"
            if any(not path or is_inside(effect.path, path) for effect in draws):
                return None
            if abstract:
                raise PolylaneError(f"{path or 'the model'} cannot be captured on the meta device: {why}") from fault
            if fault.data_decides and model_with_loss.tracing.answer_questions(leaves):
                continue
            if path is None:  # export failed after the forward, for what some module has left behind
                path = next(iter(_find_culprits(model_with_loss, leaves, list(leaf_notes), "")), "")
        else:
            _attach_effects(draft, dry)
            difference = None if abstract else run_self_check(model_with_loss, draft, leaves)
            if difference is None:
                return replace(draft, notes=describe_leaves(model_with_loss, leaf_notes))
            if draws:
                return None
            path, why = _find_faulty_module(model_with_loss, draft, leaves, leaf_notes, difference)
        while path and path in leaf_notes:  # already a leaf and still failing: make its parent the leaf
            path = path.rpartition(".")[0]
        if not path:
            return _capture_opaque(model_with_loss, leaves, dry, why)
        # A leaf contains its submodules: drop those that were leaves by themselves.
        leaf_notes = {leaf_path: note for leaf_path, note in leaf_notes.items() if not leaf_path.startswith(f"{path}.")}
        leaf_notes[path] = f"{path} is a leaf, kept whole: {why}"


def _modules_with_effects(effects: Sequence[SideEffect]) -> dict[str, str]:
    """Return the modules that do more than compute, and why each is a leaf; key "" for model and loss together."""
    paths = sorted({effect.path for effect in effects})
    outermost = [p for p in paths if not any(is_inside(p, outer) for outer in paths if outer != p)]
    reasons = {p: "; ".join(effect.describe for effect in effects if is_inside(effect.path, p)) for p in outermost}
    return {path: f"{path} is a leaf, kept whole: it {why}" if path else why for path, why in reasons.items()}


def _attach_effects(draft: CaptureAttempt, dry: DryRun) -> None:
    """Set on every leaf what it does besides computing, and whether it may differentiate something itself."""
    for node in draft.graph.nodes:
        if isinstance(node.target, LeafCall):
            node.target.effects = tuple(e for e in dry.effects.found if is_inside(e.path, node.target.path))
            node.target.takes_gradients = dry.takes_gradients


def describe_leaves(model_with_loss: ModelWithLoss, leaf_notes: dict[str, str]) -> tuple[str, ...]:
    parameters = model_with_loss.named_tensors("parameters")
    empty = ", ".join(name for name, tensor in parameters if tensor.requires_grad and not tensor.numel())
    nothing = f"nothing is trained of parameters without elements (a width of 0?): {empty}"
    return (*leaf_notes.values(), *([nothing] if empty else []))


def run_self_check(
    model_with_loss: ModelWithLoss,
    draft: CaptureAttempt,
    leaves: Sequence[Any],
    other_batches: Sequence[Sequence[Any]] = (),
) -> Difference | None:
    # One sample, and sizes for which export itself says that the code takes another branch.
    sizes = sorted({1, *draft.refused_sizes[:3], *draft.refused_sizes[-1:]})
    noted = _watch_random(draft.graph)  # before settings are around the functions
    wrap_autocast(draft.graph)
    try:
        opened = None if draft.opened is None else draft.opened.sizes
        graph, constants, readings = draft.graph, draft.constants, draft.readings
        # What the user's functions draw is noted of the host's generators.
        device = None if noted else model_with_loss.check_device
        return self_check.first_difference(
            model_with_loss, graph, constants, leaves, sizes, opened, other_batches, readings, device
        )
    finally:
        unwrap_autocast(draft.graph)
        for node, target in noted.items():
            node.target = target


def _watch_random(graph: fx.Graph) -> dict[fx.Node, FunctionCall]:
    """Wrap custom functions so that they record, during the self-check, whether they draw random numbers."""

    def noting(function: FunctionCall) -> Any:
        def run(part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
            old_states = generator_states()
            result = function(part, tensors)
            function.random = function.random or not states_equal(old_states, generator_states())
            return result

        run.__module__, run.__name__ = "polylane", function.__name__
        return run

    noted = {node: node.target for node in graph.nodes if isinstance(node.target, FunctionCall)}
    for node, function in noted.items():
        node.target = noting(function)
    return noted


def attempt_capture(
    model_with_loss: ModelWithLoss,
    leaves: Sequence[Any],
    paths: Collection[str],
    dims: Collection[tuple[int, int]] = (),
    functions: Sequence[FunctionType] = (),
) -> CaptureAttempt:
    with ExitStack() as stack:  # on exit the model is restored first, then the call sites are forgotten
        stack.callback(forget_sites)
        stack.enter_context(model_restored(model_with_loss))
        if paths or functions:
            modules = {path: model_with_loss.model.get_submodule(path) for path in paths}
            runs = _observe_two_sizes(model_with_loss, modules, leaves, functions)
            stack.enter_context(leaves_kept(modules, [(n, calls) for n, (calls, _) in runs], model_with_loss.tracing))
            stack.enter_context(
                functions_drawn(functions, [(n, results) for n, (_, results) in runs], model_with_loss.tracing)
            )
        program = export(model_with_loss, leaves, dims)
        graph, constants = rewrite.copy_with_roles(program)
        part = rewrite.add_slice_input(graph)
        rewrite.inline_sites(graph, part)
    # The checks that export inserted say for which sizes the code holds; read them before they are dropped.
    opened = find_open_sizes(program, graph, leaves) if dims else None
    symbols, nominal = ((), {}) if opened is None else (opened.symbols, opened.nominal)
    lowest, highest = allowed_sizes(program, symbols)
    refused = refused_sizes(graph, lowest, highest, 2 * sample_count(leaves), nominal)
    rewrite.drop_assertions(graph)
    refuse_unfit_operators(graph)
    compute_sizes_locally(graph, part, symbols, () if opened is None else opened.sizes.nominal)
    rewrite.merge_tied(graph, model_with_loss.tied)
    copy_what_is_read(graph)
    memory_groups = functionalize_writes(graph)
    shared = {node for group in memory_groups for node in group}
    relax_views(graph, shared)
    if model_with_loss.request is not None:
        merge_repeated(graph, shared)
    if expand_gradients(graph, constants, memory_groups):
        compute_sizes_locally(graph, part, symbols, () if opened is None else opened.sizes.nominal)
    repeat_moves(graph, model_with_loss, leaves)
    graph.lint()
    readings = model_with_loss.tracing.readings
    return CaptureAttempt(graph, constants, memory_groups, refused, lowest == highest, opened=opened, readings=readings)


_Observed = tuple[ObservedCalls, ObservedResults]


def _observe_two_sizes(
    model_with_loss: ModelWithLoss,
    modules: dict[str, nn.Module],
    leaves: Sequence[Any],
    functions: Sequence[FunctionType],
) -> list[tuple[int, _Observed]]:
    """Return two batch sizes, each with what is called at that size; one size twice if no other works."""
    subset = take_first_samples(leaves, self_check.FEW)  # small sizes first: they are cheaper
    samples = sample_count(subset)
    other_batch = self_check.other_batch(subset) if samples > 2 else self_check.resize_batch(subset, 2 * samples)
    runs: dict[int, _Observed] = {}
    for batch in (subset, other_batch, leaves, self_check.other_batch(leaves)):
        if len(runs) < 2 and sample_count(batch) not in runs:
            # Some losses fail on some numbers of samples: two that run are enough.
            with suppress(NotCaptured):
                runs[sample_count(batch)] = _observe_once(model_with_loss, modules, batch, functions)
    return (list(runs.items()) * 2)[:2]


def _observe_once(
    model_with_loss: ModelWithLoss,
    modules: dict[str, nn.Module],
    leaves: Sequence[Any],
    functions: Sequence[FunctionType] = (),
) -> _Observed:
    calls: ObservedCalls = {}

    def run() -> None:
        calls.update(observe_calls(modules, lambda: model_with_loss(*leaves), needed))

    try:  # with gradients where it needs them: a tensor without any refuses hooks
        needed = not self_check.runs_without_gradients(model_with_loss, leaves)
        with model_restored(model_with_loss):
            results = observe_functions(functions, run)
    except Exception as error:  # the user's Python runs here: it may raise anything
        raise NotCaptured.of(model_with_loss.model, error) from error
    return calls, results


def _find_faulty_module(
    model_with_loss: ModelWithLoss,
    draft: CaptureAttempt,
    leaves: Sequence[Any],
    leaf_notes: dict[str, str],
    difference: Difference,
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
    if not path or path in leaf_notes:
        path = next(iter(_find_culprits(model_with_loss, leaves, list(leaf_notes), "")), "")
    line = source_line_of(type(model_with_loss.model.get_submodule(path)).forward) if path else ""
    return path, f"{why}{format_line(line)}"


def _passes_self_check(model_with_loss: ModelWithLoss, leaves: Sequence[Any], paths: Sequence[str]) -> bool:
    if not paths:
        return False
    try:
        return run_self_check(model_with_loss, attempt_capture(model_with_loss, leaves, paths), leaves) is None
    except NotCaptured:  # these leaves are not enough, and the search goes on with others
        return False


def _find_culprits(model_with_loss: ModelWithLoss, leaves: Sequence[Any], paths: list[str], prefix: str) -> list[str]:
    """Return the innermost modules within ``prefix`` that must be leaves for the self-check; [prefix] if it is one."""
    children = [path for path in _called_children(model_with_loss, leaves, prefix) if path not in paths]
    if not children or not _passes_self_check(model_with_loss, leaves, [*paths, *children]):
        return [prefix]
    needed = _minimize_leaves(model_with_loss, leaves, paths, children)
    result: list[str] = []
    for path in needed:
        result += _find_culprits(model_with_loss, leaves, [*paths, *(child for child in needed if child != path)], path)
    return result


def _minimize_leaves(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], paths: list[str], candidates: list[str]
) -> list[str]:
    """Return a minimal subset of ``candidates`` that is needed as leaves (delta debugging, Zeller)."""
    if len(candidates) == 1:
        return candidates
    half = len(candidates) // 2
    first, second = candidates[:half], candidates[half:]
    for part in (first, second):
        if _passes_self_check(model_with_loss, leaves, [*paths, *part]):
            return _minimize_leaves(model_with_loss, leaves, paths, part)
    needed = _minimize_leaves(model_with_loss, leaves, [*paths, *second], first)  # neither half suffices alone
    return needed + _minimize_leaves(model_with_loss, leaves, [*paths, *needed], second)


def _called_children(model_with_loss: ModelWithLoss, leaves: Sequence[Any], prefix: str) -> list[str]:
    """Return the nearest modules within ``prefix`` that are called in a run; a ModuleList, say, is not called."""
    modules = {
        path: m
        for path, m in model_with_loss.model.named_modules()
        if path and path.startswith(f"{prefix}." if prefix else "")
    }
    called = [path for path, calls in _observe_once(model_with_loss, modules, leaves)[0].items() if calls]
    return [path for path in called if not any(path.startswith(f"{outer}.") for outer in called)]


def _capture_opaque(model_with_loss: ModelWithLoss, leaves: Sequence[Any], dry: DryRun, why: str) -> CaptureAttempt:
    """Return model and loss as one leaf: the user's Python runs on every worker."""
    model_with_loss.tracing.tape = None  # it draws its own numbers
    call = opaque_call(model_with_loss, leaves, dry.results, dry)
    call.source, call.effects = source_line_of(model_with_loss.loss_function), dry.effects.found
    call.takes_gradients = dry.takes_gradients
    graph, inputs, tied, opened = fx.Graph(), list[fx.Node](), model_with_loss.tied, symbolic_inputs(leaves)
    part = rewrite.add_slice_input(graph)

    def add_input(name: str, role: tuple[str, Any], val: Tensor) -> None:
        inputs.append(graph.placeholder(name))
        inputs[-1].meta |= {"role": role, "val": val}

    # Placeholders in the order in which LeafCall takes its tensors: parameters, buffers, then tensors of the batch.
    for kind in ("parameter", "buffer"):
        for name, tensor in model_with_loss.named_tensors(f"{kind}s"):
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
