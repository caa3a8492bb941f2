"""Serialization: plain values as bytes and back, for all that workers tell each other.

Bytes from a socket may be a stranger's, so nothing that comes over one is unpickled: a pickle runs code. Here decoding
makes plain values, tensors and dataclasses that were registered by name, and nothing else; what is wrong with bytes is
said in a PolylaneError, whatever they are.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from polylane.errors import PolylaneError

C = TypeVar("C", bound=type)

_MAGIC = b"PLV1"
_HEAD = struct.Struct("=4sQ")  # the magic; bytes of the JSON text, which raw bytes of tensors follow
_ALIGN = 16  # of each tensor's bytes, so that they can be used where they lie

_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@dataclass(frozen=True)
class _TypeSerializer:
    """How values of a class travel.

    Attributes:
        to_plain: the value's content, as plain values.
        from_plain: the value again.
    """

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_FORMS: dict[str, _TypeSerializer] = {}
_NAMES: dict[type, str] = {}


def register_type(kind: type, plain: Callable[[Any], Any], made: Callable[[Any], Any]) -> None:
    """Let values of a class travel.

    Args:
        kind: exactly this class, not those made from it.
        plain: the value's content, as plain values.
        made: makes the value of its content, and raises where that is none; it must not do anything else.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    _FORMS[name], _NAMES[kind] = _TypeSerializer(plain, made), name


def serializable(kind: C) -> C:
    """Let values of a dataclass or an enumeration travel: a dataclass by its fields, in their order."""
    if issubclass(kind, enum.Enum):
        register_type(kind, lambda value: value.value, kind)
        return kind
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a class of them

    def made(content: Any) -> Any:
        if not isinstance(content, list) or len(content) != len(names):
            raise ValueError(f"not the {len(names)} fields of {kind.__name__}")
        return kind(**dict(zip(names, content, strict=True)))

    register_type(kind, lambda value: [getattr(value, name) for name in names], made)
    return kind


def encode(value: Any) -> bytes:
    """A value as bytes, the same for equal values that were made alike.

    Args:
        value: None, bool, int, float, str, bytes, tensors, what was registered, and lists, tuples, dicts, sets of
            these.

    Raises:
        TypeError: it holds anything else.
    """
    tail: list[bytes] = []
    text = json.dumps(_to_plain(value, tail), separators=(",", ":")).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGN)
    return b"".join((_HEAD.pack(_MAGIC, len(text)), text, *tail))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """What :func:`encode` made bytes of. Tensors are copies, on the CPU, without gradients.

    Raises:
        PolylaneError: the bytes are no such thing.
    """
    try:
        magic, length = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        if magic != _MAGIC or start > len(data):
            raise ValueError("another beginning, or cut off")
        return _Reader(memoryview(data)[start:]).value(json.loads(bytes(memoryview(data)[_HEAD.size : start])))
    except Exception as error:  # a form's own check may raise anything
        raise PolylaneError(
            "what another worker sent cannot be read: it is from another version of polylane, or from a stranger "
            f"({type(error).__name__}: {str(error)[:120]})"
        ) from None


def _to_plain(value: Any, tail: list[bytes]) -> Any:
    """A value as JSON: scalars are themselves, all else is a list that begins with its sort."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if (found := _NAMES.get(kind)) is not None:
        return ["o", found, _to_plain(_FORMS[found].to_plain(value), tail)]
    if isinstance(value, Tensor):
        return _tensor_to_plain(value, tail)
    if isinstance(value, enum.Enum):  # one that is an int or a str as well would lose its class
        raise TypeError(f"a value of {kind.__qualname__} cannot be sent to other workers")
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["f", repr(float(value))]
    if isinstance(value, bytes | bytearray):
        return ["b", base64.b64encode(value).decode()]
    if kind in (list, tuple):
        return ["l" if kind is list else "t", *(_to_plain(each, tail) for each in value)]
    if isinstance(value, Mapping):
        return ["d", *(part for item in value.items() for part in (_to_plain(item[0], tail), _to_plain(item[1], tail)))]
    if kind in (set, frozenset):
        none: list[bytes] = []  # for where each tensor is in the tail goes by the order
        every = sorted((_to_plain(each, none) for each in value), key=json.dumps)
        if none:
            raise TypeError("a set of tensors cannot be sent to other workers")
        return ["s" if kind is set else "z", *every]
    raise TypeError(f"a value of {kind.__qualname__} cannot be sent to other workers")


def _tensor_to_plain(value: Tensor, tail: list[bytes]) -> list[Any]:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    tail += [data, bytes(-len(data) % _ALIGN)]
    return ["x", str(value.dtype), *value.shape]


class _Reader:
    """Reads one message; tensors lie behind its text in the order in which they occur there."""

    def __init__(self, tail: memoryview) -> None:
        self._tail, self._position = tail, 0

    def value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            if isinstance(plain, dict):
                raise ValueError("an object of JSON")
            return plain
        sort, *rest = plain
        return _SORTS[sort](self, rest)

    def read_list(self, rest: list[Any]) -> list[Any]:
        return [self.value(each) for each in rest]

    def read_dict(self, rest: list[Any]) -> dict[Any, Any]:
        every = self.read_list(rest)
        return dict(zip(every[::2], every[1::2], strict=True))

    def read_object(self, rest: list[Any]) -> Any:
        name, content = rest
        return _FORMS[name].from_plain(self.value(content))

    def read_tensor(self, rest: list[Any]) -> Tensor:
        name, *shape = rest
        dtype, size = _DTYPES[name], 1
        for each in shape:
            if type(each) is not int or each < 0:
                raise ValueError("not a shape")
            size *= each
        size *= dtype.itemsize
        data = self._tail[self._position : self._position + size]
        if len(data) != size:
            raise ValueError("a tensor cut off")
        self._position += size + -size % _ALIGN
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(tuple(shape))


def _read_bytes(rest: list[Any]) -> bytes:
    (text,) = rest
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _read_float(rest: list[Any]) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[rest[0]]


_SORTS: dict[str, Callable[[_Reader, list[Any]], Any]] = {
    "o": _Reader.read_object,
    "x": _Reader.read_tensor,
    "f": lambda reader, rest: _read_float(rest),
    "b": lambda reader, rest: _read_bytes(rest),
    "l": _Reader.read_list,
    "t": lambda reader, rest: tuple(reader.read_list(rest)),
    "d": _Reader.read_dict,
    "s": lambda reader, rest: set(reader.read_list(rest)),
    "z": lambda reader, rest: frozenset(reader.read_list(rest)),
}
