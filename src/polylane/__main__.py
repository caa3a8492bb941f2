"""The process of the command line: ``polylane``, ``python -m polylane``, and each of torchrun's workers.

Imports take a second, and Ctrl-C would end one of them with its traceback, or be lost in it. Until the command itself
handles signals, one ends the process at once, with a sentence: there is nothing yet to be left in order.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; before that tie a worker of torchrun's to its agent, which may die meanwhile."""
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
    if is_heeded:
        signal.signal(signal.SIGINT, _leave)
    from polylane.runtime.workers.parent_tie import tie_to_agent

    tie_to_agent()
    from polylane.cli import main

    try:
        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:  # before the command has begun to handle it, or after it has ended
        _leave(signal.SIGINT, None)


def _leave(number: int, frame: FrameType | None) -> None:
    """End this process as Ctrl-C ends a command: with one sentence, and the exit code of the signal."""
    try:
        os.write(2, b"polylane: interrupted\n")
    finally:  # also where nobody reads it any more
        os._exit(128 + number)


if __name__ == "__main__":
    main()
