"""Models that ask something unusual of a plan: views as complex numbers, torch.func, objects whose methods raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from tests.support.workers.training import assert_same, plainly, trained


class Fourier(nn.Module):
    """Complex weights kept as pairs of reals, behind a bias of odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.weight = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 5, 2))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head((self.lift(x).to(torch.cdouble) @ torch.view_as_complex(self.weight)).abs())
        return found


class Widened(Fourier):
    """Pairs of numbers of half the width, viewed as one."""

    def forward(self, x: Tensor) -> Tensor:
        words = self.weight.detach().view(torch.complex128).real
        found: Tensor = self.head(self.lift(x) @ (self.weight.sum(2) + words.squeeze(2)))
        return found


class Irreps(tuple):  # type: ignore[type-arg]
    """A tuple without a length (as e3nn's)."""

    def __len__(self) -> int:
        raise NotImplementedError


class Table(dict):  # type: ignore[type-arg]
    """A dict that is not to be walked."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("look names up")

    items = keys = values = __iter__ = __eq__ = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> Any:
        return Table(a=dict.get(self, "a"))


class Settings:
    """An object whose methods of Python's own protocols all raise."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __deepcopy__(self, memo: Any) -> Any:
        return Settings()

    def _refuse(self, *_: Any) -> Any:
        raise OSError("not available")

    __getattr__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __repr__ = __getitem__ = _refuse  # type: ignore[assignment]


class WithObjects(nn.Module):
    """Holds objects whose methods raise, and reads them as they are to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.irreps, self.table = nn.Linear(6, 3), Irreps((1, 2)), Table(a=3.0)
        self.settings, self.every = Settings(), [Settings(), Irreps((3,)), Table(b=1)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x) * self.irreps[1] * self.table["a"] * self.settings.scale
        return y


def squared(model: nn.Module, batch: Any) -> Tensor:
    y: Tensor = model(batch[0])
    return y.square().mean()


def slope(model: nn.Module, batch: Any) -> Tensor:
    """A residual of the model's gradient, sample by sample."""
    values: Tensor = torch.func.vmap(torch.func.grad(lambda x: model(x[None])[0, 0]))(batch[0])
    return values.square().mean()


def jacobian(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = torch.func.jacrev(model)(batch[0][:1])
    return found.square().mean() + squared(model, batch)


def curvature(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = torch.func.hessian(lambda x: model(x).sum())(batch[0][0])
    return found.square().mean() + squared(model, batch)


def ascent(model: nn.Module, batch: Any) -> Tensor:
    """A step along the model's gradient with respect to its input, which is a constant of the loss."""
    x = batch[0].detach().requires_grad_()
    moved = (x - 0.1 * torch.autograd.grad(model(x).sum(), x)[0]).detach()
    return squared(model, (moved,)) + squared(model, batch)


def network(activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 1))


SLOW = pytest.mark.slow
SHARDED, STAGES = "data=2,shard=parameters", "pipeline=2,microbatches=2"


@pytest.mark.parametrize(
    ("make", "loss", "plan"),
    [
        (Fourier, squared, SHARDED),
        pytest.param(Widened, squared, SHARDED, marks=SLOW),
        pytest.param(Fourier, squared, "data=3,shard=parameters", marks=SLOW),
        (network, slope, SHARDED),
        pytest.param(network, jacobian, SHARDED, marks=SLOW),
        pytest.param(network, curvature, SHARDED, marks=SLOW),
        pytest.param(network, slope, "data=2,recompute=full", marks=SLOW),
        (WithObjects, squared, SHARDED),
        (lambda: network(nn.SiLU), ascent, STAGES),
        pytest.param(lambda: network(nn.Mish), ascent, STAGES, marks=SLOW),
        pytest.param(lambda: network(nn.LogSigmoid), ascent, STAGES, marks=SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_plan_computes_what_one_device_computes(make: Callable[[], nn.Module], loss: Any, plan: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 6, generator=generator).double(),) for _ in range(3)]
    expected = plainly(model, batches, loss=loss)
    for found in trained(model, plan, batches, loss=loss):
        assert_same(found, expected)


class Neighbours(nn.Module):
    """One graph: each node sees its neighbours, so that no part of the nodes is a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(adjacency @ self.first(x)))
        return found


def of_masked_nodes(model: nn.Module, batch: Any) -> polylane.Mean:
    x, adjacency, labels, mask = batch
    losses = F.cross_entropy(model(x, adjacency), labels, reduction="none")
    return polylane.Mean((losses * mask).sum(), mask.sum())


@pytest.mark.parametrize("plan", ["data=2", pytest.param("pipeline=2", marks=SLOW)])
@pytest.mark.filterwarnings("ignore")
def test_nodes_of_one_graph_are_not_taken_apart(plan: str) -> None:
    torch.manual_seed(0)
    model, x = Neighbours().double(), torch.randn(9, 6).double()
    batch = x, torch.rand(9, 9).double(), torch.randint(0, 3, (9,)), (torch.arange(9) % 3 > 0).double()
    expected = plainly(model, [batch] * 2, loss=of_masked_nodes)
    for found in trained(model, plan, [batch] * 2, loss=of_masked_nodes):
        assert_same(found, expected)
