"""``polylane.launch``: a function on several workers, as from a notebook; what it returns and prints comes back.

in the workers                     where it was called
what rank 0 prints                 printed, as it comes
what the function returns          returned, of rank 0; tensors on the CPU
an exception                       raised, with the worker's traceback
the end, wherever they are         Ctrl-C, or a notebook's interrupt
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

from polylane.errors import PolylaneError, WorkerFailed, describe_error
from polylane.faults import told_as_fault
from polylane.plan.plan import AnyPlan
from polylane.runtime.workers.launch_environment import is_launched
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.script.session import ScriptSession, current_session, running_session

STREAMS = ("stdout", "stderr")


@told_as_fault("polylane.launch")
def launch(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int = 4,
    plan: str | AnyPlan | None = None,
    **options: Any,
) -> Any:
    """Run a function on several workers of this host, and return what it returns.

    The workers are copies of this process, a notebook's kernel for example: they have all that was defined and loaded
    so far, and what they change in it is lost when they end. ``polylane.prepare`` in the function splits the training
    over them.

    Args:
        function: what every worker runs; a notebook's cell may define it.
        arguments: positional arguments of the function.
        workers: number of workers that run it.
        plan: how prepare() splits the training: a line, "auto", or a plan. Default: data=N on N workers; one worker
            trains as without polylane.
        options: keyword arguments of the function.

    Returns:
        What the function returns on rank 0. It is pickled; tensors arrive on the CPU.

    Raises:
        PolylaneError: this process cannot be forked, or a worker raised one.
        WorkerFailed: a worker raised another exception, whose traceback is in its text, or was killed.

    Examples:
        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> inputs, labels = torch.ones(16, 8), torch.zeros(16, dtype=torch.long)
        >>> def train(steps):
        ...     net, sgd = polylane.prepare(model, optimizer)
        ...     for step in range(steps):
        ...         sgd.zero_grad()
        ...         loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        ...         loss.backward()
        ...         sgd.step()
        ...     return loss.item(), net.state_dict()
        >>> loss, state = polylane.launch(train, 5, workers=2, plan="data=2")
        >>> list(state)
        ['weight', 'bias']
    """
    _refuse_workers()
    plan = plan or current_session().plan or (f"data={workers}" if workers > 1 else None)

    def run(context: WorkerContext) -> bytes:
        for name in STREAMS:
            setattr(sys, name, _MessageStream(context, name))
        session = ScriptSession(plan, context.world)
        with running_session(session):
            content = _encode(function(*arguments, **options))
            for loop in session.loops:
                loop.close()
        return b"" if context.rank else content

    try:
        results = fork_workers(run, workers, _print_message)
    except (PolylaneError, WorkerFailed, KeyboardInterrupt) as error:
        # Frames of polylane's own say nothing that its text does not.
        raise error.with_traceback(None) from None
    return torch.load(io.BytesIO(results[0]), map_location="cpu", weights_only=False)


def _refuse_workers() -> None:
    """Refuse to start workers where launch() has been called by one of several workers, or where they cannot use CUDA.

    Raises:
        PolylaneError: this process is a worker itself, or has started CUDA.
    """
    if is_launched() or current_session().world is not None:
        raise PolylaneError(
            "launch() starts workers of its own, and was called by a worker: call its function without it"
        )
    if torch.cuda.is_initialized():
        raise PolylaneError(
            "launch() copies this process, which has started CUDA, and a copy cannot use it: restart the kernel, and "
            'build tensors and models on the CPU ("cuda" in the function alone) until launch() is called'
        )


def _encode(value: Any) -> bytes:
    """Return a value as bytes; on every worker, for a result that is still to be computed is computed by all."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PolylaneError(
            f"launch() pickles what its function returns, here a {type(value).__name__}, and that cannot be pickled "
            f"({describe_error(error)}): return numbers, tensors or a state_dict()"
        ) from None
    return content.getvalue()


class _MessageStream(io.TextIOBase):
    """A text stream of a worker: rank 0's text is sent to the parent, that of others is dropped."""

    encoding = "utf-8"

    def __init__(self, context: WorkerContext, name: str) -> None:
        self._context, self._name = context, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._context.rank == 0:
            self._context.send_message({"stream": self._name, "text": text})
        return len(text)


def _print_message(rank: int, message: dict[str, Any]) -> None:
    stream = getattr(sys, message["stream"])
    stream.write(message["text"])
    stream.flush()
