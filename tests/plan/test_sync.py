"""How replicas agree, in one line and in a file: what can be said, comes back, and is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump, load
from polylane.plan.spec import parse
from polylane.plan.sync import SUM, OuterOptimizer, PowerSGDOptions, SyncOptions, TopKOptions
from tests.plan.plan_files import PLAN, edited, refusal

SAID = {
    "data=2": SUM,
    "data=2,every=1": SUM,
    "data=2,every=8": SyncOptions(every=8),
    "data=2,every=8,warmup=100": SyncOptions(every=8, warmup=100),
    "data=2,every=8,outer=0.7:0.9": SyncOptions(every=8, outer=OuterOptimizer(rate=0.7, momentum=0.9)),
    "data=2,every=8,outer=1": SyncOptions(every=8, outer=OuterOptimizer(rate=1.0)),
    "data=2,shard=optimizer": SyncOptions(shard="optimizer"),
    "data=4,shard=parameters,within=2": SyncOptions(shard="parameters", within=2),
    "data=2,wire=bfloat16": SyncOptions(wire="bfloat16"),
    "data=2,compress=powersgd:2": SyncOptions(compress=PowerSGDOptions(kind="powersgd", rank=2)),
    "data=2,compress=powersgd:2:0": SyncOptions(compress=PowerSGDOptions(kind="powersgd", rank=2, start=0)),
    "data=2,compress=top_k:0.25": SyncOptions(compress=TopKOptions(kind="top_k", fraction=0.25)),
    "data=2,servers=1": SyncOptions(kind="parameter_server", servers=1),
    "data=2,servers=2,staleness=any": SyncOptions(kind="parameter_server", servers=2, staleness="any"),
    "data=2,servers=2,dedicated=yes,staleness=3": SyncOptions(
        kind="parameter_server", servers=2, dedicated=True, staleness=3
    ),
}


@pytest.mark.parametrize("line", SAID)
def test_in_one_line(line: str) -> None:
    spec = parse(line)
    assert spec.sync == SAID[line]
    assert parse(",".join(["data=4", *spec.sync.to_words()])).sync == spec.sync
    assert spec.processes == spec.workers + (2 if "dedicated" in line else 0)


@pytest.mark.parametrize("line", SAID)
def test_in_a_file(line: str, tmp_path: Path) -> None:
    plan = PLAN.model_copy(update={"sync": SAID[line]})
    plan = Plan.model_validate(plan.model_dump())
    file = tmp_path / "plan.yaml"
    file.write_text(dump(plan))
    assert load(file) == plan
    assert all(word in plan.spec for word in plan.sync.to_words())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("data=2,every=0", "every=0 must be a whole number of at least 1"),
        ("data=2,every=-1", "every=-1 must be a whole number of at least 1"),
        ("data=2,every=2.5", "every=2.5 must be a whole number"),
        ("data=2,warmup=3", "give every as well"),
        ("data=2,outer=0.7", "give every as well"),
        ("data=2,every=2,outer=0", "outer=0 must be RATE:MOMENTUM"),
        ("data=2,every=2,outer=1:1", "outer=1:1 must be RATE:MOMENTUM"),
        ("data=2,shard=all", "shard=all must be none, optimizer, gradients or parameters"),
        ("data=2,within=2", "give shard as well"),
        ("data=2,every=2,shard=optimizer", "needs replicas that are alike"),
        ("data=2,wire=int8", "wire=int8 must be same, bfloat16 or float16"),
        ("data=2,wire=bfloat16,compress=top_k", "exclude each other"),
        ("data=2,wire=bfloat16,every=2", "does not do that"),
        ("data=2,compress=top_k,shard=gradients", "does not do that"),
        ("data=2,compress=top_k:0", "compress=top_k:0 must be powersgd:RANK"),
        ("data=2,compress=powersgd:0", "compress=powersgd:0 must be powersgd:RANK"),
        ("data=2,compress=powersgd:4:1:1", "must be powersgd:RANK"),
        ("data=2,compress=zip", "compress=zip must be powersgd:RANK"),
        ("data=2,staleness=2", "staleness is for servers=n"),
        ("data=2,dedicated=yes", "dedicated is for servers=n"),
        ("data=2,servers=0", "servers=0 must be a whole number of at least 1"),
        ("data=2,servers=1,staleness=-1", "staleness=-1 must be a whole number of at least 0, or any"),
        ("data=2,servers=1,staleness=some", "staleness=some must be"),
        ("data=2,servers=1,dedicated=maybe", "dedicated=maybe must be yes or no"),
        ("data=2,servers=1,shard=optimizer", "exclude each other"),
        ("data=2,servers=1,every=2", "a parameter server does not take it"),
    ],
)
def test_what_is_refused(line: str, says: str) -> None:
    with pytest.raises(PolylaneError) as refusal:
        parse(line)
    assert says in str(refusal.value) and str(refusal.value).count("\n") == 0


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"kind": "all_reduce", "every": 0}, "sync.every must be at least 1, not 0"),
        (
            {"kind": "parameter_server", "staleness": -1},
            "sync.staleness must be a whole number of at least 0",
        ),
        ({"kind": "parameter_server", "shard": "optimizer"}, "sync: shard: optimizer and kind: parameter_server"),
        ({"every": 2, "outer": {"rate": 0}}, "sync.outer.rate must be above 0, not 0"),
        ({"every": 2, "outer": {"momentum": 1}}, "sync.outer.momentum must be below 1, not 1"),
        ({"warmup": -1}, "sync.warmup must be at least 0, not -1"),
        ({"compress": {"kind": "zip"}}, "sync.compress must be of a kind that is known: powersgd, top_k"),
        ({"compress": {"kind": "top_k", "fraction": 2}}, "fraction must be at most 1, not 2"),
        ({"compress": {"rank": 2}}, "sync.compress must be a mapping with the key kind"),
        ({"every": 2, "outer": {"rate": float("nan")}}, "sync.outer.rate must be a finite number, not nan"),
        (
            {"kind": "parameter_server", "staleness": True},
            "of at least 0, or any, not True",
        ),
        ({"evry": 2}, "sync.evry is not a key of a plan"),
        ({"within": 3, "shard": "optimizer"}, "sync.within: 2 replicas of stage 0 cannot be divided into groups of 3"),
    ],
)
def test_what_a_file_is_refused_for(said: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(edited(tmp_path, sync=said))
