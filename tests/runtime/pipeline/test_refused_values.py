"""Refused values: of the errors of operators, only those about a batch's own numbers are laid to the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from polylane.errors import ActionFailed, PolylaneError
from polylane.runtime.pipeline.refused_values import blame_on_values


@pytest.mark.parametrize(
    ("operator", "args", "of_values"),
    [
        (F.cross_entropy, (torch.zeros(2, 3), torch.tensor([1, 3])), True),
        (F.embedding, (torch.tensor([5]), torch.zeros(4, 2)), True),
        (torch.gather, (torch.zeros(2, 3), 1, torch.tensor([[7]])), True),
        (torch.ops.aten.sum.dim_IntList, (torch.zeros(2), [3]), False),
        (torch.matmul, (torch.zeros(2, 3), torch.zeros(2, 3)), False),
    ],
)
def test_which_errors_are_a_batchs(operator: Callable[..., Any], args: tuple[Any, ...], of_values: bool) -> None:
    failed = ActionFailed(0, 0, 0, "head", "model.py:3: y = self.head(x)")
    with pytest.raises((IndexError, RuntimeError)) as caught:
        operator(*args)
    # Without the frames of this test, which are the user's own Python to polylane.
    failed.__cause__ = caught.value.with_traceback(None)
    told = blame_on_values("step 3", failed)
    assert isinstance(told, PolylaneError) == of_values
    if of_values:
        assert str(told).startswith("step 3: a number of the batch is past what the model has")
    else:
        assert told is failed
