"""Model and loss -> Graph: torch.export where it holds, opaque leaves where it does not, and the reason either way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph import rewrite
from polylane.graph.batch import flatten, sample_count
from polylane.graph.check import Difference, first_difference, other_batch
from polylane.graph.describe import describe, free_nodes, gradients, label_nodes
from polylane.graph.export import Loss, NotCaptured, Whole, export, snapshot
from polylane.graph.graph import Code, Graph, TensorInfo
from polylane.graph.opaque import LeafCall, Output, leaves_kept, observe
from polylane.graph.statistics import share_statistics
from polylane.graph.work import DTYPE_NAMES

Draft = tuple[fx.Graph, dict[str, Tensor], bool]  # code, constants, loss is a scalar mean


def capture(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    trainable: Collection[str] | None = None,
    training: bool = True,
    in_float64: bool = False,
) -> Graph:
    """Capture ``loss(model, batch)`` as one flat graph that holds for any number of samples.

    Args:
        model: unchanged by this, whatever happens.
        loss: ``loss(model, batch)``, a scalar mean over the batch or a :class:`polylane.Mean`.
        batch: an example; tensors whose first dimension is the number of samples are split with them.
        trainable: names of the parameters to differentiate; default: all that require a gradient.
        training: capture the training or the evaluation mode.
        in_float64: let casts to a lower floating type inside keep float64 (``model`` and ``batch`` are float64 already).

    Raises:
        PolylaneError: the loss itself fails, or does not return what it should.
    """
    leaves, rebuild = flatten(batch)
    leaves = _two_samples(leaves)
    whole = Whole(model, loss, rebuild)
    with _mode(model, training):
        abstract = any(p.is_meta for p in model.parameters())
        draft, notes, opaque = _draft_with_leaves(whole, leaves, abstract)
    return _finish(whole, draft, notes, opaque, leaves, trainable, in_float64)


def _two_samples(leaves: Sequence[Any]) -> list[Any]:
    """An example of one sample says nothing about which sizes follow the batch: let it be two."""
    if sample_count(leaves) > 1:
        return list(leaves)
    return [torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else leaf for leaf in leaves]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode for the while; modules that the user froze in eval mode inside a training model stay so."""
    flags = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _draft_with_leaves(whole: Whole, leaves: Sequence[Any], abstract: bool) -> tuple[Draft, list[str], bool]:
    """Export, turning what cannot be captured into leaves, until the self-check holds."""
    paths: list[str] = []
    notes: list[str] = []
    while True:
        try:
            draft = _draft(whole, leaves, paths)
        except NotCaptured as fault:
            _check_loss_runs(whole, leaves, fault, abstract)
            if not fault.path or fault.path in paths:
                notes.append(f"the model is opaque, without a graph: {fault.reason} ({fault.line})")
                return _opaque_draft(whole, leaves), notes, True
            paths.append(fault.path)
            notes.append(f"{fault.path} is a leaf, kept whole: {fault.reason} ({fault.line})")
            continue
        difference = None if abstract else first_difference(whole, *draft[:2], leaves)
        if difference is None:
            return draft, notes, False
        at = _module_at_fault(whole, leaves, paths, difference)
        if at is None:
            notes.append(f"the model is opaque, without a graph: captured, {difference.what} came out different")
            return _opaque_draft(whole, leaves), notes, True
        paths.append(at)
        notes.append(f"{at} is a leaf, kept whole: captured, {difference.what} came out different")


def _check_loss_runs(whole: Whole, leaves: Sequence[Any], fault: NotCaptured, abstract: bool) -> None:
    """A loss that fails by itself is the user's error, not a limit of capture."""
    if abstract:
        raise PolylaneError(f"{fault.path or 'the model'} cannot be captured on the meta device: {fault.reason} ({fault.line})")
    restore = snapshot(whole)
    try:
        with torch.no_grad():
            whole(*leaves)
    except Exception as error:
        raise PolylaneError(f"loss(model, batch) fails on the example batch: {type(error).__name__}: {error} ({fault.line})") from error
    finally:
        restore()


def _draft(whole: Whole, leaves: Sequence[Any], paths: Sequence[str]) -> Draft:
    with ExitStack() as stack:
        if paths:
            modules = {path: whole.model.get_submodule(path) for path in paths}
            other = other_batch(leaves) if sample_count(leaves) > 2 else [_doubled(leaf, sample_count(leaves)) for leaf in leaves]
            observed = (_observed(whole, modules, leaves), _observed(whole, modules, other))
            samples = (sample_count(leaves), sample_count(other))
            stack.enter_context(leaves_kept(modules, observed, samples, lambda: whole.samples))
        program = export(whole, leaves)
    graph, constants = rewrite.copy_with_roles(program)
    rewrite.drop_assertions(graph)
    part = _add_part(graph)
    rewrite.open_the_sites(graph, part)
    rewrite.free_the_sizes(graph, part)
    rewrite.wrap_autocast(graph)
    graph.lint()
    return graph, constants, whole.mean


def _doubled(leaf: Any, samples: int) -> Any:
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples else leaf


def _observed(whole: Whole, modules: dict[str, nn.Module], leaves: Sequence[Any]) -> Any:
    restore = snapshot(whole)
    try:
        return observe(modules, lambda: whole(*leaves))
    finally:
        restore()


def _add_part(graph: fx.Graph) -> fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        part = graph.placeholder("part")
    part.meta["role"] = ("part", 0)
    return part


