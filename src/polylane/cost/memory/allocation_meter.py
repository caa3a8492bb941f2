"""Allocation meter: live and peak bytes of tensor storages, counted as operators allocate them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polylane.graph.nodes.memory import storage_id


class AllocationMeter(TorchDispatchMode):
    """Dispatch mode that counts every storage that an operator of this thread allocates, until it is freed.

    A storage counts once, however many tensors view it; fake tensors count as if they had data. A kernel's own
    workspace that it never returns is not seen. Under a dispatch mode autograd accumulates gradients in new memory,
    where otherwise it does so in place.

    Attributes:
        current_bytes: bytes of all counted storages that are alive.
        peak_bytes: the most bytes alive since the attribute was last set.
        peak_pieces: the most storages alive at the same time.
    """

    def __init__(self, old_tensors: Iterable[Tensor] = ()) -> None:
        """
        Args:
            old_tensors: tensors that existed before and do not count.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = self.peak_bytes = self.peak_pieces = self._count = 0
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self.ignore_tensors(old_tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def ignore_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of these tensors, from now on if they were counted."""
        for tensor in tensors:
            if (counted := self._alive.pop(storage_id(tensor), None)) is not None:
                self.current_bytes -= counted[1]
                self._count -= counted[1] > 0
            self._watch(tensor, 0)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is counted or excluded already."""
        self._watch(tensor, tensor.untyped_storage().nbytes())

    def alive_bytes(self) -> dict[int, int]:
        """Return the bytes of every counted storage that is alive, by :func:`storage_id`."""
        return {number: size for number, (_, size) in self._alive.items() if size}

    def _watch(self, tensor: Tensor, size: int) -> None:
        number = storage_id(tensor)
        if number in self._alive:
            return

        # The weak reference's callback runs when the storage is freed; ids are reused from then on, so the
        # entry must go.
        def freed(_: Any) -> None:
            self._alive.pop(number, None)
            self.current_bytes -= size
            self._count -= size > 0

        self._alive[number] = weakref.ref(tensor.untyped_storage(), freed), size
        self.current_bytes += size
        self._count += size > 0
        self.peak_bytes, self.peak_pieces = max(self.peak_bytes, self.current_bytes), max(self.peak_pieces, self._count)
