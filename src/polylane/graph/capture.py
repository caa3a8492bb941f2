"""Model and loss -> Graph: torch.export where it holds, opaque leaves where it does not, and the reason either way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.graph import rewrite
from polylane.graph.batch import flatten, promoted, sample_count
from polylane.graph.check import resized
from polylane.graph.describe import describe, free_nodes, gradients, label_nodes
from polylane.graph.draft import Draft, DryRun, draft_with_leaves, dry_run
from polylane.graph.effects import Effects
from polylane.graph.export import Loss, Whole, snapshot
from polylane.graph.graph import Code, Graph, TensorInfo
from polylane.graph.keying import key_the_random
from polylane.graph.precision import cast, promote, wrap_autocast
from polylane.graph.statistics import share_statistics
from polylane.graph.work import DTYPE_NAMES


def capture(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    trainable: Collection[str] | None = None,
    training: bool = True,
    in_float64: bool = False,
    which: str = "the example batch",
    effects: Effects | None = None,
) -> Graph:
    """Capture ``loss(model, batch)`` as one flat graph that holds for any number of samples.

    Args:
        model: unchanged by this, whatever happens.
        loss: ``loss(model, batch)``, a scalar mean over the batch or a :class:`polylane.Mean`.
        batch: an example; tensors whose first dimension is the number of samples are split with them.
        trainable: names of the parameters to differentiate; default: all that require a gradient.
        training: capture the training or the evaluation mode.
        effects: of the same model in another mode: who keeps state there is a leaf here, too, and finds it.
        in_float64: let casts to a lower floating type inside keep float64; ``model`` and ``batch`` are float64 already.
        which: what errors call the batch.

    Raises:
        PolylaneError: the loss itself fails, or does not return what it should.
    """
    given, rebuild = flatten(batch)
    leaves = _two_samples(given)
    whole = Whole(model, loss, rebuild)
    with _as_it_was(whole, training):
        abstract = any(p.is_meta for p in model.parameters())
        if abstract:
            leaves = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with ExitStack() as stack:
            if in_float64:  # as the user's code expects it; the graph is promoted afterwards
                stack.enter_context(cast(whole, torch.float32))
                leaves = promoted(leaves, torch.float32)
            dry = dry_run(whole, leaves, abstract, which)
            if effects is not None:
                dry = replace(dry, effects=dry.effects.with_those_of(effects))
            draft, notes = draft_with_leaves(whole, leaves, dry, abstract)
        return _finish(whole, draft, dry, notes, sample_count(leaves), trainable, in_float64)


def _two_samples(leaves: Sequence[Any]) -> list[Any]:
    """An example of one sample says nothing about which sizes follow the batch: let it be two."""
    if sample_count(leaves) > 1:
        return list(leaves)
    return resized(leaves, 2)


@contextmanager
def _as_it_was(whole: Whole, training: bool) -> Iterator[None]:
    """Train or eval mode for the while, and everything about the model as it was afterwards.

    Modules that the user froze in eval mode inside a training model stay so.
    """
    restore = snapshot(whole)
    try:
        whole.training = training
        if whole.model.training != training:
            whole.model.train(training)
        yield
    finally:
        restore()


def _finish(
    whole: Whole,
    draft: Draft,
    dry: DryRun,
    notes: Sequence[str],
    samples: int,
    trainable: Collection[str] | None,
    in_float64: bool,
) -> Graph:
    graph, constants = draft.graph, draft.constants
    rewrite.drop_dead(graph)
    label_nodes(graph)
    if in_float64:
        promote(graph, constants)
    part = next(node for node in graph.nodes if node.op == "placeholder")
    random, keyless = key_the_random(graph, part, lambda node: str(node.meta["name"]))
    statistics = share_statistics(graph, part)
    wrap_autocast(graph)
    graph.lint()
    results: Any = graph.output_node().args[0]
    tied = whole.tied
    info = {name: _info(p) for name, p in whole.named_tensors("parameters") if name not in tied}
    if trainable is not None:
        info = {name: TensorInfo(i.shape, i.dtype, i.bytes, name in trainable) for name, i in info.items()}
    nodes, uncut = _described(graph, draft.together, {name for name, i in info.items() if i.trainable})
    return Graph(
        nodes=nodes,
        parameters=info,
        tied=tied,
        buffers={name: _info(b) for name, b in whole.named_tensors("buffers") if name not in tied},
        samples=samples,
        uncut=uncut,
        notes=(*notes, *keyless),
        mean=dry.mean,
        opaque=draft.opaque,
        code=Code(graph, constants, dry.leaves, random, statistics, dry.effects),
        outputs=tuple(str(node.meta["name"]) for node in results if node.op == "call_function"),
    )


def _described(graph: fx.Graph, together: Sequence[Sequence[fx.Node]], trainable: set[str]) -> tuple[Any, Any]:
    alive = set(graph.nodes)
    groups = [[node for node in group if node in alive] for group in together]
    written = {node for group in groups for node in group}
    written |= {
        n for node in written for n in node.all_input_nodes if n.op == "placeholder" and n.meta["role"][0] == "buffer"
    }
    nodes = describe(graph, gradients(graph, trainable, groups), free_nodes(graph, written))
    position = {node.id: i for i, node in enumerate(nodes)}
    spans = [[position[node.name] for node in group if node.name in position] for group in groups]
    return nodes, tuple(sorted({(min(span), max(span)) for span in spans if len(span) > 1}))


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(
        tuple(tensor.shape),
        DTYPE_NAMES[tensor.dtype],
        tensor.numel() * tensor.element_size(),
        bool(tensor.requires_grad),
    )
