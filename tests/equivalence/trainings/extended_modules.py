"""What users bring beside plain modules: hooks, parametrizations, compiled parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.equivalence.trainings.training import STATE, Training, classify, plain_batches, seeded, training

# Plans that divide a module of the user's own Python: of one with hooks nothing shows that it may be divided.
DIVIDING_PYTHON = ("pipeline=2,microbatches=3", "data=2,pipeline=2,microbatches=2", "data=2,shard=parameters")


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


@training
def forward_hooks() -> Training:
    def change(model: Any) -> None:
        model[0].register_forward_hook(lambda module, given, result: result * 1.5)
        model[2].register_forward_pre_hook(lambda module, given, more: ((given[0] * 1.5,), more), with_kwargs=True)
        model[4].register_forward_hook(lambda module, given, more, result: result / 2, with_kwargs=True)

    return changed(change)


@training
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


@training
def gradient_of_a_tied_weight_clamped() -> Training:
    """The hook sees the sum over both uses, which a pipeline has on two stages."""

    def change(model: Any) -> None:
        model.insert(3, nn.Linear(8, 8))
        model[3].weight = model[2].weight
        model[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))

    return changed(change)


@training
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


@training
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


@training
def compiled() -> Training:
    loss = torch.compile(classify, backend="eager")
    return Training(seeded(lambda: torch.compile(Compiled(), backend="eager")), loss, plain_batches, STATE)


# Parametrizations -----------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@training
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


@training
def spectral_norms() -> Training:
    """The power iteration moves once with every batch, also where microbatches share it."""

    def change(model: Any) -> None:
        nn.utils.parametrizations.spectral_norm(model[0])
        nn.utils.spectral_norm(model[2])

    return changed(change)


# Optimizers with hooks ------------------------------------------------------------------------------------------------


@training
def optimizer_hooks() -> Training:
    """Gradients changed before a step, weights clipped after it (Arjovsky et al., Wasserstein GAN, 2017)."""

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(list(parameters), lr=0.2, momentum=0.9)

        def centre(optimizer: Any, *_: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5).add_(1e-3)

        def clip(optimizer: Any, *_: Any) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.clamp_(-0.2, 0.2)

        optimizer.register_step_pre_hook(centre)
        optimizer.register_step_post_hook(clip)
        return optimizer

    return Training(seeded(perceptron), classify, plain_batches, STATE, optimizer=hooked)


# Types of numbers -----------------------------------------------------------------------------------------------------


class Phases(nn.Module):
    """Layers of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.complex128)
        self.last = nn.Linear(8, 4, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(torch.complex(x, x.roll(1, 1)))
        return self.last(torch.polar(y.abs().tanh(), y.angle())).abs()


@training
def complex_numbers() -> Training:
    return Training(seeded(Phases), classify, plain_batches, STATE)


class Tables(nn.Module):
    """Buffers of half precision, of whole numbers and of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))
        self.register_buffer("shown", torch.tensor([True, False, True, True, True, True]))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        y: Tensor = self.layers(torch.where(self.shown, x * self.scale.to(x.dtype), x))[:, self.order]
        return y


@training
def buffers_of_other_types() -> Training:
    def model() -> nn.Module:
        made = seeded(Tables)()
        made.scale = made.scale.half()
        return made

    return Training(model, classify, plain_batches, STATE)


# Nested batches and models with several losses ------------------------------------------------------------------------


class SeveralLosses(nn.Module):
    """Takes a part of a nested batch, and returns its losses in a tuple, beside what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.back = perceptron(), nn.Linear(4, 6)

    def forward(self, views: Any, truth: Tensor) -> dict[str, Any]:
        x = views[0]["x"]
        y = self.body(x)
        losses = nn.functional.cross_entropy(y, truth), nn.functional.mse_loss(self.back(y.tanh()), x)
        return {"losses": losses, "more": (None, y)}


@training
def nested_batches_and_losses() -> Training:
    def batches() -> list[Any]:
        return [{"views": [{"x": x}], "told": (y, {"name": "a batch"})} for x, y in plain_batches()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch["views"], batch["told"][0])["losses"]
        return first + 0.5 * second  # type: ignore[no-any-return]

    return Training(seeded(SeveralLosses), loss, batches, STATE)
