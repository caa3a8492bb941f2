"""Trainings that look innocent at first: later the optimizer changes, its groups, its hooks or its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.trainings.late_changes import ANYWHERE, innocent, layers
from tests.equivalence.trainings.late_changes import even_batches as batches
from tests.equivalence.trainings.training import STATE, Training, classify, seeded

Named = Iterable[tuple[str, nn.Parameter]]


def optimized(optimizer: Callable[[Named], Any], refusable: tuple[str, ...] = ANYWHERE, **how: Any) -> Training:
    return Training(seeded(layers), classify, batches, STATE, refusable, optimizer=optimizer, isolated=True, **how)


def tensors(parameters: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in parameters]


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


class Counting(torch.optim.SGD):
    """Counts its steps, and does something else from the fourth on."""

    def __init__(self, parameters: Any, lr: float = 0.2, **how: Any) -> None:
        super().__init__(parameters, lr=lr, **how)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps > 3:
            self.change([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        return super().step()

    def change(self, parameters: list[nn.Parameter]) -> None:
        raise NotImplementedError


@innocent
def lars_after_warmup() -> Training:
    """Element by element for three steps, then by the norm of each parameter."""

    class Lars(Counting):
        def change(self, parameters: list[nn.Parameter]) -> None:
            for p in parameters:
                p.grad.mul_(0.5 * p.norm() / (p.grad.norm() + 1e-3))

    return optimized(lambda named: Lars(tensors(named)))


@innocent
def clipped_after_warmup() -> Training:
    """From the fourth step on all gradients are clipped together."""

    class Clipped(Counting):
        def change(self, parameters: list[nn.Parameter]) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    return optimized(lambda named: Clipped(tensors(named)))


@innocent
def clipped_by_history() -> Training:
    """The bound is a quantile of the norms so far."""

    class AutoClip(torch.optim.AdamW):
        def __init__(self, *given: Any, **how: Any) -> None:
            super().__init__(*given, **how)
            self.norms: list[float] = []

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.norms.append(float(norm_of(p.grad for p in parameters)))
            bound = torch.tensor(self.norms, dtype=torch.float64).quantile(0.3)
            torch.nn.utils.clip_grad_norm_(parameters, float(bound))
            return super().step()

    return optimized(lambda named: AutoClip(tensors(named), lr=0.02))


@innocent
def skipped_outliers() -> Training:
    """A step whose norm is far above the mean of the ones before is left out."""

    class Careful(torch.optim.SGD):
        mean = 0.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            norm = float(norm_of(p.grad for group in self.param_groups for p in group["params"]))
            usual, self.mean = self.mean, 0.5 * self.mean + 0.5 * norm
            return None if usual and norm > 1.05 * usual else super().step()

    return optimized(lambda named: Careful(tensors(named), lr=0.2))


@innocent
def rate_written_in_step() -> Training:
    class Halving(Counting):
        def change(self, parameters: list[nn.Parameter]) -> None:
            for group in self.param_groups:
                group["lr"] *= 0.5

    return optimized(lambda named: Halving(tensors(named)), ())


@innocent
def group_added_in_step() -> Training:
    """Only the head is trained at first; from the fourth step on all of it."""

    class Thawing(Counting):
        rest: list[nn.Parameter]

        def change(self, parameters: list[nn.Parameter]) -> None:
            if len(self.param_groups) == 1:
                self.add_param_group({"params": self.rest, "lr": 0.05})

    def optimizer(named: Named) -> torch.optim.Optimizer:
        *rest, weight, bias = tensors(named)
        thawing = Thawing([weight, bias])
        thawing.rest = rest
        return thawing

    return optimized(optimizer)


@innocent
def group_thawed_in_step() -> Training:
    """The same as it should be: all of it is held from the start, and a part is frozen at first."""

    class Thawing(Counting):
        def change(self, parameters: list[nn.Parameter]) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.requires_grad_(True)

    def model() -> nn.Module:
        made = layers()
        made[0].requires_grad_(False)
        return made

    return Training(
        seeded(model), classify, batches, STATE, ANYWHERE, lambda named: Thawing(tensors(named)), isolated=True
    )


@innocent
def state_forgotten() -> Training:
    """Momentum starts anew after some steps."""

    class Restarting(Counting):
        def change(self, parameters: list[nn.Parameter]) -> None:
            if self.steps == 4:
                self.state.clear()

    return optimized(lambda named: Restarting(tensors(named), momentum=0.9))


@innocent
def noise_of_its_own() -> Training:
    """Gradient noise from a generator of the optimizer's, in the order of its parameters."""

    class Noisy(Counting):
        def change(self, parameters: list[nn.Parameter]) -> None:
            random = torch.Generator().manual_seed(self.steps)
            for p in parameters:
                p.grad.add_(torch.randn(p.shape, generator=random, dtype=p.dtype), alpha=0.05)

    return optimized(lambda named: Noisy(tensors(named)))


