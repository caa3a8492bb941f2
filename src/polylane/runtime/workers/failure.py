"""Worker failures: the report that a worker sends, root cause of several reports, and the exception to raise."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from polylane.diagnosis.stacks import Frame
from polylane.errors import ActionFailed, PeerLost, PolylaneError, WorkerFailed, format_value
from polylane.faults import explain_fault
from polylane.runtime.workers.out_of_memory import MemoryNeed, OutOfMemory, count_system_kills
from polylane.runtime.workers.system_limits import explain_refusal

# Parts of the messages with which gloo, NCCL and c10d's store report a lost peer (torch 2.9 to 2.14).
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

# Files of torch's that hand a call over to polylane, or back from it to an operator.
_HAND_OVER = (
    "/torch/overrides.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
    "/torch/_functorch/functional_call.py",
    "/torch/_ops.py",
    "/torch/nn/utils/stateless.py",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's failure, reported by itself or seen by the parent; plain data that is pickled through a pipe.

    Attributes:
        rank: rank of the worker that failed.
        error_type: class name of the exception, or name of the signal.
        error_message: message of the exception, or a sentence about the exit.
        traceback: formatted traceback of the exception; empty without one.
        is_echo: whether it is only the consequence of another worker's failure.
        bad_input: the pickled PolylaneError, if the user's input caused the failure; else None.
        place: stage, microbatch, module and source line that failed, as far as they are known; each may be None.
    """

    rank: int
    error_type: str
    error_message: str
    traceback: str = ""
    is_echo: bool = False
    bad_input: bytes | None = None
    place: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, skip_frames: int = 0) -> Failure:
        """Build the report of a worker that raised an exception.

        Args:
            rank: rank of the worker that raised.
            error: exception that ended the worker's function.
            skip_frames: number of outermost frames of the launcher, which a traceback without a line of the user's
                leaves out.
        """
        # Cleaning up after a failed action often fails as well: report the failure of the action.
        failed = next((link for link in reversed(_exception_chain(error)) if isinstance(link, ActionFailed)), None)
        root = error if failed is None else failed.__cause__ or failed
        names = () if failed is None else ("stage", "microbatch", "module", "source")
        place = {name: getattr(failed, name) for name in names}
        if isinstance(root, SystemExit):
            return cls.of_system_exit(rank, root)
        root = explain_refusal(root, rank, **place) or root
        if (fault := explain_fault(error if failed is None else failed, f"worker {rank}")) is not None:
            return cls(rank, type(root).__name__, str(fault))
        return cls(
            rank=rank,
            error_type=type(root).__name__,
            error_message=str(root),
            traceback=_format_traceback(root, skip_frames if root is error else 0),
            is_echo=is_peer_loss(root),
            bad_input=_pickle_error(root) if isinstance(root, PolylaneError) else None,
            place=place,
        )

    @classmethod
    def of_system_exit(cls, rank: int, leaving: SystemExit) -> Failure:
        """Build the report of a worker that was left by ``sys.exit``, whatever its code: its work was not done.

        Args:
            rank: rank of the worker.
            leaving: exception that ended the worker's function.
        """
        frames = traceback.extract_tb(leaving.__traceback__)
        location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        return cls(
            rank, "SystemExit", f"sys.exit({format_exit_code(leaving)}){location} ended it before its work was done"
        )

    @classmethod
    def of_exit(cls, rank: int, code: int | None, kills_before: int | None = None) -> Failure:
        """Build the report on a worker that ended without one: killed by a signal (negative code), or os._exit.

        Args:
            rank: rank of the worker that ended.
            code: exit code of its process; negative for a signal; None where nobody could see it.
            kills_before: how many processes the system had killed for want of memory when the worker started.
        """
        if code is None:
            return cls(rank, "unseen", "it ended, and how could not be determined (killed, or left by os._exit)")
        if code >= 0:
            return cls(
                rank, "SystemExit", f"it ended without a result (exit code {code}), as by os._exit({code}) in your code"
            )
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL" and kills_before is not None and count_system_kills() > kills_before:
            error = OutOfMemory(MemoryNeed(rank, was_killed=True))
            return cls(rank, "OutOfMemory", str(error), bad_input=_pickle_error(error))
        hint = ", which is also what the system does when memory runs out" if name == "SIGKILL" else ""
        return cls(rank, name, f"it was killed by {name}{hint}")

    def to_exception(self) -> PolylaneError | WorkerFailed:
        """Return the exception to raise in the parent: the worker's own PolylaneError, or else a WorkerFailed."""
        if self.bad_input is not None:
            error = pickle.loads(self.bad_input)
            assert isinstance(error, PolylaneError)
            return error
        return WorkerFailed(self.rank, self.error_type, self.error_message, self.traceback, **self.place)


def format_exit_code(leaving: SystemExit) -> str:
    """Format what ``sys.exit`` was called with, shortened; empty for nothing."""
    return "" if leaving.code is None else format_value(leaving.code)


def find_root_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the first failure that is not an echo of another one; the first of all if there are only echoes."""
    ordered = list(failures)
    return next((failure for failure in ordered if not failure.is_echo), ordered[0] if ordered else None)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an exception, or one in its chain, is only the echo of another worker's failure."""
    return any(isinstance(link, PeerLost) or looks_like_peer_loss(link) for link in _exception_chain(error))


def looks_like_peer_loss(error: BaseException) -> bool:
    """Return whether a backend's exception reports a lost peer: a bare RuntimeError is recognised by its words."""
    if not isinstance(error, RuntimeError | ConnectionError):
        return False
    return isinstance(error, ConnectionError) or any(words in str(error) for words in _PEER_LOSS_WORDS)


def _exception_chain(error: BaseException) -> list[BaseException]:
    """Return the exception and its causes and contexts, the latest first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is earlier for earlier in chain):
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _format_traceback(error: BaseException, skip_frames: int) -> str:
    """Return a traceback that begins in the user's own code, as if their lines had called torch's.

    Where no line of the user's is there, it begins behind some frames.
    """
    frames = _walk_frames(error.__traceback__)
    begin = next((at for at, frame in enumerate(frames) if _is_users(frame)), None)
    start = min(skip_frames, len(frames)) if begin is None else begin
    shown = traceback.TracebackException(type(error), error, frames[start] if start < len(frames) else None)
    if begin is not None:
        shown.stack[:] = [
            frame
            for frame in shown.stack
            if not Frame(frame.filename, 0, "").is_own and not frame.filename.endswith(_HAND_OVER)
        ]
    return "".join(shown.format())


def _walk_frames(frame: TracebackType | None) -> list[TracebackType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    return frames


def _is_users(frame: TracebackType) -> bool:
    return Frame(frame.tb_frame.f_code.co_filename, 0, "").is_users


def _pickle_error(error: PolylaneError) -> bytes:
    """Return a pickle of the error; of a plain PolylaneError with its message if it does not survive pickling."""
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        if type(copy) is type(error) and str(copy) == str(error):
            return data
    except Exception:  # a user's subclass may fail in any way on the way through pickle
        pass
    return pickle.dumps(PolylaneError(str(error)))
