"""Parameters shared out over servers, and what travels between servers and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.program.server_assignment import assign_parameters, server_rank
from polylane.runtime.job import Job
from polylane.runtime.sync.flat_packing import FlatPacking, PackedTensor
from polylane.runtime.sync.parameter_server.client import ParameterServerSync
from polylane.runtime.sync.parameter_server.messages import MessageHead, MessageKind
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate, UpdateLog, count_staleness
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd, workers


def prepared(plan: str, model: nn.Module | None = None) -> Any:
    return compile_training(model or mlp(6, 8, 4), build_objectives(classify, sgd, None), batch_of(8), plan)


def test_whole_parameters_by_their_bytes() -> None:
    given = prepared("data=2,servers=2", mlp(6, 8, 8, 4))
    shares = assign_parameters(given.partitions, given.plan)
    sizes = {name: p.nbytes for name, p in given.model.named_parameters()}
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    filled = [sum(sizes[name] for name in share) for share in shares]
    assert max(filled) <= 4 / 3 * max(sum(sizes.values()) / 2, max(sizes.values()))


@pytest.mark.parametrize("plan", ["data=2,servers=5", "data=2,servers=5,dedicated=yes,staleness=any"])
def test_more_servers_than_parameters(plan: str) -> None:
    told = r"plan: sync.servers: 5 servers are more than 4 trained parameters, .*: lower servers to at most 4"
    with pytest.raises(PolylaneError, match=told):
        prepared(plan)


def test_where_servers_live() -> None:
    def hosts(plan: str) -> list[int]:
        chosen: Plan = prepared(plan).plan
        return [server_rank(chosen, server) for server in range(chosen.sync.server_count)]

    assert hosts("data=2,servers=2,dedicated=yes") == [2, 3]
    assert hosts("data=4,servers=2") == [0, 2]
    assert hosts("data=2,servers=4") == [0, 0, 1, 1]


def test_frozen_parameters_are_on_no_server() -> None:
    model = mlp(6, 8, 4)
    model[0].weight.requires_grad_(False)
    given = prepared("data=2,servers=3", model)
    assert sorted(n for share in assign_parameters(given.partitions, given.plan) for n in share) == [
        "0.bias",
        "2.bias",
        "2.weight",
    ]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
        ),
        max_size=6,
    ),
    st.integers(0),
)
def test_what_is_packed_comes_out(shapes: list[tuple[list[int], torch.dtype]], missing: int) -> None:
    slots = [PackedTensor(f"p{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
    values = {s.name: torch.arange(s.numel).to(s.dtype).reshape(s.shape) + 1 for s in slots}
    if slots:
        del values[slots[missing % len(slots)].name]
    packing = FlatPacking(slots)
    rows = packing.pack(values)
    assert tuple((row.numel(), row.dtype) for row in rows) == packing.sizes
    assert sum(row.nbytes for row in rows) == packing.nbytes
    for name, value in packing.unpack(rows, torch.device("cpu")).items():
        assert torch.equal(value, values[name] if name in values else torch.zeros_like(value))


@given(
    st.sampled_from(list(MessageKind)), st.lists(st.integers(0, 2**62), min_size=7, max_size=7), st.binary(max_size=5)
)
def test_heads_travel(kind: MessageKind, numbers: list[int], flags: bytes) -> None:
    head = MessageHead(kind, *numbers, flags=flags.ljust(5, b"\0"))
    assert MessageHead.of_tensor(head.to_tensor(5)) == head


@given(st.lists(st.tuples(*[st.integers(-1, 2**40)] * 6)))
def test_logs_keep_updates(numbers: list[tuple[int, ...]]) -> None:
    log, updates = UpdateLog(), [ServerUpdate(*each) for each in numbers]
    for update in updates:
        log.add(update)
    assert list(log) == updates and len(log) == len(updates)
    assert sum(count_staleness(log).values()) == len(updates)


STEPS = 3


def pushed_and_answered(plan: str, model: nn.Module) -> tuple[int, int]:
    """Bytes per step that all workers and servers sent each other between processes, and how many messages."""

    def work(job: Job) -> tuple[int, int]:
        sent = _sent(job)
        for step in range(STEPS):
            job.step(batch_of(8, seed=step))
        job.gathered(None)
        return sent()

    each = workers(work, model, plan)
    return sum(sent for sent, _ in each) // STEPS, sum(messages for _, messages in each) // STEPS


def _sent(job: Job) -> Callable[[], tuple[int, int]]:
    """Counts from now on what goes between workers and servers."""
    counters = job.worker.counters if job.world.rank >= job.plan.workers else job._role._sync.server_counters()
    job.gathered(None)

    def count() -> tuple[int, int]:
        return sum(c.bytes["send"] for c in counters), sum(c.messages["send"] for c in counters)

    bytes_then, messages_then = count()
    # A server answers in threads of its own: nobody sends before each has read its counters.
    job.gathered(None)
    return lambda: (count()[0] - bytes_then, count()[1] - messages_then)


def wide() -> nn.Module:
    return mlp(6, 100, 100, 4)


@pytest.mark.parametrize("plan", ["data=4,servers=1,dedicated=yes", "data=3,servers=2,dedicated=yes,staleness=any"])
def test_the_bytes_of_dedicated_servers(plan: str) -> None:
    """2 |A| p b a step, over p replicas: every one sends all gradients and receives all weights (Li et al. 2014)."""
    total, messages = pushed_and_answered(plan, wide())
    size, replicas = sum(p.nbytes for p in wide().parameters()), int(plan[5])
    assert 0 <= total - 2 * size * replicas <= 80 * messages
    assert messages == 4 * replicas * int(plan[15])  # a head and a row, there and back


def test_the_bytes_that_shared_servers_save() -> None:
    """What a worker and the server in its process give each other does not travel: 2 |A| (p - 1) b."""
    total, messages = pushed_and_answered("data=3,servers=1", wide())
    size = sum(p.nbytes for p in wide().parameters())
    assert 0 <= total - 2 * size * 2 <= 80 * messages


def test_parts_travel_as_parts() -> None:
    """Where operators are split, a rank sends and gets its part of a parameter; whole ones are sent by one of them."""
    total, messages = pushed_and_answered("data=2,tensor=2,servers=1,dedicated=yes", wide())
    size = sum(p.nbytes for p in wide().parameters())
    biases = sum(p.nbytes for n, p in wide().named_parameters() if n.endswith("bias"))
    assert 0 <= total - 2 * size * 2 <= 80 * messages + 2 * biases  # a bias may be whole on both, and goes to both


def test_a_rule_is_what_the_plan_says() -> None:
    def work(job: Job) -> Any:
        rule = job._role._sync
        assert isinstance(rule, ParameterServerSync)
        return rule.is_replica_local("loss"), rule.loss_ranks

    assert workers(work, mlp(6, 8, 4), "data=2,servers=1") == [(False, None)] * 2
    assert workers(work, mlp(6, 8, 4), "data=2,servers=1,staleness=2") == [(True, (0,)), (True, (1,))]
