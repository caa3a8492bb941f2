"""Host waits: where Python would wait for a GPU, found on the CPU by what is asked of tensors.

A GPU's queue runs empty while the host waits for it, and is filled again only then. What waits are the operations that
give Python a value, or a tensor whose shape depends on values; and copies from the host's pageable memory.

Where there is no CUDA, pretended or not, a tensor does not say whether it would be on a device. So it is followed: a
factory without ``device`` makes one on the host, as does an operator all of whose tensors are; every other is on the
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tests.support.nccl.fake_nccl import find_caller

READS = frozenset({"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
READS |= {"equal", "allclose", "nonzero", "masked_select", "unique", "is_nonzero", "argwhere", "bincount"}


class HostWaits(TorchFunctionMode):
    """Counts where the host would wait, by the function that asks.

    Attributes:
        counts: number of waits by file, function and operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts, self._has_cuda = Counter[str](), torch.cuda.is_available()
        self._host = WeakIdKeyDictionary()

    def put_on_host(self, tensors: Sequence[Tensor]) -> None:
        """Follow tensors as ones of the host, such as those of a batch."""
        for tensor in tensors:
            self._host[tensor] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if tensor.is_cuda or not (self._has_cuda or tensor in self._host)]
        if (name in READS and on_device) or (name == "__getitem__" and on_device and self._selects(args[1])):
            file, function, _ = find_caller()
            self.counts[f"{file} {function} {name}"] += 1
        result = func(*args, **kwargs)
        moves = name == "to" and any(isinstance(leaf, torch.device | str) for leaf in tree_leaves((args[1:], kwargs)))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                if moves:
                    self._host.pop(leaf, None)
                elif not on_device and name != "detach" and (tensors or kwargs.get("device") is None):
                    self._host[leaf] = True
        return result

    @staticmethod
    def _selects(index: Any) -> bool:
        """Whether indexing copies the index from the host, or has a shape that depends on values."""
        parts = index if isinstance(index, tuple) else (index,)
        return any(
            isinstance(part, list) or (isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8))
            for part in parts
        )
