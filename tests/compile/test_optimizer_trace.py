"""What an update depends on is found by the operators that compute it, on whichever side of a bound the values are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.optimizer_trace import FAR_COUNT, trace_updates

Step = Callable[[torch.optim.Optimizer, list[Tensor]], bool | None]
NAMED = list(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).named_parameters())
NAMES = {name for name, _ in NAMED}


class Stepped(torch.optim.SGD):
    """SGD behind a function of the gradients, which leaves the step out where it returns True."""

    count = 0
    kind: Step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        return None if self.kind(own) else super().step(closure)  # type: ignore[call-arg, arg-type]


def built(step: Step) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    kind = type("Kind", (Stepped,), {"kind": step})
    return lambda parameters: kind([p for _, p in parameters], lr=0.1, momentum=0.9)


def norm_of(own: list[Tensor]) -> Tensor:
    return torch.stack([p.grad.norm() for p in own]).norm()  # type: ignore[union-attr]


# Of several parameters -----------------------------------------------------------------------------------------------


def skips_outliers(optimizer: Any, own: list[Tensor]) -> bool:
    return norm_of(own).item() > 1e12


def skips_vanishing(optimizer: Any, own: list[Tensor]) -> bool:
    return bool(norm_of(own) < 1e-12)


def masks_outliers(optimizer: Any, own: list[Tensor]) -> None:
    factor = torch.where(norm_of(own) > 1e12, 0.0, 1.0)
    for p in own:
        p.grad.mul_(factor)  # type: ignore[union-attr]


def adds_up_in_python(optimizer: Any, own: list[Tensor]) -> bool:
    return math.sqrt(sum(float(p.grad.norm()) ** 2 for p in own)) > 1e12  # type: ignore[union-attr]


def skips_nan(optimizer: Any, own: list[Tensor]) -> bool:
    return any(p.grad.isnan().any() for p in own)  # type: ignore[union-attr]


def asks_numpy(optimizer: Any, own: list[Tensor]) -> bool:
    numpy = pytest.importorskip("numpy")
    return bool(max(numpy.abs(p.grad.numpy()).max() for p in own) > 1e12)  # type: ignore[union-attr]


def asks_lists(optimizer: Any, own: list[Tensor]) -> bool:
    return max(abs(v) for p in own for v in p.grad.flatten().tolist()) > 1e12  # type: ignore[union-attr]


def scales_after_a_warm_up(optimizer: Any, own: list[Tensor]) -> None:
    if optimizer.count > 5_000:
        torch._foreach_div_([p.grad for p in own], norm_of(own))  # type: ignore[arg-type]


def scales_now_and_then(optimizer: Any, own: list[Tensor]) -> None:
    if optimizer.count % 500 == 0:
        torch.nn.utils.clip_grad_norm_(own, 1.0)


def looks_at_angles(optimizer: Any, own: list[Tensor]) -> bool:
    before = [optimizer.state[p].get("momentum_buffer") for p in own]
    dots = [(p.grad * b).sum() for p, b in zip(own, before, strict=True) if b is not None]
    return bool(dots) and sum(dots) < -1e12


def estimates_a_distance(optimizer: Any, own: list[Tensor]) -> None:
    """Takes rates from sums over all parameters that it keeps, as D-Adaptation and Prodigy do."""
    kept = vars(optimizer).setdefault("kept", torch.zeros(()))
    kept.add_(sum((p.grad * p).sum() for p in own))
    for p in own:
        p.grad.mul_(kept.clamp(1.0, 1.0))  # type: ignore[union-attr]


JOINED = [
    *(skips_outliers, skips_vanishing, masks_outliers, adds_up_in_python, skips_nan, asks_numpy, asks_lists),
    *(scales_after_a_warm_up, scales_now_and_then, looks_at_angles, estimates_a_distance),
]


@pytest.mark.parametrize("step", JOINED)
def test_a_bound_that_no_trial_crosses_joins_parameters(step: Step) -> None:
    trace = trace_updates(NAMED, built(step))
    assert trace.joins({"0.weight", "0.bias"}) and trace.joins({"0.weight", "1.weight"}) and not trace.joins(NAMES)
    assert f"{__file__}:" in trace.line and trace.whole


# Of one ---------------------------------------------------------------------------------------------------------------


def clips_by_rows(optimizer: Any, own: list[Tensor]) -> None:
    """Adaptive gradient clipping (Brock et al., 2021)."""
    for p in own:
        bound = p.norm(dim=-1, keepdim=True).clamp(min=1e-3) * 1e12
        p.grad.mul_((bound / p.grad.norm(dim=-1, keepdim=True)).clamp(max=1.0))  # type: ignore[union-attr]


def centralizes(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        p.grad.sub_(p.grad.mean(-1, keepdim=True))  # type: ignore[union-attr]


def normalizes_layers(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        if (norm := p.grad.norm().item()) > 1e12:  # type: ignore[union-attr]
            p.grad.div_(norm)  # type: ignore[union-attr]


def trusts_within_bounds(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        p.grad.mul_((p.norm() / p.grad.norm()).clamp(1.0, 1.0))  # type: ignore[union-attr]


def passes_over_nan(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        if not math.isfinite(p.grad.sum()):  # type: ignore[union-attr]
            p.grad.zero_()  # type: ignore[union-attr]


def transposes(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        if p.dim() == 2 and p.shape[0] == p.shape[1]:
            p.grad = p.grad.add(p.grad.T, alpha=0.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "step", [clips_by_rows, centralizes, normalizes_layers, trusts_within_bounds, passes_over_nan, transposes]
)
def test_what_looks_at_all_of_a_parameter_joins_no_others(step: Step) -> None:
    trace = trace_updates(NAMED, built(step))
    assert trace.whole == ({"0.weight"} if step is transposes else NAMES)
    assert not any(trace.joins({name}) for name in NAMES) and not trace.draws


# Of an element --------------------------------------------------------------------------------------------------------


def replaces_nan(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        p.grad[p.grad.isnan()] = 0.0  # type: ignore[index, union-attr]
        torch.nan_to_num_(p.grad)  # type: ignore[arg-type]


def restarts(optimizer: Any, own: list[Tensor]) -> None:
    if optimizer.count % 500 == 0:
        optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * math.cos(optimizer.count % 500)


def flattens(optimizer: Any, own: list[Tensor]) -> None:
    for p in own:
        p.view(-1).sub_(p.grad.reshape(-1).sign() * torch.tensor(0.1))  # type: ignore[union-attr]


def logs_nothing_of_the_gradients(optimizer: Any, own: list[Tensor]) -> bool:
    optimizer.state[own[0]].setdefault("calls", torch.zeros(())).add_(1)
    return optimizer.state[own[0]]["calls"].item() < 0


def ends_its_schedule(optimizer: Any, own: list[Tensor]) -> bool:
    return [False, False, False, False][optimizer.count]


@pytest.mark.parametrize("step", [replaces_nan, restarts, flattens, logs_nothing_of_the_gradients, ends_its_schedule])
def test_what_goes_element_by_element_needs_nothing_else(step: Step) -> None:
    trace = trace_updates(NAMED, built(step))
    assert not trace.whole and not any(trace.joins({name}) for name in NAMES) and not trace.draws


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "Rprop", "ASGD"])
def test_torchs_own_go_element_by_element(kind: str, foreach: bool) -> None:
    trace = trace_updates(NAMED, lambda named: getattr(torch.optim, kind)([p for _, p in named], foreach=foreach))
    assert not trace.whole and not any(trace.joins({name}) for name in NAMES) and not trace.draws


def test_noise_is_seen_wherever_it_is_drawn_from() -> None:
    def draws(optimizer: Any, own: list[Tensor]) -> None:
        generator = vars(optimizer).setdefault("generator", torch.Generator())
        own[-1].add_(torch.randn(own[-1].shape, generator=generator) if optimizer.count == FAR_COUNT else 0)

    assert f"{__file__}:" in trace_updates(NAMED, built(draws)).draws
