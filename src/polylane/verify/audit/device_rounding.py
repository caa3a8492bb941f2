"""Device rounding: how far a GPU's numbers in single precision may be from the host's, imitated on the host.

Tensor cores multiply numbers in TensorFloat32: 8 bits of exponent and 10 of mantissa, with sums in single precision.
torch lets them compute convolutions and recurrent layers by default, and matrix products where the user allows it. An
auditor computes on the host, which has no such unit: how much of a difference is rounding is measured by a pass of the
host that rounds the factors first (NVIDIA A100 Tensor Core GPU Architecture, 2020, "TensorFloat-32").
:mod:`~polylane.verify.audit.step_replay` reads torch's settings on the device and measures the floors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# A device may differ from the host by this many times what rounding the factors changes on the host. On an H200 188
# gradients of a residual network differed by at most 2.6 times.
TF32_MARGIN = 20.0

_MANTISSA_BITS_CUT = 13  # of the 23 of single precision
_PRODUCTS = re.compile("(add|badd)?b?m[mv]|addbmm|dot|.*scaled_dot_product.*")
_CONVOLUTIONS = re.compile(".*(convolution|rnn|lstm|gru).*")


@dataclass(frozen=True)
class DeviceRounding:
    """How the device of a training rounds.

    Attributes:
        tolerance: largest relative difference that counts as rounding without a measurement.
        rounds_convolutions: whether factors of convolutions and recurrent layers are rounded to TensorFloat32.
        rounds_products: whether factors of matrix products are, as which the host computes some recurrent layers.
    """

    tolerance: float
    rounds_convolutions: bool = False
    rounds_products: bool = False

    @property
    def rounds_factors(self) -> bool:
        """Whether any factors are rounded to TensorFloat32."""
        return self.rounds_convolutions or self.rounds_products


class TensorFloat32(TorchDispatchMode):
    """Rounds single-precision factors of products to TensorFloat32 while it is entered, in backward passes as well.

    Args:
        rounding: which operators round.
    """

    def __init__(self, rounding: DeviceRounding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding = rounding

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_product, is_convolution = _PRODUCTS.fullmatch(name), _CONVOLUTIONS.fullmatch(name)
        if (is_product and self._rounding.rounds_products) or (is_convolution and self._rounding.rounds_convolutions):
            addends = 1 if name.startswith(("add", "badd")) else 0  # no factors: a mask, a bias
            args = (*args[:addends], *tree_map_only(Tensor, round_to_tf32, tuple(args[addends:])))
        return func(*args, **(kwargs or {}))


def round_to_tf32(tensor: Tensor) -> Tensor:
    """Return the nearest numbers with TensorFloat32's mantissa, halves away from zero; other dtypes are unchanged."""
    if tensor.dtype != torch.float32:
        return tensor
    half = 1 << (_MANTISSA_BITS_CUT - 1)
    bits = tensor.contiguous().view(torch.int32)
    rounded = ((bits + half) & -(1 << _MANTISSA_BITS_CUT)).view(torch.float32)
    return torch.where(rounded.isfinite() & tensor.isfinite(), rounded, tensor)
