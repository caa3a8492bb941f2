"""What launchers say of the process that they have started, read as torchrun's variables."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from polylane.errors import PolylaneError
from polylane.runtime.workers import launch_environment
from polylane.runtime.workers.launch_environment import LAUNCHERS, Launch, first_host, is_launched, node_options

# Of the fourth task of `srun -N2 --ntasks-per-node=2` of Slurm 22.05, those of its variables that say something of it.
SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host-a,host-b", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "host-a,host-b",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-head-4711@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    variables: dict[str, str] = {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", variables)
        yield variables


def test_nothing_started_a_process_that_is_alone(environment: dict[str, str]) -> None:
    assert Launch.of_process() == Launch() and not is_launched() and "RANK" not in environment


@pytest.mark.parametrize(
    ("said", "launch", "address"),
    [
        (TORCHRUN, Launch(True, 2, 4, 0, 2, "torchrun"), "a"),
        (SLURM, Launch(True, 3, 4, 1, 2, "Slurm"), "host-a"),
        ({**OPEN_MPI, "MASTER_ADDR": "head"}, Launch(True, 5, 8, 1, 4, "mpirun"), "head"),
        (MPICH, Launch(True, 1, 2, 1, 2, "mpiexec"), "127.0.0.1"),
        (
            {**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "1"},
            Launch(True, 2, 4, 0, 2, "torchrun"),
            "a",
        ),  # srun has started torchrun
    ],
)
def test_what_launchers_say(environment: dict[str, str], said: dict[str, str], launch: Launch, address: str) -> None:
    environment.update(said)
    assert Launch.of_process() == launch
    assert environment["RANK"] == str(launch.rank) and environment["MASTER_ADDR"] == address
    assert 1 <= int(environment["MASTER_PORT"]) < 32_768
    assert Launch.of_process() == launch, "once more, now that torchrun's variables are there"


@pytest.mark.parametrize("said", [TORCHRUN, SLURM, MPICH, {**OPEN_MPI, "MASTER_ADDR": "head"}])
def test_hidden_ranks_leave_a_process_that_is_alone(environment: dict[str, str], said: dict[str, str]) -> None:
    """As auditors are, and workers that a worker starts: they must not join it a second time."""
    environment.update(said)
    assert Launch.of_process().is_worker
    launch_environment.hide_ranks()
    assert Launch.of_process() == Launch() and not is_launched()


def test_ports_of_two_jobs_and_of_two_steps_differ(environment: dict[str, str]) -> None:
    others = ({}, {"SLURM_JOB_ID": "2"}, {"SLURM_STEP_ID": "1"})
    assert len({LAUNCHERS["Slurm"]({**SLURM, **other})["MASTER_PORT"] for other in others}) == 3


@pytest.mark.parametrize(
    "said",
    [
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # the batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # one task starts its workers itself
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_task_is_alone(environment: dict[str, str], said: dict[str, str]) -> None:
    environment.update(said)
    assert not is_launched()


def test_tasks_that_nodes_have_unequally_many_of(environment: dict[str, str]) -> None:
    for node, tasks in enumerate((4, 4, 3, 1)):
        said = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_NODEID": str(node)}
        assert LAUNCHERS["Slurm"](said)["LOCAL_WORLD_SIZE"] == str(tasks)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[003-007,12],login1", "node003"),
        ("rack[2-4]node[10,12]-ib", "rack2node10-ib"),
    ],
)
def test_the_first_of_slurm_s_hosts(names: str, first: str) -> None:
    assert first_host(names) == first


def test_mpirun_on_several_hosts_must_be_told_where_they_meet(environment: dict[str, str]) -> None:
    environment.update(OPEN_MPI)
    with pytest.raises(PolylaneError, match=r"mpirun does not say where rank 0 is: .* mpirun -x MASTER_ADDR=HOST"):
        Launch.of_process().check_meeting_place()


SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1",
}  # fmt: skip
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "pod-0"}


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, None),
        (KUBEFLOW, ""),
        ({**KUBEFLOW, **TORCHRUN}, None),  # a worker of the agent
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, None),
        (SKYPILOT, "--nnodes 2 --node-rank 1 --master-addr 10.0.0.4 --master-port PORT --nproc-per-node 8"),
        (
            {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0", "PET_NPROC_PER_NODE": "2"},
            "--nnodes 2 --node-rank 1 --master-addr 10.0.0.4 --master-port PORT --nproc-per-node 2",
        ),  # nodes without GPUs
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "1"}, None),
    ],
)
def test_one_process_on_each_node_becomes_its_agent(
    environment: dict[str, str], said: dict[str, str], options: str | None
) -> None:
    environment.update(said)
    port = launch_environment._choose_port("sky-1")
    assert node_options(said) == (None if options is None else options.replace("PORT", port).split())


def test_the_agent_runs_the_same_command(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    monkeypatch.setattr("torch.distributed.run.main", commands.append)
    monkeypatch.setattr(sys, "argv", ["polylane", "train", "r.py", "--plan", "data=8"])
    launch_environment.become_agent(3, 30.0)
    assert not commands and not launch_environment.keeps_exit_code()
    environment.update(KUBEFLOW)
    with pytest.raises(SystemExit) as leaving:
        launch_environment.become_agent(3, 30.0)
    (words,) = commands
    told = "--max-restarts 3 --shutdown-timeout 31 -m -- polylane train r.py --plan data=8"
    assert " ".join(words) == told and leaving.value.code == 0
    assert launch_environment.keeps_exit_code(), "so do the workers, which have the agent's variables"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (ChildFailedError("polylane", {1: ProcessFailure(1, 7, 75, "")}), 75),
        (ChildFailedError("polylane", {0: ProcessFailure(0, 7, -9, "")}), 137),
        (SignalException("told", signal.SIGTERM), 143),
        (RendezvousTimeoutError("nobody came"), 1),
    ],
)
@pytest.mark.parametrize("grace", [30.0, math.inf, math.nan])
def test_the_agent_ends_with_its_workers_code(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, end: Exception, code: int, grace: float
) -> None:
    def fail(words: Any) -> None:
        raise end

    monkeypatch.setattr("torch.distributed.run.main", fail)
    environment.update(KUBEFLOW)
    with pytest.raises(SystemExit) as leaving:
        launch_environment.become_agent(0, grace)
    assert leaving.value.code == code
