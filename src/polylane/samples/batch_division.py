"""Loss coupling: may a batch be divided? Decided by what is proven of the graph, never by sample values.

Three answers: the parts' losses make up the batch's loss (replicas and microbatches compute what one device computes);
the samples are coupled (replicas then shard the operators of the whole batch); or the plan is refused, with a reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from polylane.errors import PolylaneError
from polylane.graph.capture.open_dimensions import NotOpened, bind_sizes, sizes_to_try
from polylane.graph.graph import Graph, Node
from polylane.graph.nodes.user_lines import format_line
from polylane.graph.python_state.module_paths import is_inside
from polylane.plan.options import ROUND_ROBIN
from polylane.plan.plan import AnyPlan
from polylane.samples.batch_layout import describe_divided_buffer, describe_place
from polylane.samples.counts import find_coupling
from polylane.samples.derivation import Derivation, derive_composition
from polylane.samples.leaf_effects import effects_by_module


def loss_couples_samples(
    graph: Graph,
    microbatches: int,
    replicas: int,
    per_sample: Collection[str] = (),
    find_difference: Callable[[], str | None] = lambda: None,
    local_steps: str = "",
) -> bool:
    """Return whether the loss couples samples, so that replicas must shard the operators of the whole batch.

    Plans that would then be another training are refused; and the user is warned of a module that no plan can divide.

    Args:
        graph: captured graph with whole-batch counts (:func:`polylane.samples.counts.count_whole_batch`).
        microbatches, replicas: numbers of parts into which batches are divided.
        per_sample: modules with the user's own Python that, as the user declares, treat samples independently.
        find_difference: runs a batch whole and in parts and explains what differs, or returns None; only called to
            check what ``per_sample`` declares.
        local_steps: the plan's sync where replicas take steps of their own, each on its own samples; else "".

    Raises:
        PolylaneError: the samples are coupled and there are microbatches or steps of replicas alone; or ``per_sample``
            does not hold.
    """
    if microbatches == 1 and replicas == 1:
        return False
    check_per_sample_names(graph, per_sample)
    derived = _derive_with_cause(graph, per_sample)
    if derived.is_proven:
        difference = find_difference() if derived.unproven else None
        if difference is not None:
            option = f"per_sample={'+'.join(per_sample)}"
            raise PolylaneError(f"{option} does not hold: {difference}; {suggest_no_per_sample(microbatches)}")
    else:
        _refuse_dividing(derived, microbatches, local_steps)
        _warn_of_own_python(derived)
    _refuse_counters(derived, microbatches)
    return not derived.is_proven


def _refuse_dividing(derived: Derivation, microbatches: int, local_steps: str) -> None:
    """Refuse a plan that computes parts of batches by themselves, where samples are coupled.

    Raises:
        PolylaneError: there are microbatches, or replicas take steps of their own.
    """
    reason = explain_coupling(derived)
    if microbatches > 1:
        parts = f"microbatches={microbatches}"
        raise PolylaneError(f"{parts} would not compute what one device computes: {reason}; {_suggest_remedy(derived)}")
    if local_steps:
        name = _find_declarable(derived)
        advice = "" if name is None else f"{_suggest_per_sample(name)}; else "
        key = "staleness" if "servers=" in local_steps else "every"
        raise PolylaneError(
            f"{local_steps} lets each replica take steps on samples of its own, and where samples meet that is another "
            f"loss: {reason}; {advice}leave {key} out"
        )


def _warn_of_own_python(derived: Derivation) -> None:
    """Warn of a module that every replica computes in full: the user's own Python cannot be sharded by operator."""
    node = derived.culprit
    if node is None or not node.is_own_python:
        return
    name = _find_declarable(derived)
    advice = "" if name is None else f"; {_suggest_per_sample(name)}"
    warnings.warn(
        f"each replica computes {node.module or 'model'} on the whole batch: {explain_coupling(derived)}{advice}",
        stacklevel=3,
    )


def _find_declarable(derived: Derivation) -> str | None:
    """Return the module that may be named in ``per_sample``, where it alone is what is not proven; else None."""
    node = derived.culprit
    if node is None or not node.is_own_python or not derived.is_declarable:
        return None
    return node.module or "model"