@innocent
def decay_of_matrices() -> Training:
    """Matrices are decayed, vectors are not: told by their dimensions in each step."""

    class Decaying(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.ndim > 1:
                        p.mul_(0.9)
            return super().step()

    return optimized(lambda named: Decaying(tensors(named), lr=0.2))


@innocent
def rate_by_width() -> Training:
    """The rate of a matrix goes by its columns, as muP has it, looked up in each step."""

    class Wide(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.div_(p.shape[-1] ** 0.5)
            return super().step()

    return optimized(lambda named: Wide(tensors(named), lr=0.5))


@innocent
def rate_by_position() -> Training:
    """Deeper layers learn faster: by the place of a parameter in its group."""

    class ByDepth(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for depth, p in enumerate(group["params"]):
                    p.grad.mul_(1 + depth)
            return super().step()

    return optimized(lambda named: ByDepth(tensors(named), lr=0.1))


@innocent
def accumulated_in_the_optimizer() -> Training:
    """Gradients of two steps make an update: zero_grad() leaves them, and step() waits."""

    class Accumulating(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            if self.calls % 2 == 0:
                super().zero_grad(set_to_none)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return None if self.calls % 2 else super().step()

    return optimized(lambda named: Accumulating(tensors(named), lr=0.1))


@innocent
def clamped_by_a_hook_of_the_optimizer() -> Training:
    """A hook after each step clamps the weights, as WGAN does; it does nothing at first."""

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.41, 0.41)

    def optimizer(named: Named) -> torch.optim.Optimizer:
        made = torch.optim.SGD(tensors(named), lr=0.3)
        made.register_step_post_hook(clamp)
        return made

    return optimized(optimizer, ())


@innocent
def clipped_by_a_hook_of_the_optimizer() -> Training:
    """A hook before each step clips all gradients together."""

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.3)

    def optimizer(named: Named) -> torch.optim.Optimizer:
        made = torch.optim.SGD(tensors(named), lr=0.3)
        made.register_step_pre_hook(clip)
        return made

    return optimized(optimizer)


@innocent
def lookahead_in_its_state() -> Training:
    """Slow weights every third step, in the state of each parameter."""

    class Lookahead(torch.optim.AdamW):
        steps = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step()
            self.steps += 1
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    if self.steps % 3 == 0:
                        slow.lerp_(p, 0.5)
                        p.copy_(slow)

    return optimized(lambda named: Lookahead(tensors(named), lr=0.02), ())


@innocent
def only_large_gradients() -> Training:
    """A parameter whose largest gradient is small is left alone."""

    class Picky(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.grad.abs().max() < 0.06:
                        p.grad = None
            return super().step()

    return optimized(lambda named: Picky(tensors(named), lr=0.3))


@innocent
def schedules_of_torch() -> Training:
    """Momentum and rates cycle, restart and change over, as torch's schedulers do it one after another."""

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        rates = torch.optim.lr_scheduler
        first = rates.OneCycleLR(optimizer, 0.3, total_steps=4)
        return rates.SequentialLR(optimizer, [first, rates.CosineAnnealingWarmRestarts(optimizer, 2)], [3])

    from tests.equivalence.trainings.late_data_changes import plain_samples

    return Training(
        seeded(layers), classify, list, STATE, (), scheduler=scheduler, data=plain_samples,
        optimizer=lambda named: torch.optim.SGD(tensors(named), lr=0.1, momentum=0.9),
    )  # fmt: skip


@innocent
def schedule_of_its_own() -> Training:
    """A scheduler in plain Python that freezes the first group's rate, counts, and writes momentum."""

    class Own:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.count = optimizer, 0

        def step(self) -> None:
            self.count += 1
            if self.count == 4:
                self.optimizer.param_groups[0]["lr"] = 0.0
                self.optimizer.param_groups[1]["momentum"] = 0.0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    def optimizer(named: Named) -> torch.optim.Optimizer:
        first, second, *rest = tensors(named)
        return torch.optim.SGD([{"params": [first, second]}, {"params": rest, "lr": 0.3}], lr=0.1, momentum=0.9)

    from tests.equivalence.trainings.late_data_changes import plain_samples

    return Training(seeded(layers), classify, list, STATE, (), scheduler=Own, data=plain_samples, optimizer=optimizer)
