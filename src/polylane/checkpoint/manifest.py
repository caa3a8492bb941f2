"""Manifest: what a checkpoint holds, as JSON; written last, so that a checkpoint with one is complete.

    {"polylane_checkpoint": 1, "digest": "9f2c...", "content": {...}}

``digest`` is the SHA-256 of the content's text, by which a manifest that was edited or cut off is recognized.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from polylane.checkpoint.commit import MANIFEST
from polylane.checkpoint.regions import Rectangle, cover_once, find_overlap
from polylane.errors import PolylaneError
from polylane.yaml_file import FileForm, StrictMapping, error_sentence, first_error

MOST_BYTES = 128 << 20  # of a manifest, about 700,000 chunks of tensors: larger ones are neither written nor read
MOST_DIMS = 64

Length = Annotated[int, pydantic.Field(ge=0, le=1 << 62)]
Dtype = Literal[
    "BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64", "F8_E4M3", "F8_E5M2"
]
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
PARTS = ("F16", "F32", "F64")  # element types of the parts of complex numbers
FileName = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]


class Chunk(StrictMapping):
    """A rectangle of a tensor in a file.

    Attributes:
        file: name of the file, in the checkpoint's folder.
        key: name of the tensor in the file.
        offsets: first index of the rectangle in each dimension of the global tensor.
        shape: length of the rectangle in each dimension.
        checksum: CRC-32 of the rectangle's bytes.
    """

    file: FileName
    key: str
    offsets: tuple[Length, ...]
    shape: tuple[Length, ...]
    checksum: Length


class SavedTensor(StrictMapping):
    """A global tensor of a checkpoint.

    Attributes:
        dtype: the element type, as safetensors names it.
        shape: length of the whole tensor in each dimension.
        chunks: rectangles that together hold every element once.
        is_complex: whether its elements are the real and imaginary parts, side by side in the last dimension, of
            complex numbers; without that dimension it has the shape of the training's own tensor.
    """

    dtype: Dtype
    shape: tuple[Length, ...] = pydantic.Field(max_length=MOST_DIMS)
    chunks: tuple[Chunk, ...]
    is_complex: bool = False

    @pydantic.model_validator(mode="after")
    def _check_chunks(self) -> SavedTensor:
        if self.is_complex and (self.dtype not in PARTS or self.shape[-1:] != (2,)):
            raise ValueError(
                f"it has the shape {list(self.shape)} of {self.dtype}, expected pairs of {', '.join(PARTS)} in the "
                "last dimension: it is said to be complex"
            )
        # By volume first: it finds most errors, and says in numbers what is wrong.
        volume = 0
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.shape) == len(self.shape):
                raise ValueError(f"chunk {chunk.key} has other dimensions than the tensor")
            if any(o + n > size for o, n, size in zip(chunk.offsets, chunk.shape, self.shape, strict=True)):
                raise ValueError(f"chunk {chunk.key} ends outside of the tensor")
            volume += math.prod(chunk.shape)
        if volume != math.prod(self.shape):
            raise ValueError(f"its chunks hold {volume} elements, and the tensor has {math.prod(self.shape)}")
        rectangles = [Rectangle(chunk.offsets, chunk.shape) for chunk in self.chunks]
        if not cover_once(self.shape, rectangles):
            raise ValueError(_describe_overlap(self.chunks, find_overlap(rectangles)))
        return self


class Manifest(StrictMapping):
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps that were made.
        epoch: number of the epoch from 0 that the next step is in.
        samples: samples of that epoch that were seen.
        plan: the plan that was trained, as a plan file's text.
        versions: versions of torch and polylane that wrote it.
        run: facts about the run that a resumed one must share: seed, batch size, samples of the data.
        weights: the model's own names of what ``state_dict`` has, each with the name of the tensor that holds it.
        plain: state that is no tensor: options of optimizers, schedulers, counts; as plain JSON.
        files: sizes of the files, in bytes.
        tensors: every tensor by its global name.
        write_seconds: time of the slowest worker to copy its part and to write its file; None: of an earlier version.
    """

    step: Length
    epoch: Length
    samples: Length
    plan: str
    versions: dict[str, str]
    run: dict[str, Any]
    weights: dict[str, str]
    plain: Any
    files: dict[FileName, Length]
    tensors: dict[str, SavedTensor]
    write_seconds: float | None = None

    @pydantic.model_validator(mode="after")
    def _check_files(self) -> Manifest:
        sizes = dict.fromkeys(self.files, 0)
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk.file not in self.files:
                    raise ValueError(f"tensors.{name} is in {chunk.file}, which is not among its files")
                # A forged manifest must not make a reader allocate more than the files hold.
                size = math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
                sizes[chunk.file] += size
                if sizes[chunk.file] > self.files[chunk.file]:
                    raise ValueError(
                        f"tensors.{name} has {size} bytes in {chunk.file}, which has {self.files[chunk.file]} bytes "
                        f"and {sizes[chunk.file] - size} of other tensors or chunks"
                    )
        all_forms = dict[str, set[tuple[str, tuple[int, ...], bool]]]()
        for name, tensor_name in self.weights.items():
            if tensor_name not in all_forms:  # many names may have one tensor
                variants = [self.tensors[variant_name] for variant_name in self.variants_of(tensor_name)]
                all_forms[tensor_name] = {(variant.dtype, variant.shape, variant.is_complex) for variant in variants}
            forms = all_forms[tensor_name]
            if not forms:
                raise ValueError(f"weights.{name} is held by {tensor_name}, which is not among its tensors")
            if len(forms) > 1:
                raise ValueError(
                    f"weights.{name} is held by {tensor_name}, whose replicas have {len(forms)} forms, expected one"
                )
        return self

    def variants_of(self, name: str) -> list[str]:
        """Return the names under which a tensor is saved: its own, or where replicas differ ``name@0`` and so on."""
        if name in self.tensors:
            return [name]
        return list(itertools.takewhile(self.tensors.__contains__, (f"{name}@{i}" for i in itertools.count())))


