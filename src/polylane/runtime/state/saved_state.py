"""Saved state: a checkpoint as a worker reads it, whatever plan wrote it: by parts of tensors, and by replicas.

Where replicas differed when it was written, each has a value of its own (``name@0``, ``name@1``):

    read by                               gets
    as many replicas, each its own        its own value
    others                                the mean of all; of integers, the first replica's
    sums (residuals), by other replicas   the first the sum of all, the others nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump
from polylane.runtime.state.held_tensors import HeldTensor, Region


class SavedState:
    """The tensors and the plain state of a checkpoint.

    Args:
        reader: reads the checkpoint's tensors.
        plain: its plain state, decoded.
        replicas: number of replicas whose own state is read now.

    Attributes:
        plain: what of its state is no tensor.
    """

    def __init__(self, reader: CheckpointReader, plain: Mapping[str, Any], replicas: int) -> None:
        self._reader, self.plain = reader, plain
        # There are no more replicas than tensors, whatever the checkpoint says.
        saved = min(int(plain.get("replicas", 1)), len(reader.manifest.tensors))
        self._replicas, self._saved_replicas = replicas, saved

    def was_saved_by(self, plan: Plan) -> bool:
        """Return whether a plan wrote the checkpoint."""
        return self._reader.manifest.plan == dump(plan)

    def refuse_other_weights(self, weights: Mapping[str, str]) -> None:
        """Refuse a checkpoint that has weights which the model does not have: what it lacks is found by reading.

        Args:
            weights: the model's names of its weights and buffers, as ``state_dict`` has them.

        Raises:
            PolylaneError: the checkpoint is of another model.
        """
        manifest = self._reader.manifest
        for name, global_name in manifest.weights.items():
            if name not in weights:
                saved = manifest.tensors[manifest.variants_of(global_name)[0]]
                raise PolylaneError(
                    f"checkpoint {self._reader.folder}: has {name} in the shape {list(saved.shape)}, expected no such "
                    "weight: it is of another model"
                )

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of a name, for all replicas or for each."""
        tensors = self._reader.manifest.tensors
        return name in tensors or f"{name.partition('@')[0]}@0" in tensors or name.partition("@")[0] in tensors

    def read_whole(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU."""
        return self._reader.read_whole(name)

    def fill(self, name: str, region: Region, local: Tensor) -> None:
        """Fill a worker's part of a tensor.

        Args:
            name: global name of the tensor; with ``@`` and the number of the replica whose own it is.
            region: the part of the tensor that this worker holds.
            local: the worker's tensor, which is overwritten.

        Raises:
            PolylaneError: the checkpoint does not have it, in another shape or dtype, or is damaged.
        """
        # In this order: the replica's own value, one that all had, a mean of the replicas there were.
        common, _, variant = name.partition("@")
        variants = self._variants(common)
        if variant and self._replicas == len(variants):
            self._read(name, region, local)
        elif common in self._reader.manifest.tensors or not variants:
            self._read(common, region, local)
        elif local.is_floating_point() or local.is_complex():
            with torch.no_grad():
                local.copy_(self._sum(variants, region, local) / len(variants))
        else:
            self._read(variants[0], region, local)

    def fill_sum(self, name: str, replica: int, region: Region, local: Tensor) -> bool:
        """Fill a worker's part of a tensor of which the sum over replicas counts; return whether it has any.

        Args:
            name: global name of the tensor, without the number of a replica.
            replica: number of this worker's replica.
            region: the part of the tensor that this worker holds.
            local: the worker's tensor, which is overwritten.
        """
        variants = self._variants(name)
        if self._replicas == self._saved_replicas:
            if f"{name}@{replica}" not in variants:
                return False
            self._read(f"{name}@{replica}", region, local)
            return True
        if not variants or replica:
            return False
        with torch.no_grad():
            local.copy_(self._sum(variants, region, local))
        return True

    def _variants(self, name: str) -> list[str]:
        tensors = self._reader.manifest.tensors
        return [variant for r in range(self._saved_replicas) if (variant := f"{name}@{r}") in tensors]

    def _sum(self, names: list[str], region: Region, local: Tensor) -> Tensor:
        # In double precision: the mean of equal values must be that value, whatever their number.
        total = torch.zeros_like(local, dtype=torch.complex128 if local.is_complex() else torch.float64)
        for name in names:
            part = torch.empty_like(local)
            self._read(name, region, part)
            total += part
        return total

    def _read(self, name: str, region: Region, local: Tensor) -> None:
        if not self.has(name):
            signature = f"{list(region.shape)} of {local.dtype}"
            raise PolylaneError(
                f"checkpoint {self._reader.folder}: does not have {name}, expected in the shape {signature}: it is of "
                "another model or training"
            )
        saved = self._reader.find(name)
        if local.is_complex() and local.is_conj():
            raise PolylaneError(f"{name} is a lazy conjugate, which nothing can be read into: resolve_conj() it first")
        target = HeldTensor(name, region, local).as_real()
        if saved.shape != target.region.shape:
            raise PolylaneError(
                f"checkpoint {self._reader.folder}: has {name} in the shape {list(saved.shape)}, expected "
                f"{list(target.region.shape)}: it is of another model"
            )
        if saved.is_complex != target.is_complex:
            kinds = ("real", "complex")
            raise PolylaneError(
                f"checkpoint {self._reader.folder}: has {name} in {kinds[saved.is_complex]} numbers, expected "
                f"{kinds[target.is_complex]} ones: it is of another model"
            )
        # Files are read into memory of the CPU; pieces of a vector are views of it, for which it must be contiguous.
        on_cpu = target.local if target.local.device.type == "cpu" else torch.empty_like(target.local, device="cpu")
        in_place = target.region.span is None or on_cpu.is_contiguous()
        filled = on_cpu if in_place else torch.empty(on_cpu.shape, dtype=on_cpu.dtype)
        self._reader.fill(name, filled, target.region.pieces)
        if filled is not target.local:
            with torch.no_grad():
                target.local.copy_(filled)
