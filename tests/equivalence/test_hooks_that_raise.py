"""A hook on a gradient that raises is named by its own parameter, in a sentence without names of classes of ours."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from polylane.errors import ActionFailed, PolylaneError
from tests.support.workers.training import batch_of, mlp, trained


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def raising(gradient: Tensor) -> Tensor:
    raise ValueError("not this one")


def hooked() -> nn.Module:
    model = mlp(6, 8, 4)
    for name, parameter in model.named_parameters():
        parameter.register_hook(raising if name == "2.weight" else doubled)
    return model


def test_the_parameter_whose_hook_raised_is_named() -> None:
    with pytest.raises(PolylaneError, match=r"a hook on the gradient of 2\.weight raised ValueError: not this one"):
        trained(hooked(), "data=2", [batch_of(8)])


def test_an_error_for_the_user_is_told_as_it_is() -> None:
    failed = ActionFailed(1, 0)
    failed.__cause__ = PolylaneError("take larger batches")
    assert str(failed) == "rank 1 at stage 0: take larger batches"
