"""Loss scale: passes in float16 compute gradients of a loss that is multiplied, so that small ones do not become zero.

Micikevicius et al., "Mixed Precision Training", ICLR 2018. The rule is that of ``torch.amp.GradScaler``, which sees the
gradients of one process. Here some are with other workers, and all must leave out the same updates: whether a gradient
is not finite is summed over the workers that have the others. The scale, the flag and the count stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polylane.compile.optimizer_sequence import OptimizerSequence

# The defaults of torch.amp.GradScaler: first scale, factors after enough good updates and after one that was left out.
START, GROWTH, BACKOFF = 2.0**16, 2.0, 0.5
INTERVAL = 2000  # good updates in a row after which the scale grows


class LossScale:
    """The loss scale of one objective, the same on every worker.

    Args:
        device: device of the gradients, on which the scale is kept.
        sum_workers: adds up a tensor over the workers that have different gradients; collective.
    """

    def __init__(self, device: torch.device, sum_workers: Callable[[Tensor], Tensor]) -> None:
        self._sum_workers, self._device = sum_workers, device
        self._overflow: Tensor | None = None  # of the updates since the scale was last asked for
        self.load((START, 0))

    @property
    def scale(self) -> Tensor:
        """The factor, a float32 scalar on the device, which the next :attr:`scale` after an update may overwrite."""
        if self._overflow is not None:
            torch._amp_update_scale_(self._scale, self._good_updates, self._overflow, GROWTH, BACKOFF, INTERVAL)
            self._overflow = None
        return self._scale

    @property
    def inverse(self) -> Tensor:
        """What scaled gradients are multiplied with."""
        return self.scale.double().reciprocal().float()

    def find_overflow(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return whether any gradient of an update is not finite, on any worker; collective, and nobody waits.

        Args:
            parameters: those of the update that this worker has, with gradients that are not scaled any more.

        Returns:
            A float32 scalar on the device, 0 where all are finite, else 1. The next :attr:`scale` follows it.
        """
        overflow, unit = (torch.full((), number, device=self._device) for number in (0.0, 1.0))
        values = [_take_numbers(p.grad) for p in parameters if p.grad is not None]
        for dtype in {value.dtype for value in values}:  # the kernel takes one dtype at a time
            torch._amp_foreach_non_finite_check_and_unscale_([v for v in values if v.dtype == dtype], overflow, unit)
        overflow = self._sum_workers(overflow.view(1)).view(()).clamp(max=1.0)  # fused kernels ask whether it is 1
        self._overflow = overflow if self._overflow is None else self._overflow + overflow
        return overflow

    def collect(self) -> list[float]:
        """Return the scale and the number of good updates since it last changed; waits for the device."""
        return [self.scale.item(), self._good_updates.item()]

    def load(self, numbers: Sequence[float]) -> None:
        """Go on with what :meth:`collect` returned."""
        self._scale = torch.full((), numbers[0], device=self._device)
        self._good_updates = torch.full((), int(numbers[1]), dtype=torch.int32, device=self._device)
        self._overflow = None


def _take_numbers(gradient: Tensor) -> Tensor:
    numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


def reads_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer leaves an update out by itself, on the device, as torch's with ``fused=True`` do."""
    return all(getattr(member, "_step_supports_amp_scaling", False) for member in _list_members(optimizer))


@contextmanager
def overflow_told(optimizer: torch.optim.Optimizer, overflow: Tensor) -> Iterator[None]:
    """Context manager: an optimizer that :func:`reads_overflow` finds it where ``torch.amp.GradScaler`` puts it."""
    members = _list_members(optimizer)
    for member in members:
        member.grad_scale, member.found_inf = None, overflow  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for member in members:
            del member.grad_scale, member.found_inf  # type: ignore[attr-defined]


def _list_members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return optimizer.optimizers if isinstance(optimizer, OptimizerSequence) else [optimizer]
