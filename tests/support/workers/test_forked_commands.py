"""A process that starts warm is as one that starts cold: its streams, exit code, signals and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import forked_commands

ROOT = str(Path(__file__).parents[3])

HELD = """
import sys, time
try:
    print("held", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("let go")
    sys.exit(130)
"""
CODES = {
    "nothing": "pass",
    "prints": "import sys; print('out'); print('err', file=sys.stderr); print(sys.argv)",
    "reads": "import sys; print(sys.stdin.read())",
    "exits": "import sys; sys.exit(7)",
    "exits with a sentence": "import sys; sys.exit('why')",
    "exits with a large number": "raise SystemExit(259)",
    "exits at once": "import atexit, os; atexit.register(print, 'never'); os._exit(3)",
    "raises": "def f():\n    raise ValueError('one\\ntwo')\nf()",
    "raises in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()",
    "is interrupted": "raise KeyboardInterrupt('here')",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "has handlers": "import atexit; atexit.register(print, 'first'); atexit.register(print, 'second'); 1 / 0",
    "leaves a thread": "import threading; threading.Timer(0.1, print, ['late']).start()",
    "warns": "import warnings; [warnings.warn('mind') for _ in range(2)]; warnings.warn('old', DeprecationWarning)",
    "logs": "import logging; logging.info('little'); logging.warning('much')",
    "looks": "import os; print(os.getcwd(), os.environ.get('ASKED'), __name__, os.getpid() == os.getsid(0))",
    "signals": "import signal; print([signal.getsignal(n) for n in (2, 10, 14, 15)])",
    "pretends": "import sys; sys.modules['__main__'].x = 3; print(x, 'pytest' in vars())",
}


def told(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", CODES)
def test_warm_is_as_cold(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CODES[name])
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "ASKED": "yes"}, "start_new_session": True}
    command = [sys.executable, *([str(script)] if len(name) % 2 else ["-c", CODES[name]]), "a word"]
    with (tmp_path / "script.py").open() as first, (tmp_path / "script.py").open() as second:
        cold = subprocess.run(command, capture_output=True, text=True, check=False, stdin=first, **options)
        with pytest.warns(UserWarning):
            warnings.warn("mind", stacklevel=1)  # in the child it is said again
        assert told(forked_commands.run(command, stdin=second, **options)) == told(cold)


IGNORING = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from tests.support.workers import forked_commands
print(forked_commands.run([sys.executable, "-c", sys.argv[1]]).stdout, end="")
"""


@pytest.mark.slow  # it starts cold
def test_an_ignored_interrupt_stays_ignored() -> None:
    """As where a shell starts a command in the background."""
    command, environment = [sys.executable, "-c", IGNORING, CODES["signals"]], {**os.environ, "PYTHONPATH": ROOT}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith("[<Handlers.SIG_IGN: 1>, <Handlers.SIG_DFL: 0>")


@pytest.mark.parametrize("words", [["--version"], ["train"], ["lanes", "1f1b", "--stages", "2", "--microbatches", "2"]])
def test_the_command_is_as_cold(words: list[str]) -> None:
    """All three ways in: the module, warm and cold, and the command that an installation puts beside Python."""
    module = [sys.executable, "-m", "polylane", *words]
    warm = told(forked_commands.run(module))
    assert warm == told(subprocess.run(module, capture_output=True, text=True, check=False))
    command = [Path(sys.executable).with_name("polylane"), *words]
    assert warm == told(subprocess.run(command, capture_output=True, text=True, check=False))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("group", [False, True])
def test_signals_reach_it(number: signal.Signals, group: bool) -> None:
    with forked_commands.start([sys.executable, "-c", HELD], start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        (os.killpg if group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == ((130, "let go\n", "") if number == signal.SIGINT else (-number, "", ""))


def test_no_more_time_than_it_is_given() -> None:
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        forked_commands.run([sys.executable, "-c", HELD], timeout=0.5)
    assert time.monotonic() - started < 10


def test_what_it_starts_in_turn_is_warm_if_it_is_python() -> None:
    code = """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"]).returncode)
print(subprocess.run(["echo", "cold"]).returncode)
"""
    assert forked_commands.run([sys.executable, "-u", "-c", code]).stdout == "True\n0\ncold\n0\n"


def test_no_two_have_the_same_random_numbers() -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), float(torch.rand(())))"
    numbers = [forked_commands.run([sys.executable, "-c", code]).stdout.split() for _ in range(2)]
    assert all(len({*pair}) == 2 for pair in zip(*numbers, strict=True))


def test_it_keeps_nothing_of_this_process_open(tmp_path: Path) -> None:
    """A file that is locked here and let go is not locked by what has been started meanwhile."""
    code = "import os\nfor n in os.listdir('/dev/fd'): print(os.path.realpath(f'/dev/fd/{n}'))"
    with (tmp_path / "mine").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert "mine" not in forked_commands.run([sys.executable, "-c", code], cwd=tmp_path).stdout
