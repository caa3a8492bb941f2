"""Launch environment: which worker this process is, as the launcher that has started it says in the environment.

Without a launcher a process is alone, or starts its workers itself (:mod:`.team`). A row of :data:`LAUNCHERS` reads
what one launcher says, in torchrun's variables, so that torch's own rendezvous can read them as well. Other launchers
start one process on each node, which becomes torchrun's agent there (:func:`node_options`).
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polylane.errors import PolylaneError

# The variables of torchrun by which workers know their ranks and meet: a dataset may take a share of its samples by it.
VARIABLES = (
    *(f"{of}{number}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for number in ("RANK", "WORLD_SIZE")),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
# Set for the workers of an agent that polylane itself has become.
AGENT = "POLYLANE_AGENT"
MOST_SECONDS = 24 * 3600  # that an agent waits for its workers to end
# Ports at which workers of other launchers than torchrun meet: below those that systems give out themselves, so many
# that two jobs of a node hardly ever take the same.
_FIRST_PORT, _PORTS = 20_000, 12_000

Reader = Callable[[Mapping[str, str]], dict[str, str]]


def read_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun, or of a launcher that sets the same; none without RANK."""
    return {name: environment[name] for name in VARIABLES if name in environment} if "RANK" in environment else {}


def read_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm says of a task of ``srun``; none where there is one task, which may start workers itself.

    The batch script of a job is no task, and has no step.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_PROCID" not in environment:
        return {}
    node = int(environment["SLURM_NODEID"])
    # Such as "4(x2),3": two nodes with four tasks each, and one with three.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    tasks = [count for count, times in runs for _ in range(int(times or 1))]
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[node],
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(tasks)),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": _choose_port(f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"),
    }


def first_host(names: str) -> str:
    """Return the first of the hosts that Slurm writes as ``node[003-007,12],login1``."""
    depth, end = 0, len(names)
    for position, letter in enumerate(names):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            end = position
            break
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", names[:end])


def _make_mpi_reader(job: str, *sources: str) -> Reader:
    """Return the reader of what a kind of mpirun says.

    Args:
        job: a variable that differs from job to job.
        sources: variables of a process's rank, of their number, and of its rank and their number on its host.
    """
    names = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), sources, strict=True))

    def read(environment: Mapping[str, str]) -> dict[str, str]:
        variables = {name: environment[source] for name, source in names.items() if source in environment}
        if "RANK" not in variables or variables.get("WORLD_SIZE", "1") == "1":
            return {}
        # mpirun does not say where rank 0 is: on this host, if all ranks are.
        if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]:
            variables["MASTER_ADDR"] = "127.0.0.1"
        return {**variables, "MASTER_PORT": _choose_port(environment.get(job, ""))}

    return read


def _choose_port(job: str) -> str:
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)


