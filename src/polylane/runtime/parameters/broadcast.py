"""Weight broadcast and weight files: equal weights at the start, a checked and complete file at the end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from polylane.checkpoint.read_tensors import DTYPE_NAMES
from polylane.checkpoint.shard_file import write_all, write_header
from polylane.errors import NotFinite, PolylaneError, describe_disk_error, format_plural
from polylane.runtime.transport.protocol import PendingTransfer, Transport

# The element types of safetensors files, of which checkpoints write some as pairs of others.
_FILE_TYPES = {
    **DTYPE_NAMES,
    torch.complex64: "C64",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}

BYTES_IN_FLIGHT = 16 << 20  # bytes of tensors whose sums are under way at once, where full tensors are gathered


def digest_tensor(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes: 16 hexadecimal digits of SHA-256."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def broadcast_weights(
    tensors: Mapping[str, Tensor], transport: Transport, device: torch.device | None = None
) -> list[str]:
    """Overwrite every worker's weights by those of rank 0, and return the names of those that differed.

    Args:
        tensors: parameters and buffers by name; the same names and shapes on every worker.
        transport: connects all training workers; every one of them must call this function.
        device: device of the tensors that the transport carries; default: each tensor's own.
    """
    # Hashes first: workers that built the model from one seed hold equal weights, and then no tensor is sent.
    ranks = range(transport.size)
    digests = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
    tables = transport.all_gather_object(digests)
    different = [name for name in tables[0] if any(table.get(name) != tables[0][name] for table in tables)]
    for name in different:
        value = broadcast_from_owner(tensors[name].to(device), transport.rank == 0, transport, ranks)
        with torch.no_grad():
            tensors[name].copy_(value)
    return different


def broadcast_from_owner(tensor: Tensor, owner: bool, transport: Transport, ranks: Collection[int]) -> Tensor:
    """Return the owner's tensor on every rank, by a sum to which the others add zeros; for tensors of any dtype."""
    value = tensor.detach().clone()
    return next(sum_over_ranks([value if owner else torch.zeros_like(value)], transport, ranks))


def require_finite(state: Mapping[str, Tensor], trained: Collection[str], path: Path) -> None:
    """Refuse to save weights with NaN or infinity: an earlier, good file at the path stays.

    Args:
        state: full weights and buffers by name, about to be saved.
        trained: names of parameters; other tensors (an attention mask, say) may be infinite on purpose, but not NaN.
        path: path of the file, named in the error.

    Raises:
        NotFinite: a tensor is not finite; the error names the first one.
    """
    for name, tensor in state.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            nan = bool(torch.isnan(tensor).any())
            if nan or name in trained:
                raise NotFinite(f"{name} holds {'NaN' if nan else 'infinity'}, so that {path} was not written")


