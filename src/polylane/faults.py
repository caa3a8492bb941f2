"""Faults: exceptions that only a mistake of polylane's own raises, as one sentence, with the traceback in a file.

What a user can mend is a :class:`PolylaneError`; what the user's code or a library raises keeps its traceback. A
KeyError out of polylane's own code is neither: its lines tell a user nothing, and whoever mends it needs them all.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from polylane.errors import ActionFailed, PolylaneError, clean_text, describe_error, describe_place

P = ParamSpec("P")
R = TypeVar("R")

# What is raised for no mistake but one in the code that raises it.
_KINDS = (AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError, ZeroDivisionError)
# Of these, what operators raise for values of the user's: an index that an embedding does not have.
_OF_VALUES = (IndexError, TypeError, ZeroDivisionError)

_PACKAGE = Path(__file__).parent
# What runs as an operator of the user's model.
_OPERATORS = tuple(str(_PACKAGE / folder) + os.sep for folder in ("placement/kernels", "graph/operators"))
_ENTRIES = ("polylane/faults.py", "progress/script_calls.py")  # call what users call
_STANDARD = tuple(f"{folder}/" for name in ("stdlib", "platstdlib") if (folder := sysconfig.get_path(name)))


class PolylaneFault(PolylaneError):
    """A mistake of polylane's own, which no user can mend; its text says where the traceback is."""


def explain_fault(error: BaseException, doing: str) -> PolylaneFault | None:
    """Return the error for the user if an exception is a mistake of polylane's own; else None.

    It is where the innermost call, but for those of Python's own library, is polylane's, and the exception of a kind
    that no input is answered with. The traceback is written into a new file in the system's folder of temporary ones.

    Args:
        error: any exception, or an :class:`ActionFailed` with the exception as its cause.
        doing: what was being done, such as ``"polylane plan"``, in the words of a user.
    """
    failed = error if isinstance(error, ActionFailed) else None
    root = error if failed is None else failed.cause or failed
    if isinstance(root, PolylaneFault):
        return root
    if (frame := _find_fault(root)) is None:
        return None
    location = "" if failed is None else describe_place(failed.stage, failed.microbatch, failed.module, failed.source)
    line = f"polylane/{Path(frame.filename).relative_to(_PACKAGE)} line {frame.lineno}"
    return PolylaneFault(
        f"polylane itself failed in {doing}{location}: {describe_error(root)} at {line}; this is a fault of polylane: "
        f"{_keep_traceback(error)}"
    )


def _find_fault(error: BaseException) -> traceback.FrameSummary | None:
    """Return the call of polylane's own that has raised by mistake; None for any other exception."""
    if not isinstance(error, _KINDS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    while frames and _is_standard(frames[-1].filename):
        frames.pop()
    if not frames or not Path(frames[-1].filename).is_relative_to(_PACKAGE):
        return None
    frame = frames[-1]
    # A name that there is not, or a value that no message carries; arguments that a function of ours does not take.
    is_said = isinstance(error, (AttributeError, TypeError)) and (frame.line or "").startswith("raise ")
    is_of_call = isinstance(error, TypeError) and frame.name == "call" and frame.filename.endswith(_ENTRIES)
    is_of_values = isinstance(error, _OF_VALUES) and frame.filename.startswith(_OPERATORS)
    return None if is_said or is_of_call or is_of_values else frame


def _is_standard(file: str) -> bool:
    return file.startswith(("<frozen ", "<string>")) or (file.startswith(_STANDARD) and "-packages/" not in file)


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback into a file, and return the words that say where it is."""
    packages = {name: getattr(sys.modules.get(name), "__version__", "not imported") for name in ("polylane", "torch")}
    facts = {**packages, "Python": platform.python_version(), "system": platform.platform(), "command": sys.argv}
    head = "".join(f"{name}: {value}\n" for name, value in facts.items())
    text = f"{head}\n{''.join(traceback.format_exception(error))}"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="polylane-", suffix=".txt", delete=False) as file:
            file.write(clean_text(text, keep="\n\t"))
    except OSError as refused:
        return f"its traceback could not be written ({refused})"
    return f"please report it with {file.name}, which has the traceback"


def told_as_fault(doing: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that users call: a mistake of polylane's own inside is raised as a :class:`PolylaneFault`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if (fault := explain_fault(error, doing)) is None:
                    raise
            raise fault from None

        return call

    return decorate
