"""Gradient synchronization as a job sees it: the interface, and the plain rule, where every step sums gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polylane.runtime.transport.serialization import serializable

if TYPE_CHECKING:
    from polylane.runtime.parameters.update import ObjectiveUpdate
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
        optimizer: of the first objective.
        parameters: that it trains, by name: this worker's parts of them, or whole ones on a parameter server.
        count_updates: how many it has made.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    count_updates: Callable[[], int]


class GradientSync:
    """How replicas agree, as a job sees it; gradients are summed by the step's program, and nothing is left to do.

    Args:
        transport: between the workers that train.

    Attributes:
        max_steps_in_flight: most steps in flight: reports of steps that a worker may not have waited for yet.
        loss_ranks: ranks whose losses make up that of a step, where those of others are not waited for; None: all.
        staleness: updates by others between reading the weights of this worker's last step and its own update.
        weights_differ: whether this worker's weights may be others than those of its stage's other replicas now.
    """

    max_steps_in_flight = 1
    weights_differ = False
    loss_ranks: Sequence[int] | None = None
    staleness = 0
    _transport: Transport

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def is_replica_local(self, objective: str) -> bool:
        """Whether each replica takes the next step of an objective with its own gradients only."""
        return False

    def update_weights(self, objective: str, trainer: ObjectiveUpdate, samples: bool) -> None:
        """Turn the gradients of a step into new weights.

        Args:
            objective: name of the objective whose step this is.
            trainer: its optimizer, with the gradients of the step in its parameters.
            samples: whether this replica had any samples in the batch.
        """
        trainer.update_weights(samples)

    def after_step(self, objective: str, samples: Sequence[int]) -> None:
        """After an optimizer step: agree, where it is time.

        Args:
            objective: name of the objective whose step it was.
            samples: number of samples of each replica in the batch; empty where all replicas always go together.
        """

    def stepping_optimizers(self) -> list[LocalOptimizer] | None:
        """The first objective's optimizers of the parameter servers in this process, which may be none.

        None where there are no parameter servers: the workers' own optimizers step.
        """
        return None

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context manager: temporarily load the weights on which all replicas agree; a collective of all workers."""
        yield

    def load_summed_gradients(self, objective: str) -> None:
        """Let this worker's gradients of the last step be those that the optimizer took."""

    def server_updates(self) -> tuple[tuple[ServerUpdate, ...], ...]:
        """The updates of every parameter server, in its order; a collective of all workers."""
        return ()

    def server_counters(self) -> tuple[TransportCounters, ...]:
        """Counters of the transports that the rule has of its own, beside the job's."""
        return ()

    def broadcast_result(self, call: CollectiveCall, value: Any) -> None:
        """Send the result of a collective call from the training workers to the dedicated parameter servers.

        Args:
            call: the method that all workers are in.
            value: a plain value, equal on all training workers.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's plain value, by rank, of those that only serve as well; all must ask for it."""
        return self._transport.all_gather_object(value)

    def blame_local_server(self) -> AbstractContextManager[None]:
        """Context manager: re-raise PeerLost as the local parameter server's failure that caused it, if one did."""
        return nullcontext()

    def close(self) -> None:
        """This worker takes no more steps."""