# What launchers say, in torchrun's variables; see :func:`find_launcher` for the one that counts.
LAUNCHERS: Mapping[str, Reader] = {
    "Slurm": read_slurm,
    "mpirun": _make_mpi_reader(
        "PMIX_NAMESPACE", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    "mpiexec": _make_mpi_reader("PMI_JOBID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "torchrun": read_torchrun,
}


@dataclass(frozen=True)
class Launch:
    """How this process was started: as a launcher's worker, or by nothing that has others.

    Attributes:
        is_worker: whether a launcher has started this process, as one of its workers.
        rank: rank of this worker among all workers, from 0.
        size: number of workers on all hosts.
        local_rank: rank of this worker among those of its host, from 0.
        local_size: number of workers on this host.
        launcher: the launcher's name, a key of :data:`LAUNCHERS`; "" for none.
    """

    is_worker: bool = False
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0, as one that is alone: of all workers it writes files and prints."""
        return self.rank == 0

    @classmethod
    def of_process(cls) -> Launch:
        """Read how this process was started.

        Raises:
            PolylaneError: what the launcher says is incomplete.
        """
        launcher = find_launcher()
        if not launcher:
            return cls()
        # As torch's own rendezvous reads them; what the user has set counts.
        variables = LAUNCHERS[launcher](os.environ)
        os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
        rank = read_number("RANK")
        local_size = read_number("LOCAL_WORLD_SIZE", default=1)
        size, local_rank = read_number("WORLD_SIZE"), read_number("LOCAL_RANK", default=rank)
        return cls(True, rank, size, local_rank, local_size, launcher)

    def check_meeting_place(self) -> None:
        """Check that the environment says where workers meet.

        Raises:
            PolylaneError: it does not.
        """
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise PolylaneError(_explain_missing(name, self.launcher))


def find_launcher() -> str:
    """Return the name of the launcher that has started this process as one of its workers; "" for none."""
    # torchrun's agent may itself be a task of Slurm's; its workers have a variable that nobody else sets.
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        return "torchrun"
    return next((name for name, read in LAUNCHERS.items() if read(os.environ)), "")


def is_launched() -> bool:
    """Return whether a launcher has started this process as one of its workers."""
    return bool(find_launcher())


def _explain_missing(name: str, launcher: str) -> str:
    if launcher == "torchrun":
        return f"RANK is set but {name} is not: start the workers with torchrun, or unset RANK"
    return f"{launcher} does not say where rank 0 is: set {name} for all workers, as in {launcher} -x {name}=HOST ..."


def node_options(environment: Mapping[str, str]) -> list[str] | None:
    """Return the options of torchrun's agent for this node, where a launcher has started one process on each.

    Kubernetes' trainers set PET_*, which torchrun reads itself; SkyPilot says which node this is.

    Returns:
        None where no launcher has, or has started a worker.
    """
    if find_launcher():
        return None
    nodes, workers = environment.get("SKYPILOT_NUM_NODES", "1"), environment.get("PET_NPROC_PER_NODE", "1")
    if environment.get("PET_NNODES", "1") != "1" or (nodes == "1" and workers != "1"):
        return []
    if nodes == "1":
        return None
    options = ["--nnodes", nodes, "--node-rank", environment["SKYPILOT_NODE_RANK"]]
    options += ["--master-addr", environment["SKYPILOT_NODE_IPS"].split()[0]]
    options += ["--master-port", _choose_port(environment.get("SKYPILOT_TASK_ID", ""))]
    gpus = environment.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    return [*options, "--nproc-per-node", workers if gpus == "0" else gpus]


def become_agent(max_restarts: int, grace: float) -> None:
    """Become torchrun's agent of this node, whose workers run this same command; return where there is nothing to be.

    The process ends with the exit code of the first worker that fails, which torchrun itself would not say.

    Args:
        max_restarts: how often the agent starts all workers again after one has died.
        grace: seconds that a stop signal leaves to the workers.
    """
    options = node_options(os.environ)
    if options is None:
        return
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    os.environ[AGENT] = "1"
    seconds = int(max(0, min(grace, MOST_SECONDS))) + 1  # also where it is not a number, which the workers refuse
    options = [*options, "--max-restarts", str(max_restarts), "--shutdown-timeout", str(seconds)]
    try:
        main([*options, "-m", "--", "polylane", *sys.argv[1:]])
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)  # of a worker that a signal ended, its number below 0
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except Exception:  # as torchrun ends: the agents of other nodes are not there
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def keeps_exit_code() -> bool:
    """Return whether the agent that has started this worker ends with the worker's exit code."""
    return AGENT in os.environ


def read_number(name: str, default: int | None = None) -> int:
    """Return the number in a variable of the environment.

    Args:
        name: name of the variable, such as WORLD_SIZE.
        default: the number where it is not set; None: it must be.

    Raises:
        PolylaneError: it is not set, or no whole number.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        problem = "is not set" if text is None else f"is {text!r}, not a whole number"
        if "RANK" not in os.environ:
            raise PolylaneError(f"{name} {problem}: unset it, or start the workers with torchrun") from None
        raise PolylaneError(
            f"RANK is set but {name} {problem}: start the workers with torchrun, or unset RANK"
        ) from None


def is_first_of_host() -> bool:
    """Return whether this process says what all workers of its host have to say; so does one that is alone."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def hide_ranks() -> None:
    """Remove from this process's environment what tells the user's code that it is one of several workers."""
    for name in (*VARIABLES, "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        os.environ.pop(name, None)
