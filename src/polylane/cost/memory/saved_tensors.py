"""Saved tensors: what the operators of a graph save for the backward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polylane.cost.memory.operator_trial import SavedTensor, TensorForm

# A tensor of the graph: the name of its node (a placeholder's role, "parameter:fc.weight", or an operator's name) and
# the index among its outputs.
Key = tuple[str, int]

# Prefixes of placeholders that are in memory anyway, whether an operator saves them or not.
HELD = ("parameter:", "buffer:", "constant:")


@dataclass(frozen=True)
class BackendSetting:
    """Everything that decides what operators save for backward.

    Attributes:
        samples: local samples of one microbatch.
        device: backend whose kernels run, "cpu" or "cuda".
        autocast: dtype of torch.autocast, or None without it.
        dtype: replaces float32 in the graph, parameters included; None to keep it.
        fused_attention: whether attention may use a fused kernel that does not save the scores.
        sync_batch_norm: whether batch normalization sums its statistics over replicas.
    """

    samples: int
    device: str = "cpu"
    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    fused_attention: bool = True
    sync_batch_norm: bool = False


@dataclass(frozen=True)
class SavedByOperator:
    """What one operator saves for backward, and the memory that it takes while it runs.

    Attributes:
        at: position of its node in the unsharded graph.
        input_keys: tensors that it reads, in the order of its arguments, each once.
        output_keys: tensors that it returns, in order.
        saved_inputs, saved_outputs: indices of the inputs and outputs that it saves.
        own_tensors: further memory that it saves, such as masks and statistics.
        forward_peak: most bytes alive while it runs, beyond inputs, outputs and saved tensors.
        gradient_origins: for every input: None for no gradient; ("output", j) if it shares the storage of output j's
            gradient; ("new", bytes) if it has its own.
        backward: most bytes alive in its backward pass, beyond the outputs' gradients and saved tensors.
        is_known: False if it could not be run, and all its inputs and outputs are assumed saved.
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
        """Bytes of the saved memory that is neither input nor output."""
        return sum(own.bytes for own in self.own_tensors)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the inputs and outputs that it saves."""
        return (*(self.input_keys[i] for i in self.saved_inputs), *(self.output_keys[j] for j in self.saved_outputs))


@dataclass(frozen=True)
class SavedTensors:
    """What all operators of a graph save for backward, at one number of samples.

    Attributes:
        setting: samples, device and dtypes of the trace.
        nodes: saved tensors by name of the operator, in execution order.
        forms: form of every tensor of the graph.
        storage_of: tensor -> first tensor with the same storage; itself if it has its own.
        storage_bytes: bytes of the storage of every tensor that has its own.
        loss_key: key of the loss; None if no tensor of the graph is the loss.
    """

    setting: BackendSetting
    nodes: Mapping[str, SavedByOperator]
    forms: Mapping[Key, TensorForm]
    storage_of: Mapping[Key, Key]
    storage_bytes: Mapping[Key, int]
    loss_key: Key | None

    def saved_bytes(self) -> int:
        """Return the bytes that a forward pass of the graph saves, without parameters, buffers and constants.

        The batch counts where an operator saves it.
        """
        kept = {self.storage_of[key] for node in self.nodes.values() for key in node.keys}
        own = sum(node.own_bytes for node in self.nodes.values())
        return own + sum(self.storage_bytes[key] for key in kept if not key[0].startswith(HELD))
