"""Parameters that a forward writes, or that a backward pass uses again: what one device has, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from polylane.errors import PolylaneError
from tests.support import subsets
from tests.support.workers.training import batch_of, plainly, trained

BATCHES = [batch_of(8, seed) for seed in range(3)]


class Momentum(nn.Module):
    """An encoder that follows another one, by ``.data``, in each forward."""

    def __init__(self, write: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.write = nn.Linear(6, 4).double(), nn.Linear(6, 4).double(), write
        for parameter in self.second.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for first, second in zip(self.first.parameters(), self.second.parameters(), strict=True):
                self.write(second, first)
        # Which way it goes depends on the data: the module is a leaf.
        return self.first(x) * (1.0 if float(x.sum()) < 1e9 else 2.0) + self.second(x)


def assign(second: nn.Parameter, first: nn.Parameter) -> None:
    second.data = second.data * 0.9 + first.data * 0.1


def in_place(second: nn.Parameter, first: nn.Parameter) -> None:
    second.data.lerp_(first.data, 0.1)


def swap(second: nn.Parameter, first: nn.Parameter) -> None:
    second.data = first.detach().clone()


class Lazy(nn.Module):
    """Its first pass sets a parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.shift = nn.Linear(6, 4).double(), nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready.item():
            self.shift.data.copy_(-self.linear(x).detach().mean(0))
            self.ready.fill_(1)
        return self.linear(x) + self.shift


class Adjoint(torch.autograd.Function):
    """Runs the module again in its backward pass, as adjoint methods of differential equations do."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *parameters), gradients[0], allow_unused=True)
        return None, *[torch.zeros_like(p) if v is None else v for v, p in zip(found, (x, *parameters), strict=True)]


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Adjoint.apply(self.inner, x, *self.inner.parameters()))


class Checkpointed(Solver):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.inner(x)), x, use_reentrant=False)
        return self.out(y) * (1.0 if float(x.sum()) < 1e9 else 2.0)


class Hooked(Solver):
    """A hook on a value's gradient runs a module again."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.register_hook(lambda gradient: gradient * torch.sigmoid(self.inner(x.detach()).detach()))
        return self.out(torch.tanh(y))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "assigned": lambda: Momentum(assign),
    "in place": lambda: Momentum(in_place),
    "swapped": lambda: Momentum(swap),
    "lazy": Lazy,
    "adjoint": Solver,
    "checkpointed": Checkpointed,
    "hooked": Hooked,
}
LOST = {("lazy", "data=2,shard=parameters")}


@pytest.mark.filterwarnings("ignore:each replica computes")
@pytest.mark.parametrize(("name", "plan"), subsets.pairs(MODELS, ["data=2", "tensor=2", "data=2,shard=parameters"]))
def test_written_and_used_again_as_on_one_device(name: str, plan: str) -> None:
    if (name, plan) in LOST:
        with pytest.raises(PolylaneError, match="the loss writes the parameter shift"):
            trained(MODELS[name](), plan, BATCHES)
        return
    expected = plainly(MODELS[name](), BATCHES)
    for found in trained(MODELS[name](), plan, BATCHES):
        assert found.losses == pytest.approx(expected.losses, rel=1e-9)
        for key, value in expected.state.items():
            assert torch.allclose(found.state[key], value, rtol=1e-9, atol=1e-12), key


class Tying(nn.Module):
    def __init__(self, tie: Callable[[Any], Any]) -> None:
        super().__init__()
        self.twin, self.out, self.tie = nn.Linear(6, 4).double(), nn.Linear(6, 4).double(), tie

    def forward(self, x: Tensor) -> Tensor:
        self.tie(self)
        return self.out(x)


TIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tied": (
        lambda own: setattr(own.out, "weight", own.twin.weight),
        "twin.weight in the place of out.weight",
    ),
    "made anew": (lambda own: setattr(own.out, "bias", nn.Parameter(torch.zeros(4).double())), "another parameter in"),
    "added": (lambda own: own.register_parameter("extra", nn.Parameter(torch.zeros(1))), "another parameter in the"),
    "left out": (lambda own: setattr(own.out, "bias", None), "another parameter in the place of out.bias"),
}


@pytest.mark.parametrize("name", TIES)
def test_a_parameter_that_a_forward_puts_in_anothers_place_is_refused(name: str) -> None:
    tie, said = TIES[name]
    with pytest.raises(PolylaneError, match=said) as caught:
        trained(Tying(tie), "data=1", BATCHES)
    assert "test_written_parameters.py" in str(caught.value)
