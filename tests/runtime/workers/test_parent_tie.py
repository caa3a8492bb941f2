"""A worker of torchrun's is tied to its agent from its first line on: before it imports anything that takes long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.workers.child_processes import is_running

# The command line, which takes long to import.
WORKER = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "polylane.cli":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from polylane.__main__ import main
main()
"""

# An agent, which prints the process id of its worker.
AGENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("is_torchruns", [True, False])
def test_a_worker_ends_with_its_agent_while_it_imports(is_torchruns: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": "x"} if is_torchruns else {}
    command = [sys.executable, "-c", AGENT, WORKER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pid, said = int(agent.stdout.readline()), agent.stdout.readline()
        try:
            agent.kill()
            for _ in range(50 if is_torchruns else 5):
                if not is_running(pid):
                    break
                time.sleep(0.1)
            assert said == "importing\n" and is_running(pid) != is_torchruns
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
