"""Keeping: what the operators of a graph keep for the backward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polylane.graph.trial import Form, Own

# A tensor of the graph: the name of its node (a placeholder's role, "parameter:fc.weight", or an operator's name) and
# which of the tensors that it gives.
Key = tuple[str, int]

# Placeholders that are there anyway, whether an operator keeps them or not.
HELD = ("parameter:", "buffer:", "constant:")


@dataclass(frozen=True)
class Setting:
    """What decides which memory operators keep.

    Attributes:
        samples: in hand.
        device: whose kernels: "cpu" or "cuda".
        autocast: the dtype of autocast, or None.
        dtype: of all that is of single precision in the graph (parameters too), or None for what it has.
        fused: whether attention may run as one kernel that does not keep its scores.
        shared: whether batch normalization sums over replicas.
    """

    samples: int
    device: str = "cpu"
    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    fused: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Saved:
    """What one operator keeps, and the memory that it needs meanwhile.

    Attributes:
        at: position of its node in the graph.
        reads: the tensors that it reads, in the order of its arguments, each once.
        gives: the tensors that it gives.
        inputs, outputs: numbers of those of them that it keeps.
        own: what it keeps of its own making.
        forward: bytes alive at most while it runs, beyond what it reads, gives and keeps.
        gradients: for every tensor that it reads: None for no gradient; ("output", j) where the gradient lies in the
            memory of the gradient of what it gives as the j-th; ("new", bytes).
        backward: bytes alive at most in its backward pass, beyond the gradients of what it gives and what was kept.
        known: False where it could not be run, so that all it reads and gives is taken to be kept.
    """

    at: int
    reads: tuple[Key, ...]
    gives: tuple[Key, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    own: tuple[Own, ...] = ()
    forward: int = 0
    gradients: tuple[tuple[str, int] | None, ...] = ()
    backward: int = 0
    known: bool = True

    @property
    def own_bytes(self) -> int:
        """Bytes of what it keeps of its own making."""
        return sum(own.bytes for own in self.own)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The tensors that it reads or gives and keeps."""
        return (*(self.reads[i] for i in self.inputs), *(self.gives[j] for j in self.outputs))


@dataclass(frozen=True)
class Keeping:
    """What all operators of a graph keep, at one number of samples.

    Attributes:
        setting: for which it holds.
        nodes: by name, in the order in which they run.
        forms: of every tensor.
        places: every tensor -> the tensor in whose memory it lies: itself, where it does not share another one's.
        bytes: of the memory of every tensor that has its own.
        loss: the tensor that is the loss; None where that is no tensor of the graph.
    """

    setting: Setting
    nodes: Mapping[str, Saved]
    forms: Mapping[Key, Form]
    places: Mapping[Key, Key]
    bytes: Mapping[Key, int]
    loss: Key | None

    def kept(self) -> int:
        """Bytes that a forward pass of the whole graph leaves behind; parameters, buffers and constants do not count.

        The batch does, where an operator keeps it.
        """
        kept = {self.places[key] for node in self.nodes.values() for key in node.keys}
        own = sum(node.own_bytes for node in self.nodes.values())
        return own + sum(self.bytes[key] for key in kept if not key[0].startswith(HELD))
