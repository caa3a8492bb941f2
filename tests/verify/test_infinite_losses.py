"""A training whose loss has no value on one worker is refused, and no plan is blamed for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.verify.verify import verify
from training import adamw


@pytest.mark.parametrize(("factor", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_a_loss_without_a_value_on_one_worker_is_refused(factor: float, word: str) -> None:
    """Nothing is equal to NaN: the sentence names the step, and does not blame the plan."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * torch.where(batch.max() > 1, factor, 1.0)

    batches = [torch.zeros(4, 3), torch.full((4, 3), 2.0)]
    with pytest.raises(PolylaneError, match=rf"the loss of step 2 is {word} on one worker"):
        verify(nn.Linear(3, 3), Objective("loss", loss, adamw), batches, "data=2")
