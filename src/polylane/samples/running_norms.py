"""Running norms: the batch normalizations of a graph that move running statistics, in the order of their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from polylane.errors import PolylaneError
from polylane.graph.nodes.facts import base_name, unwrap_settings
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.operators.sync_batch_norm import batch_norm


@dataclass(frozen=True)
class RunningNorm:
    """A batch normalization in training that keeps running statistics.

    Attributes:
        mean, variance: names of the buffers of its running statistics.
        momentum: weight of a microbatch's statistics in them.
    """

    mean: str
    variance: str
    momentum: float


def find_running_norms(code: fx.Graph, names: Collection[str]) -> tuple[list[RunningNorm], Counter[str]]:
    """Find the batch normalizations that move running statistics, and the buffers in which they count their passes.

    Args:
        code: FX graph of the model and loss in training mode, unsharded.
        names: names of the nodes that are looked at.

    Returns:
        The normalizations in the order of their calls; by buffer, what each pass adds to a counter.

    Raises:
        PolylaneError: the user's own Python normalizes, whose calls cannot be predicted; or something else than a
            normalization moves a buffer in each microbatch.
    """
    norms, counters = list[RunningNorm](), Counter[str]()
    for node in code.nodes:
        if node.op != "call_function" or str(node.meta["name"]) not in names:
            continue
        target = unwrap_settings(node.target)
        if getattr(getattr(target, "own", None), "normalizes", False):
            raise PolylaneError(
                f"replicas=round-robin: {node.meta['name']} normalizes by statistics of the batch in your own Python, "
                "where their order over the replicas is not known: use replicas=split"
            )
        written = _buffer_name(node.args[4]) if target is batch_norm else None
        if target is batch_norm and written is not None:
            variance, momentum = _buffer_name(node.args[5]), node.args[7]
            assert variance is not None and isinstance(momentum, float)
            norms.append(RunningNorm(written, variance, momentum))
        elif str(target) == "aten.add_.Tensor" and (counted := _buffer_name(node.args[0])) is not None:
            by = node.args[1]
            assert isinstance(by, int), "batch normalization counts its passes one by one"
            counters[counted] += by
        elif base_name(node) and any(n.op == "placeholder" for n in written_arguments(node)):
            raise PolylaneError(
                f"replicas=round-robin: {node.meta['name']} moves {_describe_written(node)} in each microbatch, and "
                "replicas in turn would each move their own: use replicas=split"
            )
    return norms, counters


def _describe_written(node: fx.Node) -> str:
    names = [name for argument in written_arguments(node) if (name := _buffer_name(argument)) is not None]
    return f"the buffer {', '.join(names)}" if names else "what the model keeps"


def _buffer_name(node: object) -> str | None:
    """Return the name of the buffer that a node stands for; None for any other."""
    role = node.meta.get("role", ("", "")) if isinstance(node, fx.Node) else ("", "")
    return str(role[1]) if role[0] == "buffer" else None
