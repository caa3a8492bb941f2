"""A model on the meta device gets the values that one device would give it, and each worker keeps only its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.parameters.materialize import materialize, reset_parameters, whole_shapes_only
from tests.support import subsets
from tests.support.workers.training import batch_of, workers

CPU = torch.device("cpu")


class Net(nn.Module):
    """Tied weights, a norm with buffers, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.norm(self.first(x)).relu()).relu()))


def one_device(init: object = None) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(3)
    model.to_empty(device="cpu")
    model.third.weight = model.second.weight  # to_empty tears tied weights apart
    model.apply(init or (lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None))  # type: ignore[arg-type]
    return model


def test_values_are_those_of_one_device() -> None:
    with torch.device("meta"):
        model = Net()
    materialize(model, None, 3, CPU, lambda name, whole: whole)
    expected = one_device().state_dict()
    assert model.third.weight is model.second.weight
    for name, value in model.state_dict().items():
        if not name.startswith(("second.weight", "third.weight")):  # made once here, twice there
            assert not value.is_meta and torch.equal(value, expected[name]), name


def test_only_what_is_kept_has_memory() -> None:
    with torch.device("meta"):
        model = Net()
    materialize(model, None, 3, CPU, lambda name, whole: whole[:2].clone() if name == "head.weight" else None)
    assert model.head.weight.shape == (2, 8) and not model.head.weight.is_meta
    assert all(t.is_meta for n, t in model.named_parameters() if n != "head.weight")
    with whole_shapes_only(model, {"head.weight": (4, 8)}):
        assert model.head.weight.is_meta and model.head.weight.shape == (4, 8)
        assert model.third.weight is model.second.weight
    assert model.head.weight.shape == (2, 8)


def test_a_tensor_that_init_forgets_is_named() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(PolylaneError, match=r"norm\.weight has no value.*init\(norm\)"):
        materialize(model, lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None, 0, CPU, lambda n, w: w)


@pytest.mark.parametrize("plan", subsets.one_in(2, ["pipeline=2,microbatches=2", "data=2"], first=1))
def test_training_begins_and_goes_on_as_on_one_device(plan: str) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return Net().double()

    def work(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = [job.step(batch_of(8)).loss for _ in range(2)]
        return [*losses, job.evaluate(batch_of(5))], job.state_dict()

    expected = workers(work, model(), "data=1,microbatches=2" if "micro" in plan else "data=1")[0]
    for losses, state in workers(work, model(), plan):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_tied_weight_is_cut_only_once_all_its_places_are_filled() -> None:
    with torch.device("meta"):
        model = Net()
    seen: list[tuple[str, tuple[int, ...]]] = []

    def keep(name: str, whole: torch.Tensor) -> torch.Tensor:
        seen.append((name, tuple(whole.shape)))
        return whole[:4].clone() if name == "second.weight" else whole

    materialize(model, None, 3, CPU, keep)
    with torch.device("meta"):
        whole = Net()
    materialize(whole, None, 3, CPU, lambda name, tensor: tensor)
    assert ("second.weight", (8, 8)) in seen and len({name for name, _ in seen}) == len(seen)
    assert model.third.weight is model.second.weight
    assert torch.equal(model.second.weight, whole.second.weight[:4])
    assert torch.equal(model.head.weight, whole.head.weight)


def test_modules_of_torch_that_hide_their_initialization_are_initialized() -> None:
    attention = nn.MultiheadAttention(4, 2)
    nn.init.zeros_(attention.in_proj_weight)
    reset_parameters(attention)
    assert attention.in_proj_weight.any()
