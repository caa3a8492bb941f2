"""How a worker failed: the report it sends, which of several reports is the cause, and the error made of it."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from polylane.errors import ActionFailed, PeerLost, PolylaneError, WorkerFailed

# What gloo, NCCL and the store of c10d say when a peer is gone (torch 2.9 to 2.13).
_PEER_LOSS_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "connectFullMesh failed",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "wait timeout after",
    "recvValue failed",
    "recvBytes failed",
    "sendBytes failed",
    "failed to recv, got 0 bytes",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's end, as it reports it itself or as the parent sees it. Plain data: it travels through a pipe.

    Attributes:
        rank: the worker.
        error_type, error_message, traceback: see :class:`~polylane.errors.WorkerFailed`.
        is_echo: whether it is only the consequence of another worker's end.
        bad_input: the pickled PolylaneError, where the user's input was at fault.
        stage, microbatch, module, source: where, if the worker knew.
    """

    rank: int
    error_type: str
    error_message: str
    traceback: str = ""
    is_echo: bool = False
    bad_input: bytes | None = None
    stage: int | None = None
    microbatch: int | None = None
    module: str | None = None
    source: str | None = None

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, skip_frames: int = 0) -> Failure:
        """The report of a worker that raised.

        Args:
            rank: the worker.
            error: what it raised.
            skip_frames: how many of the outermost frames are the launcher's own, of no use to the user.
        """
        # Cleaning up after a failed action often fails as well: the action's failure is the one to tell of.
        place = next((link for link in reversed(_exception_chain(error)) if isinstance(link, ActionFailed)), None)
        root = error if place is None else place.__cause__ or place
        return cls(
            rank=rank,
            error_type=type(root).__name__,
            error_message=str(root),
            traceback=_format_traceback(root, skip_frames if root is error else 0),
            is_echo=is_peer_loss(root),
            bad_input=_pickle_error(root) if isinstance(root, PolylaneError) else None,
            stage=None if place is None else place.stage,
            microbatch=None if place is None else place.microbatch,
            module=None if place is None else place.module,
            source=None if place is None else place.source,
        )

    @classmethod
    def of_exit(cls, rank: int, code: int) -> Failure:
        """The report on a worker that ended without one: killed by a signal (a negative code), or left by os._exit."""
        if code >= 0:
            return cls(rank, "SystemExit", f"it ended without a result (exit code {code})")
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ", which is also what the system does when memory runs out" if name == "SIGKILL" else ""
        return cls(rank, name, f"it was killed by {name}{hint}")

    def to_exception(self) -> PolylaneError | WorkerFailed:
        """What to raise in the parent: the user's own PolylaneError again, or else a WorkerFailed."""
        if self.bad_input is not None:
            error = pickle.loads(self.bad_input)
            assert isinstance(error, PolylaneError)
            return error
        return WorkerFailed(
            self.rank,
            self.error_type,
            self.error_message,
            self.traceback,
            stage=self.stage,
            microbatch=self.microbatch,
            module=self.module,
            source=self.source,
        )


def find_root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The first failure that is no echo of another one; the first of all where there are only echoes."""
    ordered = list(failures)
    return next((failure for failure in ordered if not failure.is_echo), ordered[0] if ordered else None)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception is only the echo of another worker's end, by itself or by what led to it."""
    return any(isinstance(link, PeerLost) or looks_like_peer_loss(link) for link in _exception_chain(error))


def looks_like_peer_loss(error: BaseException) -> bool:
    """Whether a backend's own exception says that a peer is gone: they are bare RuntimeErrors, told apart by words."""
    if not isinstance(error, RuntimeError | ConnectionError):
        return False
    return isinstance(error, ConnectionError) or any(words in str(error) for words in _PEER_LOSS_WORDS)


def _exception_chain(error: BaseException) -> list[BaseException]:
    """The exception, what it was raised from or while handling, and so on: the latest first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is earlier for earlier in chain):
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _format_traceback(error: BaseException, skip_frames: int) -> str:
    frames: TracebackType | None = error.__traceback__
    for _ in range(skip_frames):
        frames = frames.tb_next if frames is not None else None
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickle_error(error: PolylaneError) -> bytes:
    """The error such that the parent can make it again: as it is, or where it does not pickle, its sentence."""
    try:
        data = pickle.dumps(error)
        same = pickle.loads(data)
        if type(same) is type(error) and str(same) == str(error):
            return data
    except Exception:  # a user's subclass may fail in any way on the way through pickle
        pass
    return pickle.dumps(PolylaneError(str(error)))
