"""A loss that fails on data that give batches, or a bare tensor, says what it saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from tests.support.workers.training import batch_of, classify, mlp


def stacked(*batches: Any) -> Any:
    return torch.utils.data.default_collate(list(batches))


def test_batches_in_place_of_samples_are_told() -> None:
    with pytest.raises(PolylaneError, match=r"tensors of shape \[5, 6\], \[5\]\): data must give single samples"):
        capture(mlp(6, 4), classify, stacked(batch_of(5), batch_of(5, seed=1)))


def test_a_bare_tensor_is_told() -> None:
    with pytest.raises(PolylaneError, match=r"the batch is one tensor of shape \[8, 6\]: data that give inputs"):
        capture(mlp(6, 4), classify, batch_of(8)[0])


def test_other_errors_are_told_as_they_are() -> None:
    with pytest.raises(PolylaneError) as caught:
        capture(mlp(7, 4), classify, batch_of(8))
    assert "single samples" not in str(caught.value) and "one tensor" not in str(caught.value)
