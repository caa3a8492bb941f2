"""Loss coupling: may a batch be divided? Decided by what is proven of the graph, never by sample values.

Three answers: the parts' losses make up the batch's loss (replicas and microbatches compute what one device computes);
the samples are coupled (replicas then shard the operators of the whole batch); or the plan is refused, with a reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from polylane.errors import PolylaneError
from polylane.graph.capture.export import format_line
from polylane.graph.capture.open_dimensions import NotOpened, bind_sizes, sizes_to_try
from polylane.graph.graph import Graph, is_inside
from polylane.samples.batch_layout import describe_divided_buffer, describe_place
from polylane.samples.counts import find_coupling
from polylane.samples.derivation import Derivation, derive_composition


def loss_couples_samples(
    graph: Graph,
    microbatches: int,
    replicas: int,
    per_sample: Collection[str] = (),
    seen: Callable[[], str | None] = lambda: None,
    sync: str = "",
) -> bool:
    """Return whether the loss couples samples, so that replicas must shard the operators of the whole batch.

    Args:
        graph: captured graph with whole-batch counts (:func:`polylane.samples.counts.count_whole_batch`).
        microbatches, replicas: numbers of parts into which batches are divided.
        per_sample: modules with the user's own Python that, as the user declares, treat samples independently.
        seen: runs a batch whole and in parts and explains what differs, or returns None; only called to check what
            ``per_sample`` declares.
        sync: gradient sync other than all-reduce, which needs divided batches; "" for all-reduce.

    Raises:
        PolylaneError: the samples are coupled and there are microbatches or a sync; or ``per_sample`` does not hold.
    """
    if microbatches == 1 and replicas == 1:
        return False
    check_per_sample_names(graph, per_sample)
    derived = derive_composition(graph, per_sample)
    if derived.is_proven and derived.unproven:
        told = seen()
        if told is not None:
            raise PolylaneError(f"per_sample={'+'.join(per_sample)} does not hold: {told}")
    if derived.culprit is not None and not derived.explanation and not derived.culprit.is_own_python:
        # The first operator without a proof may be a mean that counts would mend: name what they do not.
        beyond = find_coupling(graph)
        derived = derived if beyond.culprit is None else replace(derived, culprit=beyond.culprit)
    reason = None if derived.is_proven else explain_coupling(derived)
    if reason is not None and microbatches > 1:
        parts = f"microbatches={microbatches}"
        raise PolylaneError(f"{parts} would not compute what one device computes: {reason}; {_suggest_remedy(derived)}")
    if reason is not None and derived.culprit is not None and derived.culprit.is_own_python:
        # Own Python cannot be sharded by operator: it is computed in full by every replica, which the user should know.
        name = derived.culprit.module or "model"
        if sync:
            raise PolylaneError(
                f"sync ({sync}) divides every batch: {reason}; {_suggest_per_sample(name)}; else leave sync out"
            )
        warnings.warn(
            f"each replica computes {name} on the whole batch: {reason}; {_suggest_per_sample(name)}", stacklevel=2
        )
    _refuse_counters(derived, microbatches)
    return reason is not None


def refuse_coupled_samples(graph: Graph, microbatches: int, replicas: int, per_sample: Collection[str] = ()) -> None:
    """Check that batches of a new shape in mid-training may be divided as those of the first shape are.

    Raises:
        PolylaneError: the loss couples the samples of such a batch.
    """
    if microbatches == 1 and replicas == 1:
        return
    derived = derive_composition(graph, per_sample)
    if not derived.is_proven:
        raise PolylaneError(
            f"batches of this form cannot be divided as the example is: {explain_coupling(derived)}; use data=1 and "
            "microbatches=1"
        )
    _refuse_counters(derived, microbatches)


def check_open_sizes(graph: Graph, per_sample: Collection[str], others: Sequence[Sequence[Any]]) -> None:
    """Check that what is proven of a graph at the sizes from which it was captured is proven at all that it admits.

    Sizes are tried: those that have come, and some small and large ones.

    Args:
        graph: a graph with open sizes.
        per_sample: modules with the user's own Python that, as the user declares, treat samples independently.
        others: flat leaves of batches of other sizes that have come.

    Raises:
        NotOpened: how the parts of a batch make up its values depends on these sizes.
    """
    opened = graph.code.open
    assert opened is not None
    came = [sizes for each in others if (sizes := opened.find(each)) is not None]
    first = _summarize(derive_composition(graph, per_sample))
    for sizes in sizes_to_try(opened, [opened.nominal, *came]):
        if sizes != opened.nominal and _summarize(derive_composition(bind_sizes(graph, sizes), per_sample)) != first:
            raise NotOpened("how the samples make up the loss depends on these sizes")


def _summarize(derived: Derivation) -> tuple[Any, ...]:
    """Return what is proven, without the nodes of the graph that it is proven of."""
    return derived.is_proven, dict(derived.batch_layouts), [name for name, _ in derived.counters], derived.explanation


def _refuse_counters(derived: Derivation, microbatches: int) -> None:
    if microbatches > 1 and derived.counters:
        name, node = derived.counters[0]
        raise PolylaneError(
            f"microbatches={microbatches} would not compute what one device computes: {node.name} writes the buffer "
            f"{name} once for each microbatch{format_line(node.source)}, and not once for a batch; use microbatches=1"
        )


def check_per_sample_names(graph: Graph, per_sample: Collection[str]) -> None:
    """Check that all names are of modules that run the user's own Python.

    Raises:
        PolylaneError: a module runs none; the message lists those that do.
    """
    own = sorted({node.module or "model" for node in graph.nodes if node.is_own_python})
    for name in per_sample:
        if not name or not any(name == "model" or is_inside(path, name) for path in own):
            which = f"these do: {', '.join(own)}" if own else "nothing does: leave per_sample out"
            raise PolylaneError(f"per_sample={name}: no module of that name is kept as your own Python; {which}")


def explain_coupling(derived: Derivation) -> str:
    """Explain why a batch cannot be divided, as a sentence without its end."""
    if derived.culprit is None:
        assert derived.buffer is not None
        return describe_divided_buffer(*derived.buffer)
    node = derived.culprit
    where = describe_place(node)
    if node.is_own_python:
        also = f" (it {derived.effects})" if derived.effects else ""
        return f"{node.name} {where} runs your own Python{also}, and nothing shows that it treats each sample by itself"
    if derived.explanation == "fixed":
        return f"the model holds for one number of samples alone: {node.name} {where}"
    if derived.explanation == "writes in place":
        return f"{node.name} {where} writes in place what others see, and nothing shows which samples it belongs to"
    if not node.shape:
        return (
            f"the loss is not a mean over samples: {node.name} {where} does not add up over the parts of a batch, and "
            "what it counts does not follow from the inputs alone"
        )
    return (
        f"the loss is not a mean over samples: {node.name} {where} makes each sample depend on the others of its batch"
    )


def _suggest_per_sample(name: str) -> str:
    return f"if it does, say so with per_sample={name} in the plan, and it is divided, and watched"


def _suggest_remedy(derived: Derivation) -> str:
    """Return what the user can do, as the end of a sentence."""
    node = derived.culprit
    if node is not None and node.is_own_python:
        return f"{_suggest_per_sample(node.module or 'model')}; else use microbatches=1"
    if node is not None and not node.shape:
        return "return a mean over the samples or polylane.Mean(total, count) from loss, or use microbatches=1"
    return "use microbatches=1"
