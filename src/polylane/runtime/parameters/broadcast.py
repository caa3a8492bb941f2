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

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from polylane.errors import NotFinite, PolylaneError, format_plural
from polylane.runtime.transport.protocol import PendingTransfer, Transport

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
    own = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
    every = transport.all_gather_object(own)
    different = [name for name in every[0] if any(other.get(name) != every[0][name] for other in every)]
    for name in different:
        value = broadcast_from_owner(tensors[name].to(device), transport.rank == 0, transport, ranks)
        with torch.no_grad():
            tensors[name].copy_(value)
    return different


def broadcast_from_owner(tensor: Tensor, owner: bool, transport: Transport, ranks: Collection[int]) -> Tensor:
    """Return the owner's tensor on every rank, by a sum to which the others add zeros; for tensors of any dtype."""
    own = tensor.detach().clone()
    return next(sum_over_ranks([own if owner else torch.zeros_like(own)], transport, ranks))


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
            f"{name}.{part}": each.contiguous() for part, each in zip(("real", "imag"), pairs.unbind(-1), strict=True)
        }
        if known := parts.keys() & state.keys():
            raise PolylaneError(
                f"the weights cannot be written to {path}: {name} is complex, and would be written as {min(known)}, "
                "which is the name of another weight: rename one of them"
            )
        state |= parts
    if os.path.exists(path) and not os.path.isfile(path):  # the rename would take its place
        raise PolylaneError(f"the weights cannot be written to {path}: it is there already, and is no file")
    # In the same folder: os.replace is atomic only within one file system.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, str(unfinished))
        mask = os.umask(0o022)
        os.umask(mask)
        os.chmod(unfinished, 0o666 & ~mask)  # safetensors creates files of mode 0600; follow the umask instead
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError, KeyError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, KeyError):  # of its table of element types
            reason = f"safetensors files do not have {error.args[0]}"
        raise PolylaneError(f"the weights cannot be written to {path}: {reason}") from error
    if parted:
        warnings.warn(_describe_parts(parted, path), stacklevel=2)


def _describe_parts(dtypes: Mapping[str, torch.dtype], path: Path) -> str:
    first, others = next(iter(dtypes)), len(dtypes) - 1
    also = f" and {format_plural(others, 'other')} are" if others else " is"
    return (
        f"{first}{also} {' or '.join(sorted(map(str, set(dtypes.values()))))}, which safetensors files do not have: "
        f"{path} keeps every bit of the two parts, as {first}.real and {first}.imag; before load_state_dict, make it "
        f"whole again: "
        f"state[{first!r}] = torch.complex(state.pop({f'{first}.real'!r}), state.pop({f'{first}.imag'!r}))"
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
