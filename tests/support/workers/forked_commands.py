"""Python command lines, each in a process of its own that starts warm: a fork of the test process, where torch and
polylane are imported already. A cold process takes four seconds for that, which are under test in few places.

What is run is what Python would run: a module, a file or a line of code as ``__main__``, with streams, signals, exit
codes, warnings, tracebacks and exit handlers as from the start of an interpreter. What a forked process is not: the
modules that the test process has imported are there, as it has changed them; torch has one thread, unless it is told
otherwise; and at the end the interpreter is left without taking it apart. Tests of these things start a process of
``subprocess``.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import io
import logging
import multiprocessing.process
import multiprocessing.util
import os
import pkgutil
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence, Set
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

SECONDS = 120

_start_cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawn_cold = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_ITS_PARAMETERS = inspect.signature(_start_cold)


@cache
def warm() -> None:
    """Import what the commands import when they are called, and do what torch does once, at a first capture."""
    import scipy.optimize
    import scipy.sparse  # noqa: F401
    import sympy.codegen.ast  # noqa: F401
    import torch.distributed.run
    import torch.utils.serialization.config

    import polylane
    from polylane.graph.capture.capture import capture

    for each in pkgutil.walk_packages(polylane.__path__, "polylane."):
        if not each.name.endswith(("__main__", "counter_kernel")):  # which needs Triton
            importlib.import_module(each.name)
    torch.overrides.get_overridable_functions()
    model = torch.nn.Sequential(
        torch.nn.Conv1d(1, 2, 3), torch.nn.BatchNorm1d(2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    trainable = [name for name, _ in model.named_parameters()]
    capture(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        (torch.zeros(4, 1, 6), torch.zeros(4).long()),
        trainable=trainable,
    )


def run(
    command: Sequence[str], timeout: float = SECONDS, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a Python command line that starts warm, with what it prints on stdout and stderr, as text."""
    with start(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """`subprocess.Popen` of a Python command line that starts warm, with pipes for what it prints, as text."""
    warm()
    return Warm([str(word) for word in command], **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def spawn(path: str, command: Sequence[bytes | str], descriptors: Sequence[int]) -> int:
    """In place of ``multiprocessing.util.spawnv_passfds``: a new process of ``multiprocessing`` that starts warm."""
    words = [os.fsdecode(word) for word in command]
    if "--multiprocessing-fork" not in words:  # what tracks resources of all
        return _spawn_cold(path, command, descriptors)
    options = dict.fromkeys(("start_new_session", "cwd", "env", "preexec_fn"))
    return _fork({**options, "args": words, "pass_fds": descriptors, "p2cread": -1, "c2pwrite": -1, "errwrite": -1})


class Warm(subprocess.Popen[str]):
    """A process of ``subprocess`` that begins as a fork of this one instead of an interpreter of its own.

    Of the options of `subprocess.Popen` it knows those of `_Start`.
    """

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__(command, text=True, **options)

    def _execute_child(self, *arguments: Any) -> None:
        _start_warm(self, *arguments)


def _start_warm(process: Any, *arguments: Any) -> None:
    """In place of ``subprocess.Popen._execute_child``: start a Python command line warm, others as they are."""
    given = _ITS_PARAMETERS.bind(process, *arguments).arguments
    # What runs on the standard library alone (a checkpoint's writer) starts cold quickly enough.
    if not isinstance(given["args"], Sequence) or list(given["args"][:1]) != [sys.executable] or "-P" in given["args"]:
        _start_cold(process, *arguments)
        return
    process.pid = _fork(given)
    process._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in ends))


def _fork(given: dict[str, Any]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
    child = os.fork()
    if not child:
        _become(given, ignored)
    return child


def _become(given: dict[str, Any], ignored: Set[int]) -> NoReturn:
    """The forked process, from its start to its end."""
    code = 70
    try:
        _leave_the_session(given, ignored)
        _leave_the_descriptors(given)
        _be_a_new_interpreter()
        subprocess.Popen._execute_child = _start_warm  # type: ignore[attr-defined]  # what torchrun starts
        code = _call(list(given["args"][1:]))
    except BaseException as error:  # nothing may return into the tests
        os.write(2, f"forked_commands: {error!r}\n".encode())
    finally:
        os._exit(code)


def _leave_the_session(given: dict[str, Any], ignored: Set[int]) -> None:
    """Session, folder, environment and signals."""
    if given["start_new_session"]:
        os.setsid()
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        # Those of tests and of their time limits, and what a worker, which a test may have been, tells all its forks.
        if callable(handler) or (handler == signal.SIG_IGN and number not in ignored):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # what is ignored stays so, as it does where Python starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _leave_the_descriptors(given: dict[str, Any]) -> None:
    """The three streams are those that were asked for. Others close; their numbers stay taken, as objects have them."""
    for number, end in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"])):
        if end != -1:
            os.dup2(end, number)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != nowhere and number not in given["pass_fds"] and _is_open(number):
            os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _be_a_new_interpreter() -> None:
    """Nothing of what pytest and the tests before have told the interpreter remains."""
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    importlib.reload(warnings)
    warnings._filters_mutated()  # type: ignore[attr-defined]  # what was said once may be said again
    logging.root.handlers.clear()
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        if type(handler := reference()) is logging.StreamHandler:
            handler.stream = sys.stderr  # setStream flushes the old one, which a test may have closed
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    tempfile.tempdir = None  # it is found by the environment
    random.seed()
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _call(words: list[str]) -> int:
    """Call ``python WORDS``; its exit code."""
    code = 0
    try:
        _call_main(words)
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        code = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        _told(error, trace)
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _call_main(words: list[str]) -> None:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if words[: len(flags)] == flags:  # this interpreter's own
        words = words[len(flags) :]
    is_safe = words[0] == "-P"  # the folder of what is run is not on the path
    if is_safe:
        words = words[1:]
    if words[0] == "-u":
        words = words[1:]
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)  # type: ignore[type-var]
    module = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # as the interpreter does
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(module))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        module.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(module))


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _told(error: BaseException, trace: TracebackType | None) -> None:
    """What the interpreter does about an exception that nobody has caught."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)
