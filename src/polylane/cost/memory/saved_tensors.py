"""Saved tensors: what the operators of a graph save for the backward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polylane.cost.memory.operator_trial import OperatorTrial, TensorForm

# A tensor of the graph: the name of its node (a placeholder's role, "parameter:fc.weight", or an operator's name) and
# the index among its outputs.
Key = tuple[str, int]


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
        gathers_cast: whether what autocast casts comes cast already (ZeRO-3): no operator saves a cast of it.
    """

    samples: int
    device: str = "cpu"
    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    fused_attention: bool = True
    sync_batch_norm: bool = False
    gathers_cast: bool = False


@dataclass(frozen=True)
class SavedByOperator:
    """What one operator saves for backward, and the memory that it takes while it runs.

    Attributes:
        at: position of its node in the unsharded graph.
        input_keys: tensors that it reads, in the order of its arguments, each once.
        output_keys: tensors that it returns, in order.
        trial: what one run of it saved, and the memory that it took.
    """

    at: int
    input_keys: tuple[Key, ...]
    output_keys: tuple[Key, ...]
    trial: OperatorTrial

    @property
    def own_bytes(self) -> int:
        """Bytes of the saved memory that is neither input nor output."""
        return sum(self.trial.own_tensors)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the inputs and outputs that it saves."""
        trial = self.trial
        return (*(self.input_keys[i] for i in trial.saved_inputs), *(self.output_keys[j] for j in trial.saved_outputs))


@dataclass(frozen=True)
class SavedTensors:
    """What all operators of a graph save for backward, at one number of samples.

    Attributes:
        nodes: saved tensors by name of the operator, in execution order.
        forms: form of every tensor of the graph.
        storage_of: tensor -> first tensor with the same storage; itself if it has its own.
        storage_bytes: bytes of the storage of every tensor that has its own.
        loss_key: key of the loss; None if no tensor of the graph is the loss.
        repeatable: names of the operators that may run a second time on one rank.
    """

    nodes: Mapping[str, SavedByOperator]
    forms: Mapping[Key, TensorForm]
    storage_of: Mapping[Key, Key]
    storage_bytes: Mapping[Key, int]
    loss_key: Key | None
    repeatable: frozenset[str] = frozenset()