def _module_at_fault(whole: Whole, leaves: Sequence[Any], paths: Sequence[str], difference: Difference) -> str | None:
    """The innermost module whose being a leaf makes the self-check hold.

    A changed buffer names its module at once; else the tree is searched from the top, one capture for each candidate.
    """
    if difference.buffer is not None and (owner := difference.buffer.rpartition(".")[0]):
        return owner if owner not in paths else None

    def holds(path: str) -> bool:
        try:
            graph, constants, _ = _draft(whole, leaves, [*paths, path])
            return first_difference(whole, graph, constants, leaves) is None
        except Exception:
            return False

    found, prefix = None, ""
    while True:
        module = whole.model.get_submodule(prefix)
        children = [f"{prefix}.{name}".lstrip(".") for name, _ in module.named_children()]
        inner = next((child for child in children if child not in paths and holds(child)), None)
        if inner is None:
            return found
        found = prefix = inner


def _opaque_draft(whole: Whole, leaves: Sequence[Any]) -> Draft:
    """The whole model and loss as one leaf: the user's Python runs on every worker."""
    restore = snapshot(whole)
    with torch.no_grad():
        results = whole(*leaves)
    restore()
    names = [name for name, _ in whole.named_parameters()]
    tensor_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = LeafCall(
        module=whole,
        path="",
        names=names,
        arguments=[None if i in tensor_at else leaf for i, leaf in enumerate(leaves)],
        tensor_at=tensor_at,
        rebuild_arguments=lambda flat: (tuple(flat), {}),
        outputs=[Output((), (), value.dtype) for value in results],
        result=[None] * len(results),
        output_at=list(range(len(results))),
        rebuild_result=tuple,
    )
    graph = fx.Graph()
    part = graph.placeholder("part")
    part.meta["role"] = ("part", 0)
    own, given = [], []
    for name, parameter in whole.named_parameters():
        own.append(graph.placeholder("p_" + name.replace(".", "_")))
        own[-1].meta |= {"role": ("parameter", name.removeprefix("model.")), "val": parameter}
    for name, buffer in whole.named_buffers():
        node = graph.placeholder("b_" + name.replace(".", "_"))
        node.meta |= {"role": ("buffer", name.removeprefix("model.")), "val": buffer}
    for i in tensor_at:
        given.append(graph.placeholder(f"leaves_{i}"))
        given[-1].meta |= {"role": ("input", i), "val": leaves[i]}
    node = graph.call_function(call, (part, own + given))
    node.meta["val"] = list(results)
    outputs = []
    for i, value in enumerate(results):
        outputs.append(graph.call_function(operator.getitem, (node, i)))
        outputs[-1].meta["val"] = value
    graph.output(tuple(outputs))
    return graph, {}, whole.mean


def _finish(
    whole: Whole,
    draft: Draft,
    notes: Sequence[str],
    opaque: bool,
    leaves: Sequence[Any],
    trainable: Collection[str] | None,
    in_float64: bool,
) -> Graph:
    graph, constants, mean = draft
    tied = _tied_names(whole)
    _merge_tied(graph, tied)
    together = rewrite.values_not_places(graph)
    rewrite.drop_dead(graph)
    label_nodes(graph)
    if in_float64:
        rewrite.promote(graph, constants)
    part = next(node for node in graph.nodes if node.op == "placeholder")
    random = rewrite.key_the_random(graph, part, lambda node: str(node.meta["name"]))
    statistics = share_statistics(graph, part)
    graph.lint()
    info = {name: _info(p) for name, p in _named(whole, "parameters") if name not in tied}
    if trainable is not None:
        info = {name: TensorInfo(i.shape, i.dtype, i.bytes, i.trainable and name in trainable) for name, i in info.items()}
    alive = {node for node in graph.nodes}
    groups = [[node for node in group if node in alive] for group in together]
    written = {node for group in groups for node in group}
    written |= {n for node in written for n in node.all_input_nodes if n.op == "placeholder" and n.meta["role"][0] == "buffer"}
    flows = gradients(graph, {name for name, i in info.items() if i.trainable})
    nodes = describe(graph, flows, free_nodes(graph, written))
    position = {node.id: i for i, node in enumerate(nodes)}
    spans = [[position[node.name] for node in group if node.name in position] for group in groups]
    return Graph(
        nodes=nodes,
        parameters=info,
        tied=tied,
        buffers={name: _info(b) for name, b in _named(whole, "buffers") if name not in tied},
        samples=sample_count(leaves),
        uncut=tuple(sorted({(min(span), max(span)) for span in spans if len(span) > 1})),
        notes=tuple(notes),
        mean=mean,
        opaque=opaque,
        code=Code(graph, constants, len(leaves), random, statistics),
    )


def _named(whole: Whole, what: str) -> list[tuple[str, Tensor]]:
    every: Callable[..., Any] = getattr(whole, f"named_{what}")
    return [(name.removeprefix("model."), tensor) for name, tensor in every(remove_duplicate=False)]


def _tied_names(whole: Whole) -> dict[str, str]:
    """Second and later names of a tensor -> its first."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in _named(whole, "parameters") + _named(whole, "buffers"):
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied


def _merge_tied(graph: fx.Graph, tied: dict[str, str]) -> None:
    seen: dict[tuple[str, Any], fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        kind, key = node.meta["role"]
        node.meta["role"] = role = (kind, tied.get(key, key) if isinstance(key, str) else key)
        if role in seen:
            node.replace_all_uses_with(seen[role])
            graph.erase_node(node)
        else:
            seen[role] = node


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(
        tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.numel() * tensor.element_size(), bool(tensor.requires_grad)
    )


