"""Sample lists: batches that are lists with an entry for each sample, as detection has them, whose sizes differ.

    a batch                                         its leaves
    ([image] * n, [{"boxes": ...}] * n)             two sample lists: tensors of n rows, each for an entry
    {"images": [image] * n, "targets": [{}] * n}    the same

What divides a batch divides rows, so that it divides these lists alike; the user's function gets the entries again.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class SampleList(Tensor):
    """A list with an entry for each sample, as a tensor: each row is a checksum of its entry, by which batches differ.

    Attributes:
        entries: the entries; taking rows takes theirs, and moving or copying the tensor does so with theirs.
        kind: list or tuple, as which the user's function gets them.
    """

    entries: list[Any]
    kind: type

    @staticmethod
    def of(entries: Sequence[Any], kind: type = list, rows: Tensor | None = None) -> SampleList:
        """Return entries as a tensor.

        Args:
            entries: one for each sample.
            kind: list or tuple, as which the user's function gets the entries.
            rows: their checksums; None: to be computed.
        """
        rows = torch.tensor([_checksum(entry) for entry in entries]) if rows is None else rows
        sample_list = rows.as_subclass(SampleList)
        sample_list.entries, sample_list.kind = list(entries), kind
        return sample_list

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is torch.cat and all(isinstance(part, SampleList) for part in args[0]):
            entries = [entry for part in args[0] for entry in part.entries]
            return SampleList.of(entries, args[0][0].kind, result.as_subclass(Tensor))
        follow = _FOLLOWED.get(func)
        if follow is None or not isinstance(result, Tensor) or not result.dim():
            return result
        sample_list, rows = args[0], result.as_subclass(Tensor)
        entries = follow(sample_list.entries, *args[1:])
        if rows.device != sample_list.device:
            entries = _map_tensors(entries, lambda tensor: tensor.to(rows.device))
        return SampleList.of(entries, sample_list.kind, rows)

    def __deepcopy__(self, memo: Any) -> SampleList:
        return SampleList.of(copy.deepcopy(self.entries, memo), self.kind, self.as_subclass(Tensor).clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SampleList.of, (self.entries, self.kind)

    def cast(self, change: Callable[[Tensor], Tensor]) -> SampleList:
        """Return the list with all tensors of its entries changed."""
        return SampleList.of(_map_tensors(self.entries, change), self.kind, self.as_subclass(Tensor))


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return lists, tuples and mappings with their tensors changed; everything else is the same object."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return cast(Any, type(value))({key: _map_tensors(item, change) for key, item in value.items()})
    if isinstance(value, list | tuple):
        parts = [_map_tensors(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _take(entries: list[Any], rows: Any) -> list[Any]:
    if isinstance(rows, slice):
        return entries[rows]
    # Whatever torch takes for an index, a mask or a list of numbers, it takes for this one.
    numbers = torch.arange(len(entries), device=rows.device if isinstance(rows, Tensor) else None)
    return [entries[number] for number in numbers[rows].flatten().tolist()]


def _keep(entries: list[Any], *_: Any) -> list[Any]:
    return entries


_FOLLOWED: Mapping[Any, Callable[..., list[Any]]] = {
    Tensor.__getitem__: _take,
    Tensor.to: _keep,  # a dtype is of the rows
    Tensor.cpu: _keep,
    Tensor.detach: _keep,
    Tensor.contiguous: _keep,
    Tensor.narrow: lambda entries, dim, start, length: entries[start : start + length],
    Tensor.clone: lambda entries, *_: _map_tensors(entries, Tensor.clone),
}


def _checksum(entry: Any, checksum: int = 0) -> int:
    """Return a number for the names, the values and the form of an entry, the same in every process.

    Args:
        entry: nested mappings, lists and tuples of tensors, arrays and plain values; of other objects only types count.
        checksum: the number of what stands before it.
    """
    if isinstance(entry, Mapping):
        for key, value in entry.items():
            checksum = _checksum(value, _checksum(key, checksum))
        return zlib.crc32(b"mapping", checksum)
    if isinstance(entry, list | tuple):
        for part in entry:
            checksum = _checksum(part, checksum)
        return zlib.crc32(b"list of %d" % len(entry), checksum)
    if isinstance(entry, Tensor):
        dense = entry.detach() if entry.layout is torch.strided else entry.detach().to_dense()
        plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().data
        return zlib.crc32(content, zlib.crc32(repr((entry.dtype, *entry.shape)).encode(), checksum))
    if isinstance(entry, np.ndarray | np.generic) and not entry.dtype.hasobject:
        return zlib.crc32(entry.tobytes(), zlib.crc32(repr((entry.dtype, *entry.shape)).encode(), checksum))
    # What an object shows may be its address.
    shown = repr(entry) if type(entry) in _PLAIN else type(entry).__qualname__
    return zlib.crc32(shown.encode(errors="surrogatepass"), checksum)


def group_samples(batch: Any) -> Any:
    """Return a batch with its lists of samples as :class:`SampleList`; any other batch as it is.

    They are lists of equal length, of tensors alike in one and of mappings with the same names in another; what stands
    beside them has as many entries or rows. Sizes of tensors do not count: every batch is read as the example is.
    """
    if isinstance(batch, Mapping):
        names, parts = list(batch), list(batch.values())
    elif type(batch) in (list, tuple):
        names, parts = [], list(batch)
    else:
        return batch
    lists = [part for part in parts if is_sample_list(part)]
    kinds = {isinstance(part[0], Mapping) for part in lists}
    if len(kinds) < 2 or any(_count(part) != len(lists[0]) for part in parts):
        return batch
    new_parts = [SampleList.of(part, type(part)) if is_sample_list(part) else part for part in parts]
    return cast(Any, type(batch))(dict(zip(names, new_parts, strict=True)) if names else new_parts)


def ungroup_samples(leaf: Any) -> Any:
    """Return what the user's function gets in place of a leaf."""
    return leaf.kind(leaf.entries) if isinstance(leaf, SampleList) else leaf


def is_sample_list(part: Any) -> bool:
    """Return whether a part of a batch is a list of tensors alike, or of mappings with the same names."""
    if type(part) not in (list, tuple) or not part:
        return False
    if all(isinstance(entry, Tensor) for entry in part):
        return len({(entry.dtype, entry.dim()) for entry in part}) == 1 and part[0].dim() > 0
    return all(isinstance(entry, Mapping) and list(entry) == list(part[0]) for entry in part)


def _count(part: Any) -> int | None:
    """Return the number of samples of a part of a batch; None where it has none."""
    if isinstance(part, Tensor):
        return part.shape[0] if part.dim() else None
    return len(part) if type(part) in (list, tuple) else None
