"""Gradient synchronization interface of a job; the base class is plain data parallelism, synchronous in every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from polylane.runtime.plain_data.serialization import serializable
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.runtime.transport.protocol import Transport, TransportCounters


@serializable
class CollectiveCall(Enum):
    """A method of a job that all workers call, dedicated parameter servers too; its value is the method's name."""

    EVALUATE = "evaluate"
    WHOLE_GRADIENTS = "whole_gradients"
    STATE_DICT = "state_dict"
    SAVE = "save"
    UPDATES = "updates"
    GATHERED = "gathered"
    CLOSE = "close"


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer that steps in this process.

    Attributes:
        optimizer: the optimizer of the first objective.
        parameters: the parameters that it trains, by name: this worker's shards, or full ones on a parameter server.
        count_updates: returns the number of updates made so far.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    count_updates: Callable[[], int]


class GradientSync:
    """How replicas synchronize; in this base the step's program all-reduces gradients, and nothing is left to do.

    Args:
        transport: connects all training workers, not dedicated parameter servers.

    Attributes:
        max_steps_in_flight: upper bound on steps whose reports a worker has not waited for yet.
        loss_ranks: ranks whose losses are summed to the step's loss without waiting for others; None: all ranks.
        staleness: updates by others between reading the weights of this worker's last step and its own update.
        weights_differ: whether this worker's weights may differ now from those of its stage's other replicas.
    """

    max_steps_in_flight = 1
    weights_differ = False
    loss_ranks: Sequence[int] | None = None
    staleness = 0

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def is_replica_local(self, objective: str) -> bool:
        """Return whether the next step of an objective uses each replica's own gradients, without an all-reduce."""
        return False

    def update_weights(self, objective: str, update: ObjectiveUpdate, samples: bool) -> None:
        """Update the weights with the gradients of a step.

        Args:
            objective: name of the objective whose step this is.
            update: optimizer step of the objective; the step's gradients are in its parameters.
            samples: whether this replica had any samples in the batch.
        """
        update.update_weights(samples)

    def after_step(self, objective: str, samples: Sequence[int]) -> None:
        """Synchronize replicas after an optimizer step, if the plan's interval is over.

        Args:
            objective: name of the objective whose step it was.
            samples: number of samples of each replica in the batch; empty without replica-local steps.
        """

    def stepping_optimizers(self) -> list[LocalOptimizer] | None:
        """Return the first objective's optimizers of the parameter servers in this process; the list may be empty.

        Returns None without parameter servers: then the workers' own optimizers step.
        """
        return None

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context manager: temporarily load the replica-averaged weights; a collective of all workers."""
        yield

    def load_summed_gradients(self, objective: str) -> None:
        """Replace this worker's gradients by those that the optimizer used in the last step."""

    def server_updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        """Return the update log of every parameter server, by its number; a collective of all workers."""
        return ()

    def server_counters(self) -> tuple[TransportCounters, ...]:
        """Return the counters of this synchronization's own transports, beside the job's."""
        return ()

    def broadcast_result(self, call: CollectiveCall, value: Any) -> None:
        """Send the result of a collective call from the training workers to the dedicated parameter servers.

        Args:
            call: the method that all workers are in.
            value: the call's result, a plain value that is equal on all training workers.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every process's plain value, by rank, dedicated servers included; a collective of all of them."""
        return self._transport.all_gather_object(value)

    @property
    def server_parameters(self) -> Collection[str]:
        """Names of the parameters that servers keep up to date; none without parameter servers."""
        return ()

    def collect_state(self, replica: int) -> WorkerState:
        """Return what this synchronization adds to a checkpoint, beside weights and optimizers.

        Args:
            replica: number of this worker's replica.
        """
        return WorkerState()

    def restore_state(self, saved: SavedState, replica: int) -> None:
        """Resume this synchronization from a checkpoint, after weights and optimizers are restored.

        Args:
            saved: the checkpoint, as this worker reads it.
            replica: number of this worker's replica.
        """

    def blame_local_server(self) -> AbstractContextManager[None]:
        """Context manager: re-raise PeerLost as the failure of a local parameter server, if that caused it."""
        return nullcontext()

    def leave(self) -> None:
        """Say that this worker takes no more steps, to all who would wait for them."""

    def close(self) -> None:
        """End this worker's part, after :meth:`leave`."""
