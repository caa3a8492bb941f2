"""Weights across workers: the same at the start, whole at the end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from polylane.errors import NotFinite, PolylaneError
from polylane.runtime.transport.protocol import Transport


def digest_tensor(tensor: Tensor) -> str:
    """A number of a tensor's bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def broadcast_weights(
    tensors: Mapping[str, Tensor], transport: Transport, device: torch.device | None = None
) -> list[str]:
    """Let every worker start from the weights of rank 0. Returns the names of those that differed.

    Args:
        tensors: the same names on every worker.
        transport: between all training workers.
        device: of tensors that it carries; default: each tensor's own.
    """
    ranks = range(transport.size)
    own = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
    every = transport.all_gather_object(own)
    different = [name for name in every[0] if any(other.get(name) != every[0][name] for other in every)]
    for name in different:
        value = broadcast_from_owner(tensors[name].to(device), transport.rank == 0, transport, ranks)
        with torch.no_grad():
            tensors[name].copy_(value)
    return different


def broadcast_from_owner(tensor: Tensor, owner: bool, transport: Transport, ranks: Iterable[int]) -> Tensor:
    """The owner's tensor on every rank: the others add zeros to it. Tensors of any dtype."""
    own = tensor.detach().clone()
    return sum_over_ranks(own if owner else torch.zeros_like(own), transport, ranks)


def gather_full_state(
    model: nn.Module,
    mine: Mapping[str, bool],
    tied: Mapping[str, str],
    whole: Callable[[str, Tensor | None, Tensor], Tensor],
    transport: Transport,
    device: torch.device,
) -> dict[str, Tensor]:
    """The whole model's ``state_dict`` on every rank, with its own names, on the CPU.

    Args:
        model: of which each worker keeps its own part up to date.
        mine: canonical names of the parameters and buffers that training changes -> whether this rank has them, or a
            part of them. Others never change: they are taken as they are here.
        tied: further names of tied weights.
        whole: what this rank adds to the sum that makes a tensor whole, out of its part (see ``Pieces.whole``).
    """
    state = model.state_dict(keep_vars=True)
    result: dict[str, Tensor] = {}
    done: dict[str, Tensor] = {}
    for name, value in state.items():
        canonical = tied.get(name, name)
        if canonical not in done:
            tensor = value.detach()
            if canonical in mine and transport.size > 1:
                part = tensor.to(device) if mine[canonical] else None
                like = torch.empty(0, dtype=tensor.dtype, device=device)
                tensor = sum_over_ranks(whole(canonical, part, like), transport, range(transport.size))
            done[canonical] = tensor.cpu()
        result[name] = done[canonical].clone()
    return result


def require_finite(state: Mapping[str, Tensor], trained: Collection[str], path: Path) -> None:
    """Refuse to save weights that are no numbers: what is at the path may be good.

    Args:
        state: what is to be saved.
        trained: names of parameters; others, such as the mask of an attention, may be infinite on purpose.
        path: of the file, for the error.

    Raises:
        NotFinite: naming the first of them.
    """
    for name, tensor in state.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            nan = bool(torch.isnan(tensor).any())
            if nan or name in trained:
                raise NotFinite(f"{name} holds {'NaN' if nan else 'infinity'}, so that {path} was not written")


def save_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as safetensors; a file of that name is replaced once the new one is whole and on the disk.

    Raises:
        PolylaneError: they cannot be written; the file of before is as it was.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, str(unfinished))
        mask = os.umask(0o022)
        os.umask(mask)
        os.chmod(unfinished, 0o666 & ~mask)  # safetensors keeps its files to their owner; these are the user's to share
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise PolylaneError(f"the weights cannot be written to {path}: {reason}") from error


def sum_over_ranks(tensor: Tensor, transport: Transport, ranks: Iterable[int]) -> Tensor:
    """The sum over ranks, of tensors of any dtype."""
    small = tensor.dtype in (torch.bool, torch.uint16, torch.int16)
    wire = tensor.to(torch.int32) if small else tensor
    return transport.all_reduce(wire.contiguous(), ranks).wait().to(tensor.dtype)
