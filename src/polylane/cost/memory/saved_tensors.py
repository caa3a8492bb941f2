"""Keeping: what the operators of a graph keep for the backward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polylane.cost.memory.operator_trial import SavedTensor, TensorForm

# A tensor of the graph: the name of its node (a placeholder's role, "parameter:fc.weight", or an operator's name) and
# which of the tensors that it gives.
Key = tuple[str, int]

# Placeholders that are there anyway, whether an operator keeps them or not.
HELD = ("parameter:", "buffer:", "constant:")


@dataclass(frozen=True)
class BackendSetting:
    """What decides which memory operators keep.

    Attributes:
        samples: in hand.
        device: whose kernels: "cpu" or "cuda".
        autocast: the dtype of autocast, or None.
        dtype: of all that is of single precision in the graph (parameters too), or None for what it has.
        fused_attention: whether attention may run as one kernel that does not keep its scores.
        sync_batch_norm: whether batch normalization sums over replicas.
    """

    samples: int
    device: str = "cpu"
    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    fused_attention: bool = True
    sync_batch_norm: bool = False


@dataclass(frozen=True)
class SavedByOperator:
    """What one operator keeps, and the memory that it needs meanwhile.

    Attributes:
        at: position of its node in the graph.
        input_keys: the tensors that it reads, in the order of its arguments, each once.
        output_keys: the tensors that it gives.
        saved_inputs, saved_outputs: numbers of those of them that it keeps.
        own_tensors: what it keeps of its own making.
        forward_peak: bytes alive at most while it runs, beyond what it reads, gives and keeps.
        gradient_origins: for every tensor that it reads: None for no gradient; ("output", j) where the gradient lies in
            the memory of the gradient of what it gives as the j-th; ("new", bytes).
        backward: bytes alive at most in its backward pass, beyond the gradients of what it gives and what was kept.
        is_known: False where it could not be run, so that all it reads and gives is taken to be kept.
    """

    at: int
    input_keys: tuple[Key, ...]
    output_keys: tuple[Key, ...]
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    own_tensors: tuple[SavedTensor, ...] = ()
    forward_peak: int = 0
    gradient_origins: tuple[tuple[str, int] | None, ...] = ()
    backward: int = 0
    is_known: bool = True

    @property
    def own_bytes(self) -> int:
        """Bytes of what it keeps of its own making."""
        return sum(own.bytes for own in self.own_tensors)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The tensors that it reads or gives and keeps."""
        return (*(self.input_keys[i] for i in self.saved_inputs), *(self.output_keys[j] for j in self.saved_outputs))


@dataclass(frozen=True)
class SavedTensors:
    """What all operators of a graph keep, at one number of samples.

    Attributes:
        setting: for which it holds.
        nodes: by name, in the order in which they run.
        forms: of every tensor.
        storage_of: every tensor -> the tensor in whose memory it lies: itself, where it does not share another one's.
        storage_bytes: of the memory of every tensor that has its own.
        loss_key: the tensor that is the loss; None where that is no tensor of the graph.
    """

    setting: BackendSetting
    nodes: Mapping[str, SavedByOperator]
    forms: Mapping[Key, TensorForm]
    storage_of: Mapping[Key, Key]
    storage_bytes: Mapping[Key, int]
    loss_key: Key | None

    def saved_bytes(self) -> int:
        """Bytes that a forward pass of the whole graph leaves behind; parameters, buffers and constants do not count.

        The batch does, where an operator keeps it.
        """
        kept = {self.storage_of[key] for node in self.nodes.values() for key in node.keys}
        own = sum(node.own_bytes for node in self.nodes.values())
        return own + sum(self.storage_bytes[key] for key in kept if not key[0].startswith(HELD))
