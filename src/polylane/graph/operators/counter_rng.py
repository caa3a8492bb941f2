"""Counter-based random numbers: each is a function of (seed, step, node, sample, element), never of the rank.

In the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A worker draws only the numbers
of its own samples, and two workers that hold the same value draw the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.graph.operators.counter_mixer import Counters
from polylane.graph.operators.device_draws import draw_bits, draw_mask, drop_counted, move_samples


def salt_of(name: str) -> int:
    """Return a node's own 62-bit number, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def _derive_keys(part: Any, salt: int) -> tuple[int, int]:
    """Return two 32-bit keys from seed, step and node, spread by splitmix64 (Steele et al., OOPSLA'14)."""
    state = (part.seed * 0x9E3779B97F4A7C15 + part.step * 0xD1B54A32D192ED03 + salt) & 0xFFFFFFFFFFFFFFFF
    keys = []
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        keys.append((mixed ^ (mixed >> 31)) & 0xFFFFFFFF)
    return keys[0], keys[1]


def _count(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None) -> Counters:
    """Return the counters of a value, whose samples come first; see :func:`random_bits`."""
    full_shape = list(shape) if part.region is None else part.region.whole(shape)
    # Samples come first in the counter, so that a sample's elements are contiguous whatever the slice.
    order = list(range(len(full_shape)))
    if batch_dim:
        order.insert(0, order.pop(batch_dim))
    count = math.prod(full_shape)
    # What does not belong to samples is drawn once a step, the same by all workers that hold it.
    offset = part.first * (count // part.samples) if batch_dim is not None and part.samples else 0
    ranges = {dim: spans for dim, _, spans in part.region.cuts} if part.region else {}
    return Counters(
        tuple(full_shape[d] for d in order),
        tuple(tuple(ranges.get(d, ((0, full_shape[d]),))) for d in order),
        offset,
        _derive_keys(part, salt),
    )


def random_bits(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Return 32 random bits (int32) for every element of a value whose samples are ``part``'s.

    Args:
        part: the sample slice; its seed, step and first sample enter the counters.
        salt: the node's own number, see :func:`salt_of`.
        shape: local shape: of the whole value, or of the slice's region of it.
        batch_dim: the dimension that holds the samples (possibly several rows a sample); None when the value does not
            depend on the samples and is the same on every worker.
        device: device of the returned tensor.
    """
    return move_samples(draw_bits(_count(part, salt, shape, batch_dim), device), batch_dim)


def uniform(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Return numbers in (0, 1), float64, of 32 random bits each."""
    # Signed bits plus 2^31 + 0.5, over 2^32: never exactly 0 or 1.
    return random_bits(part, salt, shape, batch_dim, device).to(torch.float64).add_(2147483648.5).div_(4294967296.0)


def normal(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Return standard normal numbers, float64 (Box-Muller)."""
    radius = uniform(part, salt, shape, batch_dim, device).log_().mul_(-2.0).sqrt_()
    angle = uniform(part, salt ^ 0x5DEECE66D, shape, batch_dim, device).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def keep_mask(
    part: Any, salt: int, p: float, shape: Sequence[int], batch_dim: int | None, device: torch.device
) -> Tensor:
    """Return a mask that is True with probability 1 - p."""
    return move_samples(draw_mask(_count(part, salt, shape, batch_dim), _threshold(p), device), batch_dim)


def _threshold(p: float) -> int:
    # Signed bits are uniform over [-2^31, 2^31).
    return min(int(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)


def drop(part: Any, salt: int, p: float, x: Tensor, batch_dim: int | None) -> tuple[Tensor, Tensor]:
    """Return ``x`` after dropout with probability ``p`` < 1, without a gradient, and the mask of what was kept."""
    counters = _count(part, salt, x.shape, batch_dim)
    return drop_counted(x, batch_dim, counters, _threshold(p), 1.0 / (1.0 - p))


def seed_of(part: Any, salt: int) -> int:
    """Return a seed for torch's own generator, for the user's own Python: from step, node and first local sample."""
    high, low = _derive_keys(part, salt ^ part.first * 0x9E3779B97F4A7C15)
    return high << 31 ^ low


def python_seed_of(part: Any, salt: int) -> int:
    """Return a seed for Python's and numpy's generators, for the user's own Python: from step, microbatch and node.

    It is equal on all replicas: what is drawn there is more often a decision about the step (which layers to drop) than
        numbers for samples.
    """
    high, low = _derive_keys(part, salt ^ (part.microbatch + 1) * 0xD6E8FEB86659FD93)
    return high << 31 ^ low
