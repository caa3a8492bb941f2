"""Safe serialization of plain values, for all objects that workers send each other.

Bytes from a socket may be an attacker's, so nothing from one is unpickled: a pickle runs code. Decoding builds plain
values, tensors, and dataclasses and enums that were registered by name, and nothing else; any malformed bytes raise a
PolylaneError.

    bytes     "PLV1"    length n    JSON text of n bytes    tensor 0, padded    tensor 1, padded    ...

In the JSON text None, bool, str, int and finite floats are themselves; everything else is a list that begins with its
type: ``["t", 1, 2]`` is the tuple (1, 2), ``["x", "torch.float32", 3]`` the next tensor, of the shape [3].
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

from polylane.errors import MessageUnreadable, PolylaneError

C = TypeVar("C", bound=type)

_MAGIC = b"PLV1"
_HEAD = struct.Struct("=4sQ")  # the magic; bytes of the JSON text, which the raw bytes of tensors follow
_ALIGN = 16  # alignment of each tensor's bytes, so that they can be viewed in place

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class _TypeSerializer:
    """Conversions of one class to plain values and back.

    Attributes:
        to_plain: returns a value's content as plain values.
        from_plain: builds the value from its content.
    """

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_FORMS: dict[str, _TypeSerializer] = {}
_NAMES: dict[type, str] = {}


def register_type(kind: type, plain: Callable[[Any], Any], factory: Callable[[Any], Any]) -> None:
    """Register a class as serializable.

    Args:
        kind: exactly this class; subclasses are not included.
        plain: returns a value's content as plain values.
        factory: builds the value from its content, or raises if that is invalid; must have no other effect, since the
            content may be an attacker's.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    _FORMS[name], _NAMES[kind] = _TypeSerializer(plain, factory), name


def serializable(kind: C) -> C:
    """Register a dataclass, by its fields in order, or an enum as serializable; a class decorator."""
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
    """Encode a value as bytes, equal for equal values with dicts in the same order.

    Args:
        value: None, bool, int, float, str, bytes, a tensor, a value of a registered class, or a list, tuple, dict or
            set of these.

    Raises:
        TypeError: the value, or a part of it, is anything else.
    """
    tail: list[bytes] = []
    text = json.dumps(_to_plain(value, tail), separators=(",", ":")).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGN)
    return b"".join((_HEAD.pack(_MAGIC, len(text)), text, *tail))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode the bytes of :func:`encode`. Tensors are copies, on the CPU, without gradients.

    Raises:
        MessageUnreadable: the bytes are not an encoded value, or of an unregistered class.
    """
    try:
        magic, length = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        if magic != _MAGIC or start > len(data):
            raise ValueError("another beginning, or cut off")
        return _Reader(memoryview(data)[start:]).value(json.loads(bytes(memoryview(data)[_HEAD.size : start])))
    except Exception as error:  # a registered class's own check may raise anything
        raise MessageUnreadable(
            "what another worker sent cannot be read: it is from another version of polylane, or from a stranger "
            f"({type(error).__name__}: {str(error)[:120]})"
        ) from None


def to_json(value: Any) -> Any:
    """Return a value without tensors as what JSON has: lists, texts, numbers; the form that :func:`encode` gives it.

    Raises:
        TypeError: the value, or a part of it, is a tensor, or cannot be encoded.
    """
    tail: list[bytes] = []
    plain = _to_plain(value, tail)
    if tail:
        raise TypeError("a tensor has no place in JSON")
    return plain


def from_json(plain: Any) -> Any:
    """Return the value that :func:`to_json` was given.

    Raises:
        PolylaneError: it is no such value, or one of an unregistered class.
    """
    try:
        return _Reader(memoryview(b"")).value(plain)
    except Exception as error:  # a registered class's own check may raise anything
        raise PolylaneError(f"this is no encoded value ({type(error).__name__}: {str(error)[:120]})") from None


def _to_plain(value: Any, tail: list[bytes]) -> Any:
    """Return a value as JSON: scalars are themselves, everything else is a list that begins with its type.

    Args:
        value: value to encode, see :func:`encode`.
        tail: bytes of tensors, appended in the order in which they occur in the JSON text.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if (name := _NAMES.get(kind)) is not None:
        return ["o", name, _to_plain(_FORMS[name].to_plain(value), tail)]
    if isinstance(value, Tensor):
        return _tensor_to_plain(value, tail)
    if isinstance(value, enum.Enum):  # unregistered: an IntEnum would silently become an int below
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
        return ["l" if kind is list else "t", *(_to_plain(element, tail) for element in value)]
    if isinstance(value, Mapping):
        return ["d", *(part for item in value.items() for part in (_to_plain(item[0], tail), _to_plain(item[1], tail)))]
    if kind in (set, frozenset):
        # Sorted, because the order of a set differs between processes. Tensors are refused: their bytes are in the tail
        # in the order of occurrence.
        none: list[bytes] = []
        elements = sorted((_to_plain(element, none) for element in value), key=json.dumps)
        if none:
            raise TypeError("a set of tensors cannot be sent to other workers")
        return ["s" if kind is set else "z", *elements]
    raise TypeError(f"a value of {kind.__qualname__} cannot be sent to other workers")


def _tensor_to_plain(value: Tensor, tail: list[bytes]) -> list[Any]:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 1:  # contiguous for torch whatever its stride, but not to be viewed as bytes
        flat = flat.as_strided((1,), (1,))
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    tail += [data, bytes(-len(data) % _ALIGN)]
    return ["x", str(value.dtype), *value.shape]


class _Reader:
    """Decodes one message; the tail has its tensors in the order in which they occur in the JSON text.

    Args:
        tail: bytes behind the JSON text of the message.
    """

    def __init__(self, tail: memoryview) -> None:
        self._tail, self._position = tail, 0

    def value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            if isinstance(plain, dict):
                raise ValueError("an object of JSON")
            return plain
        sort, *fields = plain
        return _SORTS[sort](self, fields)

    def read_list(self, fields: list[Any]) -> list[Any]:
        return [self.value(element) for element in fields]

    def read_dict(self, fields: list[Any]) -> dict[Any, Any]:
        elements = self.read_list(fields)
        return dict(zip(elements[::2], elements[1::2], strict=True))

    def read_object(self, fields: list[Any]) -> Any:
        name, content = fields
        return _FORMS[name].from_plain(self.value(content))

    def read_tensor(self, fields: list[Any]) -> Tensor:
        name, *shape = fields
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError("not a shape")
        dtype = _DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        data = self._tail[self._position : self._position + size]
        if len(data) != size:
            raise ValueError("a tensor cut off")
        self._position += size + -size % _ALIGN
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        # A writable copy: the message's buffer is freed, and tensors over read-only memory are unsafe.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(tuple(shape))


def _read_bytes(fields: list[Any]) -> bytes:
    (text,) = fields
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# By the type that a JSON list begins with: object, tensor, special float, bytes, list, tuple, dict, set, frozenset.
_SORTS: dict[str, Callable[[_Reader, list[Any]], Any]] = {
    "o": _Reader.read_object,
    "x": _Reader.read_tensor,
    "f": lambda reader, fields: _SPECIAL_FLOATS[fields[0]],
    "b": lambda reader, fields: _read_bytes(fields),
    "l": _Reader.read_list,
    "t": lambda reader, fields: tuple(reader.read_list(fields)),
    "d": _Reader.read_dict,
    "s": lambda reader, fields: set(reader.read_list(fields)),
    "z": lambda reader, fields: frozenset(reader.read_list(fields)),
}
