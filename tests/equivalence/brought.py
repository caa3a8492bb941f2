"""What users bring beside plain modules (hooks, parametrizations, compiled parts): more rows of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from trainings import (
    STATE,
    TRAININGS,
    Training,
    classify,
    plain_batches,
    seeded,
)

# Plans that divide a module of the user's own Python: of one with hooks nothing shows that it may be divided.
DIVIDING_PYTHON = ("pipeline=2,microbatches=3", "data=2,pipeline=2,microbatches=2", "data=2,shard=parameters")


def brought(make: Callable[[], Training]) -> Callable[[], Training]:
    """Enter a training into the table under its function's name."""
    TRAININGS[make.__name__] = make
    return make


def perceptron(middle: nn.Module | None = None) -> nn.Sequential:
    """Three layers from 6 features, with something between them."""
    between = [middle] if middle is not None else []
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *between, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def changed(change: Callable[[Any], object], **how: Any) -> Training:
    """A perceptron that the user's script changes after it is built."""

    def model() -> nn.Module:
        made = perceptron()
        change(made)
        return made

    return Training(seeded(model), classify, plain_batches, STATE, **how)


# Hooks ----------------------------------------------------------------------------------------------------------------


@brought
def forward_hooks() -> Training:
    def change(model: Any) -> None:
        model[0].register_forward_hook(lambda module, given, result: result * 1.5)
        model[2].register_forward_pre_hook(lambda module, given, more: ((given[0] * 1.5,), more), with_kwargs=True)
        model[4].register_forward_hook(lambda module, given, more, result: result / 2, with_kwargs=True)

    return changed(change)


@brought
def gradients_clamped() -> Training:
    """Hooks on parameters that are not linear: they must see the whole gradient, once."""

    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-2, 1e-2)

    def change(model: Any) -> None:
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        model[2].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        model[2].bias.register_post_accumulate_grad_hook(clamp)
        model[4].weight.register_hook(lambda gradient: gradient * torch.eye(4, 8, dtype=gradient.dtype))

    return changed(change)


@brought
def gradient_of_a_tied_weight_clamped() -> Training:
    """The hook sees the sum over both uses, which a pipeline has on two stages."""

    def change(model: Any) -> None:
        model.insert(3, nn.Linear(8, 8))
        model[3].weight = model[2].weight
        model[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))

    return changed(change)


@brought
def backward_hooks() -> Training:
    """Too weak a bound to be seen at first: the hook must run, whatever it did when the model was captured."""

    def change(model: Any) -> None:
        model[2].register_full_backward_hook(lambda module, given, returned: (given[0].clamp(-0.02, 0.02),))
        model[4].register_full_backward_pre_hook(lambda module, returned: (returned[0] * 0.5,))

    return changed(change, refusable=DIVIDING_PYTHON)


class Bounded(nn.Module):
    """Bounds the gradient that passes through it."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return x * 1.0


@brought
def hook_in_forward() -> Training:
    return Training(seeded(lambda: perceptron(Bounded())), classify, plain_batches, STATE, refusable=DIVIDING_PYTHON)


# torch.compile --------------------------------------------------------------------------------------------------------


@torch.compile(backend="eager")
def _gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Compiled(nn.Module):
    """A compiled module inside, one compiled in place, and a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.wrapped: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")
        self.first.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(_gate(self.wrapped(self.first(x))))
        return y


@brought
def compiled() -> Training:
    loss = torch.compile(classify, backend="eager")
    return Training(seeded(lambda: torch.compile(Compiled(), backend="eager")), loss, plain_batches, STATE)


# Parametrizations -----------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@brought
def parametrized() -> Training:
    """Weight norm, old and new, an orthogonal weight, one of the user's own, and a pruned one."""

    def change(model: Any) -> None:
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrize.register_parametrization(model[2], "weight", Symmetric())
        nn.utils.parametrizations.orthogonal(model[4])
        nn.utils.weight_norm(model[5])
        prune.l1_unstructured(model[7], "weight", 0.3)

    def model() -> nn.Module:
        made = nn.Sequential(*perceptron()[:4], nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        change(made)
        return made

    return Training(seeded(model), classify, plain_batches, STATE)


@brought
def spectral_norms() -> Training:
    """The power iteration moves with every forward pass: by microbatches as in a loop that accumulates."""

    def change(model: Any) -> None:
        nn.utils.parametrizations.spectral_norm(model[0])
        nn.utils.spectral_norm(model[2])

    return changed(change, in_turn=True)