def _derive_with_cause(graph: Graph, per_sample: Collection[str]) -> Derivation:
    """Derive how parts make up a batch; the culprit, if any, is one that no count of the whole batch mends."""
    derived = derive_composition(graph, per_sample)
    plain = derived.culprit is not None and derived.culprit.op != "check" and not derived.culprit.is_own_python
    if plain and not derived.explanation:
        # The first operator without a proof may be a mean that counts would mend: name what they do not.
        beyond = find_coupling(graph)
        if beyond.culprit is not None or beyond.buffer is not None:
            derived = replace(
                derived,
                culprit=beyond.culprit,
                buffer=beyond.buffer,
                explanation=beyond.explanation,
                effects=beyond.effects,
                written=beyond.written,
                is_declarable=beyond.is_declarable,
            )
    return derived


def choose_whole_batches(spec: AnyPlan, graphs: Iterable[Graph], microbatches: int) -> int:
    """Return a number of microbatches that nobody asked for: 1, with a warning, where more would be another training.

    Args:
        spec: the plan, with what the user says of own Python.
        graphs: captured graphs of all objectives.
        microbatches: the plan's default number.

    Raises:
        PolylaneError: replicas were to compute microbatches in turn.
    """
    if microbatches == 1:
        return 1
    text = next((text for graph in graphs if (text := _explain_whole_batch(graph, spec.per_sample)) is not None), None)
    if text is None:
        return microbatches
    if spec.replicas == ROUND_ROBIN and spec.data > 1:
        raise PolylaneError(
            f"replicas={ROUND_ROBIN}: replicas compute microbatches in turn, and a batch must stay whole here: {text}; "
            "leave replicas out"
        )
    warnings.warn(f"microbatches=1, and not {microbatches}, the plan's default: {text}", stacklevel=2)
    return 1


def _explain_whole_batch(graph: Graph, per_sample: Collection[str]) -> str | None:
    """Explain why a graph's batches cannot be microbatches, and what the user may say; None if they can."""
    derived = _derive_with_cause(graph, per_sample)
    if not derived.is_proven:
        name = _find_declarable(derived)
        return explain_coupling(derived) + ("" if name is None else f"; {_suggest_per_sample(name)}")
    if derived.counters:
        return _describe_counter(*derived.counters[0])
    state = next(((module, effect) for module, effect in effects_by_module(graph) if effect.kind == "state"), None)
    return (
        None if state is None else f"{state[0]} {state[1].describe} in every call, of which one device makes one a step"
    )


def refuse_coupled_samples(graph: Graph, microbatches: int, replicas: int, per_sample: Collection[str] = ()) -> None:
    """Check that batches of a new shape in mid-training may be divided as those of the first shape are.

    Raises:
        PolylaneError: the loss couples the samples of such a batch.
    """
    if microbatches == 1 and replicas == 1:
        return
    derived = derive_composition(graph, per_sample)
    if not derived.is_proven:
        divided = {"data": replicas, "microbatches": microbatches}
        undivided = " and ".join(f"{key}=1" for key, parts in divided.items() if parts > 1)
        raise PolylaneError(
            f"batches of this form cannot be divided as the example is: {explain_coupling(derived)}; use {undivided}"
        )
    _refuse_counters(derived, microbatches)


def refuse_undividable_samples(graphs: Iterable[Graph], per_sample: Collection[str] = ()) -> None:
    """Check that it is proven of all graphs how parts of a batch make up its loss, whatever the plan divides.

    Raises:
        PolylaneError: a loss couples samples.
    """
    for graph in graphs:
        derived = _derive_with_cause(graph, per_sample)
        if not derived.is_proven:
            raise PolylaneError(f"a batch of these tensors cannot be divided: {explain_coupling(derived)}")


def check_open_sizes(graph: Graph, per_sample: Collection[str], other_batches: Sequence[Sequence[Any]]) -> None:
    """Check that what is proven of a graph at the sizes from which it was captured is proven at all that it admits.

    Sizes are tried: those that have come, and some small and large ones.

    Args:
        graph: a graph with open sizes.
        per_sample: modules with the user's own Python that, as the user declares, treat samples independently.
        other_batches: flat leaves of batches of other sizes that have come.

    Raises:
        NotOpened: how the parts of a batch make up its values depends on these sizes.
    """
    opened = graph.code.open
    assert opened is not None
    came = [sizes for batch in other_batches if (sizes := opened.find(batch)) is not None]
    summary = _summarize(derive_composition(graph, per_sample))
    for sizes in sizes_to_try(opened, [opened.nominal, *came]):
        if sizes != opened.nominal and _summarize(derive_composition(bind_sizes(graph, sizes), per_sample)) != summary:
            raise NotOpened("how the samples make up the loss depends on these sizes")