def format_manifest(manifest: Manifest) -> str:
    """Return the text of a manifest file.

    Raises:
        PolylaneError: it is longer than what is read again.
    """
    content = json.dumps(manifest.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
    text = f'{{"polylane_checkpoint":1,"digest":"{_digest(content)}","content":{content}}}\n'
    if len(text) > MOST_BYTES:
        chunks = sum(len(tensor.chunks) for tensor in manifest.tensors.values())
        raise PolylaneError(
            f"the manifest of {chunks} chunks of {len(manifest.tensors)} tensors would be over {MOST_BYTES >> 20} MiB, "
            "which is not read again: take a plan that cuts the model into fewer parts"
        )
    return text


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        PolylaneError: there is none, it cannot be read, or it is not as it was written.
    """
    path = folder / MANIFEST
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a device may have no end, and a pipe no beginning
            raise PolylaneError(f"checkpoint {path}: this is no file")
        if status.st_size > MOST_BYTES:
            raise PolylaneError(
                f"checkpoint {path}: its size is over {MOST_BYTES >> 20} MiB, which no manifest has: it was "
                "edited, or is none; take another checkpoint"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PolylaneError(
            f"checkpoint {folder}: there is no {MANIFEST}: it is no checkpoint, or one whose writing was interrupted"
        ) from None
    except (OSError, UnicodeDecodeError) as error:  # of the disk, or a byte in it that is no text
        raise PolylaneError(f"checkpoint {path}: cannot be read: {getattr(error, 'strerror', '') or error}") from None
    return parse_manifest(text, str(path))


def parse_manifest(text: str, path: str) -> Manifest:
    """Parse the text of a manifest file.

    Args:
        text: content of the file.
        path: path of the file, for errors.

    Raises:
        PolylaneError: it is not as it was written.
    """
    try:
        outer = json.loads(text)
    # Brackets in brackets by the thousand exhaust Python's stack: such a file was not written here.
    except (ValueError, RecursionError) as error:
        raise PolylaneError(f"checkpoint {path}: is no JSON ({str(error)[:80]}): it was cut off or edited") from None
    form = outer.get("polylane_checkpoint") if isinstance(outer, dict) else None
    if form != 1 or isinstance(form, bool):
        raise PolylaneError(
            f"checkpoint {path}: its form is {str(form)[:40]!r}, and this version of polylane reads form 1"
        )
    if set(outer) != {"polylane_checkpoint", "digest", "content"}:
        has = ", ".join(sorted(outer))[:80]
        raise PolylaneError(
            f"checkpoint {path}: has {has}, expected content, digest, polylane_checkpoint: it was edited"
        )
    try:
        digest = _digest(json.dumps(outer["content"], separators=(",", ":"), allow_nan=False))
    except (ValueError, RecursionError):  # NaN, which Python's reader of JSON takes and its writer is forbidden here
        digest = "of what no checkpoint has"
    if digest != outer["digest"]:
        raise PolylaneError(
            f"checkpoint {path}: was changed after it was written: its digest is {digest}, expected "
            f"{str(outer['digest'])[:64]}"
        )
    try:
        return Manifest.model_validate_json(json.dumps(outer["content"]))
    except pydantic.ValidationError as error:
        sentence = error_sentence(first_error(error), _FORM, outer["content"])
        raise PolylaneError(f"checkpoint {path}: {sentence}") from None


def _describe_overlap(chunks: tuple[Chunk, ...], overlap: tuple[int, int] | None) -> str:
    """Say which chunks of a tensor hold an element twice, so that others are in none."""
    if overlap is None:
        return f"some of its elements are in two of its {len(chunks)} chunks, others in none, expected each in one"
    chunk, twin = (chunks[index] for index in overlap)
    element = list(map(max, chunk.offsets, twin.offsets))
    return (
        f"its element {element} is in {chunk.key} of {chunk.file} and in {twin.key} of {twin.file}, expected each "
        "element in one chunk"
    )


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


_FORM = FileForm("a checkpoint's manifest", lambda location: list(Manifest.model_fields))
