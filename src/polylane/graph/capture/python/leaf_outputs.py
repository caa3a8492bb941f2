"""Leaf outputs: shapes of what the user's own Python returns, for any number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LeafOutput:
    """Shape of one output of a leaf, inferred from dry runs at two batch sizes."""

    shape: tuple[int, ...]
    per_sample: tuple[int, ...]  # growth of each dimension per sample; 0 = fixed
    dtype: torch.dtype

    def shape_for(self, samples: Any) -> list[Any]:
        """Return the shape for a number of samples, which may be symbolic."""
        return [grow * samples if grow else size for size, grow in zip(self.shape, self.per_sample, strict=True)]


def infer_output(one: Tensor, two: Tensor, samples: Sequence[int], path: str) -> LeafOutput:
    """Return the form of an output of the user's own Python, from its values at two numbers of samples.

    Raises:
        ValueError: a size changes otherwise than in proportion to the samples; it names ``path``.
    """
    # A size that grows proportionally with the samples follows them; any other change depends on data.
    growth = []
    for a, b in zip(one.shape, two.shape, strict=True):
        if a == b:
            growth.append(0)
        elif a * samples[1] == b * samples[0] and a % samples[0] == 0:
            growth.append(a // samples[0])
        else:
            raise ValueError(f"the size of an output of {path or 'the model'} depends on the data: {a} and then {b}")
    return LeafOutput(tuple(one.shape), tuple(growth), one.dtype)
