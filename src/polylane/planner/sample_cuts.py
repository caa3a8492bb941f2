"""Which dimensions of a graph's tensors hold the samples, and which cuts of them leave every sample on every rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from polylane.graph.sizes import grows
from polylane.placement.placement import Cuts, Placement, Shard, joined
from polylane.placement.view import Key, View, is_alias, key_of


def sample_dims(view: View) -> Mapping[Key, frozenset[int]]:
    """The dimensions of every tensor that grow with the samples."""
    found: dict[Key, frozenset[int]] = {}
    for node in view.graph.code.fx.nodes:
        if node.op in ("placeholder", "call_function") and not is_alias(node):
            for index, val in enumerate(_values(node)):
                if isinstance(val, Tensor):
                    found[key_of(node)[0], index] = frozenset(d for d, n in enumerate(val.shape) if grows(n))
    return found


def _values(node: fx.Node) -> list[object]:
    val = node.meta.get("val")
    return list(val) if isinstance(val, (list, tuple)) else [val]


def cuts_samples(placement: Placement, dims: frozenset[int], samples: int) -> bool:
    """Whether a placement gives different samples to different ranks.

    Args:
        placement: of a tensor.
        dims: of the tensor that grow with the samples.
        samples: in hand.
    """
    return isinstance(placement, Shard) and placement.dim in dims and not inside_samples(placement.cuts, samples)


def inside_samples(cuts: Cuts, samples: int) -> bool:
    """Whether a dimension of ``samples`` equal pieces, one behind the other, is cut alike in each of them."""
    size = cuts[-1][-1]
    if samples < 1 or size % samples or len(cuts) % samples:
        return False
    first = cuts[: len(cuts) // samples]
    return first[-1][-1] == size // samples and joined([first] * samples) == cuts
