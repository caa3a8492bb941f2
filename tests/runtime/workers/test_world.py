"""Who this worker is: alone, under torchrun's environment, or in a group that the script has already made."""

from __future__ import annotations

import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist

from polylane.errors import ActionFailed, PolylaneError
from polylane.runtime.workers import world as world_module
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World, backend_of_device, pick_device

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_alone():
    world = World.join()
    assert (world.rank, world.size, world.local_rank, world.backend) == (0, 1, 0, None)
    assert not dist.is_initialized()
    world.leave()


def test_a_forked_worker_joins_what_is_there():
    def worker(context: WorkerContext) -> tuple[bool, int, int, str | None, bool, bool]:
        before = dist.is_initialized()
        again = World.join().connect()
        again.leave()  # the group is not this one's to end
        return before, again.rank, again.size, again.backend, again.is_joined, dist.is_initialized()

    assert fork_workers(worker, 2) == [(False, rank, 2, "gloo", False, True) for rank in range(2)]


def test_workers_tell_one_another_without_a_group():
    def worker(context: WorkerContext) -> tuple[list[object], list[object], bool]:
        told = context.world.all_gather_object({"rank": context.rank})
        return told, context.world.all_gather_object(None), dist.is_initialized()

    assert fork_workers(worker, 3) == [([{"rank": 0}, {"rank": 1}, {"rank": 2}], [None] * 3, False)] * 3


def test_a_forked_job_stays_on_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")

    def worker(context: WorkerContext) -> float:
        context.world.connect()
        value = torch.tensor(1.0)
        dist.all_reduce(value)
        return value.item()

    assert fork_workers(worker, 2) == [2.0, 2.0]


def test_a_loopback_interface_that_is_down_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def refuse(*given: object, **more: object) -> None:
        raise RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: lo")

    def worker(context: WorkerContext) -> None:
        monkeypatch.setattr(dist, "init_process_group", refuse)
        context.world.connect()

    with pytest.raises(PolylaneError, match=r"the loopback interface lo0?, over which gloo .* has no address"):
        fork_workers(worker, 2)


def test_the_environment_of_torchrun():
    """Joining by environment alone, with a store of rank 0's own, as plain torchrun-like launchers leave it."""

    def worker(context: WorkerContext) -> tuple[int, int, float]:
        port = context_port(context)
        context.world.leave()
        rank = str(context.rank)
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False", **ranks)
        world = World.join()
        value = torch.tensor(1.0)
        dist.all_reduce(value)
        world.leave()
        world.leave()
        return world.rank, world.local_rank, value.item()

    assert fork_workers(worker, 2) == [(0, 0, 2.0), (1, 1, 2.0)]


def context_port(context: WorkerContext) -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports: list[int] = [listener.getsockname()[1] if context.rank == 0 else 0]
    first: list[int] = context.world.all_gather_object(ports)[0]
    return first[0]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
    ],
)
def test_an_incomplete_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PolylaneError, match=said):
        World.join()


def test_backends():
    assert backend_of_device(torch.device("cpu")) == "gloo"
    assert backend_of_device(torch.device("cuda", 0)) == "nccl"


class TestAccelerators:
    """How a device is chosen, on a host that is said to have two."""

    @pytest.fixture(autouse=True)
    def two_gpus(self, monkeypatch: pytest.MonkeyPatch):
        self.current: list[torch.device] = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.current.append)

    def test_each_worker_has_its_own(self):
        assert [pick_device(rank) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
        assert self.current == [torch.device("cuda", 0), torch.device("cuda", 1)]

    def test_fewer_than_workers_are_shared_over_gloo(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(world_module, "_started", None)
        worlds = [World.of_started_worker(None, rank, 3) for rank in range(3)]
        assert [(each.device.index, each.backend, each.is_staged) for each in worlds] == [
            (0, "gloo", True),
            (1, "gloo", True),
            (0, "gloo", True),
        ]
        assert worlds[2].on_host().device == torch.device("cpu") and not worlds[2].on_host().is_staged

    @pytest.mark.parametrize(
        ("backends", "identities", "chosen"),
        [
            (["nccl", "nccl"], ["GPU-1", "GPU-2"], "nccl"),
            (["nccl", "nccl"], ["GPU-1", "GPU-1"], "gloo"),  # each process sees one device: the same
            (["nccl", "gloo"], ["GPU-1", "GPU-2"], "gloo"),
            (["nccl", "gloo"], ["GPU-1", ""], "gloo"),  # one host has no device
            (["gloo", "gloo"], ["", ""], "gloo"),
        ],
    )
    def test_all_workers_take_one_backend(self, monkeypatch, backends, identities, chosen):
        monkeypatch.setattr(world_module, "_device_identity", lambda device: identities[device.index])
        store, found = dist.HashStore(), {}

        def agree(rank: int) -> None:
            device = torch.device("cuda", rank)
            found[rank] = world_module.agree_on_backend(store, rank, 2, backends[rank], device)

        threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert found == {0: chosen, 1: chosen}

    @pytest.mark.parametrize(("identity", "backend"), [("GPU-7", "nccl"), ("", "gloo")])
    def test_a_process_that_sees_one_device_of_many_has_it_for_itself(self, monkeypatch, identity, backend):
        """As under Slurm's --gpus-per-task=1: eight processes of a host, each of which sees one device."""
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(world_module, "_device_identity", lambda device: identity)
        assert world_module._own_backend(torch.device("cuda", 0), 8) == backend

    def test_one_that_gloo_would_have_to_serve_is_no_choice(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
        assert pick_device(0) == torch.device("cpu")


def test_an_action_failed_survives_pickling():
    try:
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise ActionFailed(2, stage=1, module="fc") from error
    except ActionFailed as failed:
        assert isinstance(failed.cause, ValueError)
        again = pickle.loads(pickle.dumps(failed))
    assert (again.rank, again.stage, again.microbatch, again.module, again.cause) == (2, 1, None, "fc", None)
    assert "ValueError: the cause" in again.cause_traceback
    assert str(again) == "rank 2 at stage 1, in fc: ValueError: the cause"
