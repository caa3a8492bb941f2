"""Sample dimensions: which dimensions of a graph's tensors hold samples, and which cuts give every rank all of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from polylane.graph.symbolic_sizes import is_dynamic
from polylane.placement.operator_view import OperatorView, TensorKey, is_alias, tensor_key
from polylane.placement.placement import Cuts, Placement, Shard, join_cuts


def sample_dims(view: OperatorView) -> Mapping[TensorKey, frozenset[int]]:
    """Return the dimensions of every tensor that grow with the number of samples."""
    found: dict[TensorKey, frozenset[int]] = {}
    for node in view.graph.code.fx.nodes:
        if node.op in ("placeholder", "call_function") and not is_alias(node):
            val = node.meta.get("val")
            for index, each in enumerate(val if isinstance(val, (list, tuple)) else [val]):
                if isinstance(each, Tensor):
                    found[tensor_key(node)[0], index] = frozenset(d for d, n in enumerate(each.shape) if is_dynamic(n))
    return found


def shards_samples(placement: Placement, dims: frozenset[int], samples: int) -> bool:
    """Return whether a placement gives different samples to different ranks.

    Args:
        placement: the tensor's placement along one axis.
        dims: dimensions of the tensor that grow with the samples.
        samples: number of samples per worker.
    """
    # A dimension of [samples * heads] may be sharded if the cut is the same in every sample: by heads.
    return (
        isinstance(placement, Shard) and placement.dim in dims and not cuts_each_sample_alike(placement.cuts, samples)
    )


def cuts_each_sample_alike(cuts: Cuts, samples: int) -> bool:
    """Return whether a dimension of ``samples`` equal blocks, one after the other, is cut equally in each of them."""
    size = cuts[-1][-1]
    if samples < 1 or size % samples or len(cuts) % samples:
        return False
    first = cuts[: len(cuts) // samples]
    return first[-1][-1] == size // samples and join_cuts([first] * samples) == cuts
