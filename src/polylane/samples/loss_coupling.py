"""May a batch be divided? Decided by what is derived of the graph; never by how one batch happens to look.

Three answers: its parts' losses make up its loss (replicas and microbatches compute what one device computes); samples
meet (replicas then split the operators, and hold the microbatch as one); or it is refused, in a sentence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

from polylane.errors import PolylaneError
from polylane.graph.capture.export import format_line
from polylane.graph.graph import Graph, Node
from polylane.samples.derivation import Derivation, derive_composition

OWN_PYTHON = ("leaf", "function")


def loss_couples_samples(
    graph: Graph,
    microbatches: int,
    replicas: int,
    per_sample: Collection[str] = (),
    seen: Callable[[], str | None] = lambda: None,
    sync: str = "",
) -> bool:
    """Whether a batch must be computed on as a whole: replicas then have to split the operators.

    Args:
        graph: captured, with counts of the whole batch (:func:`polylane.samples.counts.count_whole_batch`).
        microbatches, replicas: into how many parts batches are divided.
        per_sample: modules that run the user's own Python and treat each sample by itself, as the user says.
        seen: computes a batch whole and in parts, and says what differs, or None; asked only about the user's own
            Python, to refuse what the user says wrongly.
        sync: the rule by which replicas agree, where it is not a sum of gradients: it divides every batch.

    Raises:
        PolylaneError: so it is, and there are microbatches.
    """
    if microbatches == 1 and replicas == 1:
        return False
    check_per_sample_names(graph, per_sample)
    derived = derive_composition(graph, per_sample)
    if derived.is_proven and derived.unproven:
        told = seen()
        if told is not None:
            raise PolylaneError(f"per_sample={'+'.join(per_sample)} does not hold: {told}")
    reason = None if derived.is_proven else explain_coupling(graph, derived)
    if reason is not None and microbatches > 1:
        parts = f"microbatches={microbatches}"
        raise PolylaneError(f"{parts} would not compute what one device computes: {reason}; {_suggest_remedy(derived)}")
    if reason is not None and derived.culprit is not None and derived.culprit.op in OWN_PYTHON:
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
    """See that batches of a form that comes in mid-training may be divided, where those of the first form are.

    Raises:
        PolylaneError: their samples meet.
    """
    if microbatches == 1 and replicas == 1:
        return
    derived = derive_composition(graph, per_sample)
    if not derived.is_proven:
        raise PolylaneError(
            f"batches of this form cannot be divided as the example is: {explain_coupling(graph, derived)}; "
            "use data=1 and "
            "microbatches=1"
        )
    _refuse_counters(derived, microbatches)


def _refuse_counters(derived: Derivation, microbatches: int) -> None:
    if microbatches > 1 and derived.counters:
        name, node = derived.counters[0]
        raise PolylaneError(
            f"microbatches={microbatches} would not compute what one device computes: {node.name} writes the buffer "
            f"{name} once for each microbatch{format_line(node.source)}, and not once for a batch; use microbatches=1"
        )


def check_per_sample_names(graph: Graph, per_sample: Collection[str]) -> None:
    """Refuse names of modules that run none of the user's own Python.

    Raises:
        PolylaneError: with those that do.
    """
    own = sorted({node.module or "model" for node in graph.nodes if node.op in OWN_PYTHON})
    for name in per_sample:
        inside = [path for path in own if name == "model" or path == name or path.startswith(f"{name}.")]
        if not inside:
            which = f"these do: {', '.join(own)}" if own else "nothing does: leave per_sample out"
            raise PolylaneError(f"per_sample={name}: no module of that name is kept as your own Python; {which}")


def explain_coupling(graph: Graph, derived: Derivation) -> str:
    """Why the parts of a batch do not make up its loss, as a sentence without its end."""
    if derived.culprit is None:
        assert derived.buffer is not None
        name, node = derived.buffer
        return (
            f"the buffer {name} depends on how the samples are divided: {node.name} writes "
            f"it{format_line(node.source)}, and "
            "replicas would disagree"
        )
    node = derived.culprit
    where = f"{_describe_place(node)}{format_line(node.source)}"
    if node.op in OWN_PYTHON:
        return f"{node.name} {where} runs your own Python, and nothing shows that it treats each sample by itself"
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


def _describe_place(node: Node) -> str:
    if node.module in ("", "loss"):
        return "in the loss" if node.module else "in the model"
    return f"in {node.module}"


def _suggest_per_sample(name: str) -> str:
    return f"if it does, say so with per_sample={name} in the plan, and it is divided, and watched"


def _suggest_remedy(derived: Derivation) -> str:
    """What the user can do."""
    node = derived.culprit
    if node is not None and node.op in OWN_PYTHON:
        return f"{_suggest_per_sample(node.module or 'model')}; else use microbatches=1"
    if node is not None and not node.shape:
        return "return a mean over the samples or polylane.Mean(total, count) from loss, or use microbatches=1"
    return "use microbatches=1"
