"""Custom autograd functions of the kinds that people write: per sample, and looking at their batch."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Ctx = Any


class Sign(torch.autograd.Function):
    """A straight-through estimator (Bengio et al., arXiv:1308.3432)."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= 1).to(x.dtype)


class Clipped(torch.autograd.Function):
    """The identity whose gradient is clipped, element by element: not linear in the gradient."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-1e-2, 1e-2)


class Masked(torch.autograd.Function):
    """A hard tanh whose backward pass writes zeros into its own copy of the gradient."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=-1, max=1)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = gradients[0].clone()
        gradient[x.abs() > 1] = 0
        return gradient


class Reversed(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky, arXiv:1409.7495), with its scale as an argument."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class Linear(torch.autograd.Function):
    """A linear layer with gradients of its weight and bias, where they are asked for."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = gradient.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


class Swish(torch.autograd.Function):
    """x sigmoid(x) that keeps its input alone."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradients[0] * s * (1 + x * (1 - s))


class Both(torch.autograd.Function):
    """Two outputs."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() - gradients[1] * x.sin()


class Largest(torch.autograd.Function):
    """Each row's largest element, and where it stands, which has no gradient."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        values, at = x.max(1, keepdim=True)
        ctx.save_for_backward(at)
        ctx.mark_non_differentiable(at)
        ctx.shape = x.shape
        return values, at

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (at,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).scatter(1, at, gradients[0])


class Recomputed(torch.autograd.Function):
    """Saves memory: the backward pass computes the forward pass again, and differentiates it."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(F.linear(x, weight))

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(F.linear(x, weight))
        return torch.autograd.grad(y, (x, weight), gradients[0])


class Squares(torch.autograd.Function):
    """A loss: the mean of squares over all elements."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x / x.numel()


class Modern(torch.autograd.Function):
    """The newer form: ``setup_context`` apart from ``forward``."""

    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Ctx, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.power * x ** (ctx.power - 1), None


class Mixed(torch.autograd.Function):
    """With torch's decorators for mixed precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight).relu()

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = torch.where(F.linear(x, weight) > 0, gradients[0], 0.0)
        return gradient @ weight, torch.einsum("ni,nj->ij", gradient, x)


class Quantized(torch.autograd.Function):
    """Rounded to a learned step (Esser et al., arXiv:1902.08153): the step's gradient is a sum over all elements."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, step: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.low, ctx.high = low, high
        return torch.clamp(torch.round(x / step), low, high) * step

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, step = ctx.saved_tensors
        q = x / step
        inside = ((q >= ctx.low) & (q <= ctx.high)).to(x.dtype)
        of_step = torch.where(q < ctx.low, ctx.low, torch.where(q > ctx.high, ctx.high, q.round() - q))
        return gradients[0] * inside, (gradients[0] * of_step).sum().reshape(step.shape), None, None


class Normalized(torch.autograd.Function):
    """An RMS norm with its weight, written out."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        gradient, normal = gradients[0] * weight, x * scale
        of_x = (gradient - normal * (gradient * normal).mean(-1, keepdim=True)) * scale
        return of_x, (gradients[0] * normal).reshape(-1, x.shape[-1]).sum(0)


# ---- these look at their batch, or hide what they do -----------------------------------------------------------------


class Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


class Normed(torch.autograd.Function):
    """Only the backward pass joins samples."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] / (gradients[0].norm() + 1e-3)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.cumsum(0)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(0).cumsum(0).flip(0)


class Divided(torch.autograd.Function):
    """Its backward pass divides by the number of samples."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].shape[0]


class MeanGradient(torch.autograd.Function):
    """A linear layer whose weight has the mean of its samples' gradients."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x / x.shape[0]


class ClippedWeight(torch.autograd.Function):
    """A linear layer that clips the gradient of its weight: a sum of clipped parts is no clipped sum."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, (gradients[0].t() @ x).clamp(-1e-2, 1e-2)


class Branching(torch.autograd.Function):
    """Looks at values."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x * 2 if x.abs().max().item() > 100 else x * 3

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class OnOne(torch.autograd.Function):
    """Computes otherwise on one sample alone."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x * 3

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class OnMany(torch.autograd.Function):
    """Computes otherwise on many samples."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 50 else x * 3

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class Square(torch.autograd.Function):
    """Computes otherwise where there are as many samples as features."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == x.shape[1] else x * 3

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class Hiding(torch.autograd.Function):
    """Looks at values in its backward pass, and catches what goes wrong."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        try:
            return gradients[0] / max(gradients[0].abs().max().item(), 1e-3)
        except Exception:
            return gradients[0]


class Configured(torch.autograd.Function):
    """Has an object for an argument, which anybody may change."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, state: Any) -> Tensor:
        return x - x.mean(0) if state.calls else x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Noisy(torch.autograd.Function):
    """Random numbers in the backward pass alone."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.rand_like(gradients[0])


class Counting(torch.autograd.Function):
    """Counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        Counting.calls += 1
        return gradients[0] * Counting.calls


class Unequal(torch.autograd.Function):
    """Joins samples only where its second output has no gradient."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor | None) -> Tensor | None:
        first, second = gradients
        if first is None or second is None:
            only = first if second is None else second
            return None if only is None else only - only.mean(0)
        return 2 * first + 3 * second


class BatchNormalized(torch.autograd.Function):
    """Statistics of the batch, by torch's own operator."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Written(torch.autograd.Function):
    """Writes over its input."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class State:
    """What Python keeps between calls."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, list[int]()


STATE, SEEN, NAMED, COUNT = State(), list[int](), dict[str, int](), 0


def count() -> None:
    global COUNT
    COUNT += 1


class Remembering(torch.autograd.Function):
    """Changes something each time its backward pass runs, which ``change`` says."""

    kept: ClassVar[list[int]] = []
    calls = 0

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, change: str) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.change == "a list of its class":
            Remembering.kept.append(gradients[0].dim())
        elif ctx.change == "a number of its class":
            Remembering.calls += 1
        elif ctx.change == "a list":
            SEEN.append(gradients[0].dim())
        elif ctx.change == "a dictionary":
            NAMED["dims"] = NAMED.get("dims", 0) + 1
        elif ctx.change == "an object":
            STATE.calls += 1
        elif ctx.change == "a number that another function counts":
            count()
        elif ctx.change == "Python's random numbers":
            random.random()
        elif ctx.change == "numpy's random numbers":
            np.random.rand()
        return gradients[0], None

    @staticmethod
    def remembered() -> str:
        """All that it may have changed."""
        state = (Remembering.kept, Remembering.calls, SEEN, NAMED, vars(STATE), COUNT)
        return repr((state, random.getstate(), np.random.get_state(), torch.get_rng_state().sum()))


class SumOverCount(torch.autograd.Function):
    """A loss: the sum of squares, over as many samples as there are; with a factor that is learned."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return (x * x * factor).sum() / x.shape[0]

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, factor = ctx.saved_tensors
        scaled = gradients[0] * x / x.shape[0]
        return 2 * scaled * factor, (scaled * x).sum(0)


class WrongCount(torch.autograd.Function):
    """A loss whose backward pass forgets to divide by the number of samples: parts have too large gradients."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x
