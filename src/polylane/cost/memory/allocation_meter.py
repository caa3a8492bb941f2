"""Ledger: how many bytes of tensors are alive, and were alive at most, counted as operators make them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationMeter(TorchDispatchMode):
    """While it is entered, every piece of memory that an operator of this thread makes is counted until it is freed.

    A piece counts once, however many tensors lie in it. Tensors without data count as if they had theirs. What a kernel
    needs for itself and never hands out is not seen. While it looks on, autograd adds gradients up in new memory, where
    otherwise it does so in place.

    Attributes:
        current_bytes: bytes that are alive.
        peak_bytes: the most that ever were, since it was last set.
        peak_pieces: how many pieces of memory were alive at most.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """
        Args:
            known: what was there before, and does not count.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = self.peak_bytes = self.peak_pieces = self._count = 0
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self.ignore_tensors(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def ignore_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors not count."""
        for tensor in tensors:
            self._watch(tensor, 0)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that is alive, if it is not counted yet."""
        self._watch(tensor, tensor.untyped_storage().nbytes())

    def alive_bytes(self) -> dict[int, int]:
        """Bytes of every piece of memory that counts, by the number that :func:`storage_id` gives."""
        return {number: size for number, (_, size) in self._alive.items() if size}

    def _watch(self, tensor: Tensor, size: int) -> None:
        number = storage_id(tensor)
        if number in self._alive:
            return

        def freed(_: Any) -> None:
            self._alive.pop(number, None)
            self.current_bytes -= size
            self._count -= size > 0

        self._alive[number] = weakref.ref(tensor.untyped_storage(), freed), size
        self.current_bytes += size
        self._count += size > 0
        self.peak_bytes, self.peak_pieces = max(self.peak_bytes, self.current_bytes), max(self.peak_pieces, self._count)


def storage_id(tensor: Tensor) -> int:
    """A number of the piece of memory that a tensor lies in, its own as long as that is alive."""
    return int(tensor.untyped_storage()._cdata)