def save_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as safetensors, atomically: an earlier file is replaced once the new one is complete on disk.

    Of complex numbers safetensors has complex64 alone. Others keep every bit as two tensors, ``NAME.real`` and
    ``NAME.imag``, and a warning says so: under these names nothing is loaded into the wrong place in silence.

    Raises:
        PolylaneError: the file cannot be written; an earlier file at the path is unchanged.
    """
    state = {name: tensor.resolve_conj().resolve_neg().contiguous() for name, tensor in state.items()}
    parted = {name: t.dtype for name, t in state.items() if t.dtype in (torch.complex32, torch.complex128)}
    for name in parted:
        pairs = torch.view_as_real(state.pop(name))
        parts = {
            f"{name}.{part}": half.contiguous() for part, half in zip(("real", "imag"), pairs.unbind(-1), strict=True)
        }
        if clashes := parts.keys() & state.keys():
            raise PolylaneError(
                f"the weights cannot be written to {path}: {name} is complex, and would be written as {min(clashes)}, "
                "which is the name of another weight: rename one of them"
            )
        state |= parts
    target = _find_target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as file:
            _write_safetensors(state, file)
    except (OSError, KeyError) as error:
        if isinstance(error, KeyError):  # of its table of element types
            reason = f"safetensors files do not have {error.args[0]}"
        else:
            reason = describe_disk_error(error)
        raise PolylaneError(f"the weights cannot be written to {path}: {reason}") from error
    if parted:
        warnings.warn(_describe_parts(parted, path), stacklevel=2)


def _find_target(path: Path) -> Path:
    """Return the file to be replaced: of a link, the file that it leads to, so that the link stays.

    Raises:
        PolylaneError: it is no file, or one that this process prints into.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not os.path.isfile(target):  # the rename would take its place
        raise PolylaneError(f"the weights cannot be written to {path}: it is there already, and is no file")
    for descriptor in range(3):
        with contextlib.suppress(OSError):  # there is no such file, or that stream is closed
            if os.path.samestat(os.stat(target), os.fstat(descriptor)):
                stream = ("stdin", "stdout", "stderr")[descriptor]
                raise PolylaneError(f"the weights cannot be written to {path}: it is the {stream} of this command")
    return target


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Context manager: a new file that replaces the one at the path once it is complete on the disk.

    Until then it has no name, where the system has such files: whenever this process ends, nothing is left of it.

    Raises:
        OSError: it cannot be written; the file at the path is as it was.
    """
    # In the same folder: a rename is atomic only within one file system.
    unfinished = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    with _open_nameless(path.parent) or unfinished.open("xb", buffering=0) as file:
        try:
            yield file
            os.fsync(file.fileno())
            if not os.path.lexists(unfinished):
                # Only with a folder's descriptor, which an absolute path makes no use of, does Python follow the link.
                os.link(_path_of(file.fileno()), unfinished, src_dir_fd=file.fileno(), follow_symlinks=True)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _open_nameless(folder: Path) -> BinaryIO | None:
    """Open a file of a folder's disk that has no name yet; None where the disk or the system has no such files."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):  # what else is wrong with the folder is said where a file with a name is opened
        return None
    if not os.path.exists(_path_of(descriptor)):  # by which it gets its name
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "wb", buffering=0)


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _write_safetensors(state: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write tensors as safetensors does, whose own function leaves its file where the process is killed.

    Args:
        state: contiguous tensors by name.
        file: a new file, unbuffered.

    Raises:
        OSError: they cannot be written.
        KeyError: safetensors has no such element type; it names the first one.
    """
    # The widest elements first, so that each tensor begins at a multiple of its elements' size.
    names = sorted(state, key=lambda name: (-state[name].element_size(), name))
    write_header(
        file, [(name, _FILE_TYPES[state[name].dtype], state[name].shape, state[name].nbytes) for name in names]
    )
    for name in names:
        write_all(file, state[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


def _describe_parts(dtypes: Mapping[str, torch.dtype], path: Path) -> str:
    name, other_count = next(iter(dtypes)), len(dtypes) - 1
    also = f" and {format_plural(other_count, 'other')} are" if other_count else " is"
    return (
        f"{name}{also} {' or '.join(sorted(map(str, set(dtypes.values()))))}, which safetensors files do not have: "
        f"{path} keeps every bit of the two parts, as {name}.real and {name}.imag; before load_state_dict, make it "
        f"whole again: "
        f"state[{name!r}] = torch.complex(state.pop({f'{name}.real'!r}), state.pop({f'{name}.imag'!r}))"
    )


def sync_folder(path: Path) -> None:
    """Have the system write a folder's names to the disk, so that a rename survives a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:  # a file system that does not do this for folders
        pass
    finally:
        os.close(folder)


def sum_over_ranks(tensors: Iterable[Tensor], transport: Transport, ranks: Collection[int]) -> Iterator[Tensor]:
    """Yield the sum of each tensor over ranks, in order, for tensors of any dtype.

    Several sums are under way at once, up to :data:`BYTES_IN_FLIGHT`: the time of small ones is that of their messages.
    """
    pending, nbytes = deque[tuple[PendingTransfer, torch.dtype, int]](), 0
    for tensor in tensors:
        # No backend sums these (see SUMMABLE): they are sent as int32, which holds every value of theirs exactly.
        small = tensor.dtype in (torch.bool, torch.uint16, torch.int16)
        wire = (tensor.to(torch.int32) if small else tensor).contiguous()
        # Before it starts: a large tensor must be alone, as the memory that workers share may hold no other beside it.
        while pending and nbytes + wire.nbytes > BYTES_IN_FLIGHT:
            yield _finish_sum(*pending[0][:2])
            nbytes -= pending.popleft()[2]
        pending.append((transport.all_reduce(wire, ranks), tensor.dtype, wire.nbytes))
        nbytes += wire.nbytes
    for transfer, dtype, _ in pending:
        yield _finish_sum(transfer, dtype)


def _finish_sum(transfer: PendingTransfer, dtype: torch.dtype) -> Tensor:
    return transfer.wait().to(dtype)
