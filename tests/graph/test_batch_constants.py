"""What tells batches of different constants apart."""

import numpy as np
import torch

from polylane.graph.batch import batch_signature


def test_arrays_are_told_apart_by_every_element() -> None:
    """``repr`` shows the first and the last elements of a long array alone."""
    x, one = torch.randn(3, 2), np.zeros(5000)
    other = one.copy()
    other[2500] = 1
    assert repr(one) == repr(other)
    assert batch_signature([x, one]) != batch_signature([x, other])
    assert batch_signature([x, one]) == batch_signature([x, one.copy()])
    assert batch_signature([x, one]) != batch_signature([x, one.astype(np.float32)])