def _summarize(derived: Derivation) -> tuple[Any, ...]:
    """Return what is proven, without the nodes of the graph that it is proven of."""
    return derived.is_proven, dict(derived.batch_layouts), [name for name, _ in derived.counters], derived.explanation


def _refuse_counters(derived: Derivation, microbatches: int) -> None:
    if microbatches > 1 and derived.counters:
        raise PolylaneError(
            f"microbatches={microbatches} would not compute what one device computes: "
            f"{_describe_counter(*derived.counters[0])}; use microbatches=1"
        )


def _describe_counter(name: str, node: Node) -> str:
    kind = "parameter" if name in node.parameters else "buffer"
    return (
        f"{node.name} writes the {kind} {name} once for each microbatch{format_line(node.source)}, and not once for a "
        "batch"
    )


def check_per_sample_names(graph: Graph, per_sample: Collection[str]) -> None:
    """Check that all names are of modules that run the user's own Python.

    Raises:
        PolylaneError: a module runs none; the message lists those that do.
    """
    modules = sorted({node.module or "model" for node in graph.nodes if node.is_own_python})
    for name in per_sample:
        if not name or not any(name == "model" or is_inside(path, name) for path in modules):
            hint = f"these do: {', '.join(modules)}" if modules else "nothing does: leave per_sample out"
            raise PolylaneError(f"per_sample={name}: no module of that name is kept as your own Python; {hint}")


def explain_coupling(derived: Derivation) -> str:
    """Explain why a batch cannot be divided, as a sentence without its end."""
    if derived.culprit is None:
        assert derived.buffer is not None
        return describe_divided_buffer(*derived.buffer)
    node = derived.culprit
    site = describe_place(node)
    if node.is_own_python:
        also = f" (it {derived.effects})" if derived.effects else ""
        shown = "and nothing shows that it treats each sample independently"
        if not derived.is_declarable and not also:
            shown = "in whose backward pass the samples of a batch meet"
        return f"{node.name} {site} runs your own Python{also}, {shown}"
    if node.op == "check":
        return f"{node.name} {site} raises for some batches, and nothing shows that it does so for their parts as well"
    if derived.explanation == "fixed":
        return f"the model holds for one number of samples alone: {node.name} {site}"
    if derived.explanation == "writes in place":
        return f"{node.name} {site} writes in place what others see, and nothing shows which samples it belongs to"
    if derived.explanation == "no rule":
        operator = node.op.removeprefix("aten.").partition(".")[0]
        return (
            f"nothing shows that {node.name} {site} treats each sample independently: there is no rule for {operator}"
        )
    if derived.written:
        return (
            f"{node.name} {site} moves the buffer {derived.written} by a mean over its batch, which differs from that "
            "of its parts"
        )
    if not node.shape:
        return (
            f"the loss is not a mean over samples: {node.name} {site} does not add up over the parts of a batch, and "
            "what it counts does not follow from the inputs alone"
        )
    return (
        f"the loss is not a mean over samples: {node.name} {site} makes each sample depend on the others of its batch"
    )


def _suggest_per_sample(name: str) -> str:
    return f"if it does, say so with per_sample={name} in the plan, and it is divided, and watched"


def suggest_no_per_sample(microbatches: int) -> str:
    """Return what to do where ``per_sample`` does not hold: name what divides batches here, and no other key."""
    return "leave it out of per_sample" + (", and use microbatches=1" if microbatches > 1 else "")


def _suggest_remedy(derived: Derivation) -> str:
    """Return what the user can do, as the end of a sentence."""
    name, node = _find_declarable(derived), derived.culprit
    if name is not None:
        return f"{_suggest_per_sample(name)}; else use microbatches=1"
    own_reason = node is not None and (node.op == "check" or node.is_own_python or derived.explanation == "no rule")
    if node is not None and not node.shape and not own_reason:
        return "return a mean over the samples or polylane.Mean(total, count) from loss, or use microbatches=1"
    return "use microbatches=1"
