"""Several hosts, whose workers torchrun starts: every family of plans computes there what it computes on one host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts
from tests.support.placed_training import SCRIPT, assert_equal, train_here

# Plans of four workers, two on each host. The first kind computes what one device computes, the second by a rule of its
# own, which does not depend on where its workers are.
EXACT = (
    "data=4",
    "data=2,pipeline=2,microbatches=2",  # a stage on each host
    "pipeline=4,microbatches=4",
    "data=2,tensor=2",  # operators are split inside hosts
    "tensor=4",
    "data=4,shard=optimizer",
    "data=4,shard=parameters",
    "data=4,shard=parameters,within=2",  # shards inside hosts, copies of them between
)
OWN_RULE = (
    "data=4,every=3",
    "data=4,every=2,outer=0.7:0.9",
    "data=4,compress=powersgd:2",
    "data=4,wire=bfloat16",
    "data=3,servers=1,dedicated=yes",  # the server is on the other host than two of its replicas
    "pipeline=4,microbatches=4,schedule=pipedream",
)


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts.make(2, getattr(request, "param", "1gbit"))
    if isinstance(made, str):
        pytest.skip(f"no hosts can be made: {made}")
    with closing(made):
        yield made


def train_on(hosts: Hosts, plans: tuple[str, ...], workers: int, folder: Path, **options: Any) -> dict[str, Any]:
    """Train under each plan on both hosts, and return what rank 0 wrote."""
    out = folder / "hosts.json"
    outputs = hosts.run_torchrun([SCRIPT, str(out), *plans], workers, **options)
    assert [output.code for output in outputs] == [0, 0], "\n".join(output.stderr for output in outputs)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_replicas_on_two_hosts_that_share_no_memory_and_no_folder(hosts: Hosts, tmp_path: Path) -> None:
    found = train_on(hosts, ("data=2",), 1, tmp_path, own_mounts=("/dev/shm",))
    assert_equal(found["data=2"], train_here(("data=1",), 1, tmp_path)["data=1"], 1e-12)


@pytest.mark.slow
def test_all_families_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    found = train_on(hosts, (*EXACT, *OWN_RULE), 2, tmp_path, seconds=400.0, own_mounts=("/dev/shm",))
    # A microbatch has the statistics of its own samples, in one worker too.
    references = {plan: ",".join(["data=1", *re.findall(r"microbatches=\d+", plan)]) for plan in EXACT}
    alone, here = train_here(tuple({*references.values()}), 1, tmp_path), train_here(OWN_RULE, 4, tmp_path)
    for plan in (*EXACT, *OWN_RULE):
        assert_equal(found[plan], alone[references[plan]] if plan in EXACT else here[plan], 1e-12)
