"""Graph capture: torch.export where it holds, opaque leaves where it does not, and the reason in the graph's notes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.graph.batch import cast_leaves, flatten, sample_count
from polylane.graph.capture import inline as rewrite
from polylane.graph.capture.assign_keys import key_random_operators
from polylane.graph.capture.attempt import CaptureAttempt, capture_with_leaves
from polylane.graph.capture.carried_leaves import find_carried_leaves
from polylane.graph.capture.describe_nodes import describe_nodes, find_gradient_flow, label_nodes, recomputable_nodes
from polylane.graph.capture.dry_run import DryRun, dry_run, run_forward
from polylane.graph.capture.export import Loss, ModelWithLoss, model_restored
from polylane.graph.capture.open_capture import capture_opened
from polylane.graph.capture.open_dimensions import Opening
from polylane.graph.capture.output_request import OutputRequest
from polylane.graph.capture.python.checkpoints import find_checkpoints
from polylane.graph.capture.self_check import resize_batch
from polylane.graph.flops import DTYPE_NAMES
from polylane.graph.graph import Code, Graph, TensorInfo
from polylane.graph.operators.sync_batch_norm import sync_batch_norms
from polylane.graph.precision import LiteralRecorder, cast_module, promote_to_float64, wrap_autocast
from polylane.graph.python_state.autograd_engine import start_autograd_engine
from polylane.graph.python_state.side_effects import SideEffects
from polylane.graph.readings.asked_draws import StepDraws


def capture(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    trainable: Collection[str] | None = None,
    training: bool = True,
    in_float64: bool = False,
    batch_name: str = "the example batch",
    effects: SideEffects | None = None,
    opening: Opening | None = None,
    asks: bool = False,
    draws: StepDraws | None = None,
    check_device: torch.device | None = None,
    outputs: OutputRequest | None = None,
) -> Graph:
    """Capture ``loss(model, batch)`` as one flat graph that holds for any number of samples.

    Args:
        model: the user's model; unchanged afterwards, also on errors.
        loss: ``loss(model, batch)``, a scalar mean over the batch or a :class:`polylane.Mean`.
        batch: an example; tensors whose first dimension is the number of samples are divided with them.
        trainable: names of the parameters to differentiate; default: all that require a gradient.
        training: capture the training or the evaluation mode.
        in_float64: let casts to a lower floating type inside keep float64; ``model`` and ``batch`` are float64 already.
        batch_name: name of the batch in error messages.
        effects: effects seen in another mode of the same model: a module that keeps state there is a leaf here, too.
        opening: sizes other than the number of samples that are to be left open; default: none.
        asks: whether it is known that the loss asks about values of its batch (see readings/batch_readings.py).
        draws: numbers of the step for which it is captured, where they decide which way it goes; None: for no one.
        check_device: device on which the captured code is held against the model, if both run there; None: the model's.
        outputs: what is asked for beside the loss, in the same pass; None: nothing.

    Raises:
        NotOpened: the sizes of ``opening`` cannot be left open.
        PolylaneError: the loss itself fails, or does not return a loss.
    """
    model_with_loss, leaves, abstract = _combine(model, loss, batch, draws, outputs)
    model_with_loss.check_device, literals = check_device, LiteralRecorder()
    with _in_mode(model_with_loss, training):
        if in_float64:  # the user's code runs in its own precision; the graph is promoted afterwards
            leaves = cast_leaves(leaves, torch.float32)
        with cast_module(model_with_loss, torch.float32) if in_float64 else nullcontext():
            with literals if in_float64 else nullcontext():
                dry = dry_run(model_with_loss, leaves, abstract, batch_name)
            if asks:
                model_with_loss.tracing.answer_questions(leaves)
            dry = dry if effects is None else replace(dry, effects=dry.effects.merged_with(effects))
            model_with_loss.carried = find_carried_leaves(model_with_loss, leaves, batch, dry.effects.functions_run)
            if opening is None:
                draft = capture_with_leaves(model_with_loss, leaves, dry, abstract)
            else:
                opening = _in_float32(opening) if in_float64 else opening
                draft = capture_opened(model_with_loss, leaves, dry, abstract, opening)
        # Names before rewriting: keys and plans refer to the names of the operators that the user wrote.
        rewrite.drop_dead_nodes(draft.graph)
        label_nodes(draft.graph)
        if in_float64:
            promote_to_float64(draft.graph, draft.constants, literals)
        return _finish_graph(model_with_loss, leaves, dry, draft, trainable)


def refuse_failing_loss(model: nn.Module, loss: Loss, batch: Any) -> None:
    """Run ``loss(model, batch)`` once, forward, in the dtypes that model and batch have; what fails is told as
    :func:`capture` tells it.

    Args:
        model: the user's model; unchanged afterwards.
        loss: ``loss(model, batch)``, as for :func:`capture`.
        batch: an example, of the form that the user's data have.

    Raises:
        PolylaneError: the loss fails, or does not return a loss.
    """
    model_with_loss, leaves, abstract = _combine(model, loss, batch)
    with _in_mode(model_with_loss, True):
        run_forward(model_with_loss, leaves, abstract)


def _combine(
    model: nn.Module, loss: Loss, batch: Any, draws: StepDraws | None = None, outputs: OutputRequest | None = None
) -> tuple[ModelWithLoss, list[Any], bool]:
    """Return model and loss as one module, the batch's flat leaves, and whether all of it is on the meta device."""
    leaves, rebuild = flatten(batch)
    if sample_count(leaves) < 2:  # from one sample, sizes that follow the batch cannot be told from others
        leaves = resize_batch(leaves, 2)
    abstract = any(p.is_meta for p in model.parameters())
    if not abstract:
        start_autograd_engine()
    if abstract:
        leaves = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return ModelWithLoss(model, loss, rebuild, draws, outputs), leaves, abstract


