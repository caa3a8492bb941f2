"""Reading: fills a worker's part of a saved tensor from the chunks with its elements, and checks their checksums."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polylane.checkpoint.manifest import Chunk, Manifest, SavedTensor
from polylane.checkpoint.regions import LocalPiece, Rectangle
from polylane.checkpoint.store import name_another
from polylane.errors import PolylaneError

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class CheckpointReader:
    """Reads tensors of one checkpoint; files are opened once.

    Args:
        folder: folder of the checkpoint.
        manifest: manifest of the same checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        manifest: manifest of the same checkpoint.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, Any] = {}
        self._latest: tuple[tuple[str, str], Tensor] | None = None

    def fill(self, name: str, local: Tensor, pieces: Iterable[LocalPiece]) -> None:
        """Fill a worker's part of a tensor.

        Args:
            name: global name of the tensor.
            local: the worker's local tensor, which is overwritten.
            pieces: rectangles of the global tensor that it holds, and where.

        Raises:
            PolylaneError: the checkpoint does not have the tensor in this shape and dtype, or it is damaged.
        """
        saved = self.find(name)
        if DTYPES[saved.dtype] != local.dtype:
            raise PolylaneError(
                f"checkpoint {self.folder}: {name} is {DTYPES[saved.dtype]} there, expected {local.dtype}"
            )
        with torch.no_grad():
            for piece in pieces:
                target = view_piece(local, piece)
                self._fill_rectangle(name, saved, piece.rectangle, target)

    def find(self, name: str) -> SavedTensor:
        """Return where a tensor is saved.

        Raises:
            PolylaneError: the checkpoint does not have it.
        """
        saved = self.manifest.tensors.get(name)
        if saved is None:
            raise PolylaneError(f"checkpoint {self.folder}: does not have {name}: it is of another model or training")
        return saved

    def read_whole(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU.

        Raises:
            PolylaneError: the checkpoint does not have it, or it is damaged.
        """
        saved = self.find(name)
        tensor = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        self._fill_rectangle(name, saved, Rectangle((0,) * len(saved.shape), saved.shape), tensor)
        return tensor

    def _fill_rectangle(self, name: str, saved: SavedTensor, region: Rectangle, target: Tensor) -> None:
        if any(o + n > size for o, n, size in zip(region.offsets, region.shape, saved.shape, strict=True)):
            raise PolylaneError(
                f"checkpoint {self.folder}: {name} has the shape {list(saved.shape)}, and more is needed"
            )
        # Chunks do not overlap (the manifest is checked for that): elements can be counted instead of marked.
        volume = 0
        for chunk in saved.chunks:
            chunk_region = Rectangle(chunk.offsets, chunk.shape)
            common = chunk_region.intersect(region)
            if common is None:
                continue
            part = self.read_chunk(name, chunk, saved)[common.slices_in(chunk_region)]
            target[common.slices_in(region)].copy_(part)
            volume += common.volume
        if volume != region.volume:
            raise PolylaneError(
                f"checkpoint {self.folder}: chunks of {name} hold {volume} elements of a part, expected {region.volume}"
            )

    def read_chunk(self, name: str, chunk: Chunk, saved: SavedTensor) -> Tensor:
        """Return a chunk's tensor, and check it."""
        # The latest is kept: the pieces of one worker often are parts of the same chunk, one after the other.
        key = (chunk.file, chunk.key)
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        path = self.folder / chunk.file
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = safe_open(str(path), framework="pt")
            tensor: Tensor = self._files[chunk.file].get_tensor(chunk.key)
        except (OSError, SafetensorError) as error:  # a header that was overwritten, a tensor that is not in the file
            raise PolylaneError(
                f"checkpoint {path}: {name} is damaged, expected {list(chunk.shape)} of {DTYPES[saved.dtype]}, found: "
                f"{_first_line(error)}; {name_another(self.folder)}"
            ) from None
        if tuple(tensor.shape) != chunk.shape or tensor.dtype != DTYPES[saved.dtype]:
            raise PolylaneError(
                f"checkpoint {path}: {name} is {list(tensor.shape)} of {tensor.dtype}, expected {list(chunk.shape)} of "
                f"{DTYPES[saved.dtype]}; {name_another(self.folder)}"
            )
        checksum = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
        if checksum != chunk.checksum:
            raise PolylaneError(
                f"checkpoint {path}: {name} is damaged: its checksum is {checksum:08x}, expected {chunk.checksum:08x}; "
                f"{name_another(self.folder)}"
            )
        self._latest = key, tensor
        return tensor


def check_contents(folder: Path, manifest: Manifest) -> None:
    """Read all of a checkpoint, and hold each chunk against its checksum.

    Raises:
        PolylaneError: a chunk is damaged; the first in the manifest's order is named.
    """
    reader = CheckpointReader(folder, manifest)
    for name, saved in manifest.tensors.items():
        for chunk in saved.chunks:
            reader.read_chunk(name, chunk, saved)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def view_piece(local: Tensor, piece: LocalPiece) -> Tensor:
    """Return the view of a local tensor that holds a rectangle."""
    if piece.start is None:
        return local[piece.slices]
    return local.view(-1)[piece.start : piece.start + math.prod(piece.block)].view(piece.block)[piece.slices]


def read_weights(folder: Path, manifest: Manifest) -> Mapping[str, Tensor]:
    """Return the model's whole weights and buffers by the names of its ``state_dict``, on the CPU.

    Where replicas differ they are the mean of all; integers are the first replica's.

    Raises:
        PolylaneError: the checkpoint is damaged.
    """
    reader = CheckpointReader(folder, manifest)
    weights = {}
    for name, tensor_name in manifest.weights.items():
        variants = manifest.variants_of(tensor_name)
        tensor, *other_tensors = (reader.read_whole(variant) for variant in variants)
        if other_tensors and tensor.is_floating_point():
            tensor = (torch.stack([tensor, *other_tensors]).double().mean(0)).to(tensor.dtype)
        weights[name] = torch.view_as_complex(tensor) if reader.find(variants[0]).is_complex else tensor
    return weights