@contextmanager
def _in_mode(model_with_loss: ModelWithLoss, training: bool) -> Iterator[None]:
    """Context manager: set train or eval mode inside, and restore the whole model afterwards.

    Modules that the user froze in eval mode inside a training model stay so.
    """
    with model_restored(model_with_loss):
        model_with_loss.training = training
        if model_with_loss.model.training != training:
            model_with_loss.model.train(training)
        yield


def _finish_graph(
    model_with_loss: ModelWithLoss,
    leaves: Sequence[Any],
    dry: DryRun,
    draft: CaptureAttempt,
    trainable: Collection[str] | None,
) -> Graph:
    graph = draft.graph
    # The first placeholder is the sample slice, see add_slice_input.
    part = next(node for node in graph.nodes if node.op == "placeholder")
    random, keyless = key_random_operators(graph, part, lambda node: str(node.meta["name"]))
    statistics = sync_batch_norms(graph, part)
    wrap_autocast(graph)
    graph.lint()
    results: Any = graph.output_node().args[0]
    info = _tensor_infos(model_with_loss, "parameters")
    if trainable is not None:
        info = {name: replace(tensor_info, trainable=name in trainable) for name, tensor_info in info.items()}
    nodes, uncut = _describe_graph(graph, draft.shared_memory_groups, {name for name, i in info.items() if i.trainable})
    # An opaque part may read more in a later step.
    carried = frozenset[int]() if any(node.op == "leaf" for node in nodes) else frozenset(model_with_loss.carried)
    random = random or any(reading.is_drawn for reading in draft.readings)
    code = _make_code(draft, len(leaves), random, statistics, dry.effects)
    return Graph(
        nodes=nodes,
        parameters=info,
        tied=model_with_loss.tied,
        buffers=_tensor_infos(model_with_loss, "buffers"),
        samples=sample_count(leaves),
        unsplittable_ranges=uncut,
        notes=(*draft.notes, *keyless),
        loss_is_mean=dry.is_mean,
        is_opaque=draft.is_opaque,
        code=replace(code, carried=carried),
        outputs=tuple(str(node.meta["name"]) for node in results if node.op == "call_function"),
        checkpoints=find_checkpoints(graph),
        is_undivided=dry.is_undivided,
        output_form=dry.output_form,
    )


def _make_code(draft: CaptureAttempt, leaves: int, random: bool, statistics: bool, effects: SideEffects | None) -> Code:
    sizes, symbols = (None, ()) if draft.opened is None else (draft.opened.sizes, draft.opened.symbols)
    return Code(draft.graph, draft.constants, leaves, random, statistics, effects, sizes, symbols, draft.readings)


def _in_float32(opening: Opening) -> Opening:
    return replace(opening, others=tuple(cast_leaves(leaves, torch.float32) for leaves in opening.others))


def _describe_graph(
    graph: fx.Graph, memory_groups: Sequence[Sequence[fx.Node]], trainable: set[str]
) -> tuple[Any, Any]:
    alive = set(graph.nodes)
    groups = [[node for node in group if node in alive] for group in memory_groups]
    # A buffer that is written is state, not a constant: what is computed from it cannot be recomputed elsewhere.
    written = {node for group in groups for node in group}
    written |= {
        n for node in written for n in node.all_input_nodes if n.op == "placeholder" and n.meta["role"][0] == "buffer"
    }
    nodes = describe_nodes(graph, find_gradient_flow(graph, trainable, groups), recomputable_nodes(graph, written))
    position = {node.id: i for i, node in enumerate(nodes)}
    spans = [[position[node.name] for node in group if node.name in position] for group in groups]
    # A stage is a range of nodes: a group reaches from its first node to its last.
    return nodes, tuple(sorted({(min(span), max(span)) for span in spans if len(span) > 1}))


def _tensor_infos(model_with_loss: ModelWithLoss, kind: str) -> dict[str, TensorInfo]:
    """Describe all "parameters" or "buffers", each tied one once, under its first name."""
    tied = model_with_loss.tied
    return {
        name: TensorInfo(tuple(t.shape), DTYPE_NAMES[t.dtype], t.numel() * t.element_size(), bool(t.requires_grad))
        for name, t in model_with_loss.named_tensors(kind)
        if name not in tied
    }
