"""What a search is told of a plan: parsed as a plan is, kept by what is found, and never more than was said."""

from __future__ import annotations

import pytest

from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import COMPARED, FixedKeys, parse_auto, parse_fixed
from polylane.plan.spec import Degrees, parse


def test_auto_alone_fixes_nothing() -> None:
    assert parse_auto("auto") == FixedKeys() == parse_fixed("")
    assert parse_auto("data=2") is None and parse_auto(None) is None and parse_auto(parse("data=2")) is None


@pytest.mark.parametrize(
    "line",
    [
        "data=2",
        "schedule=zb-v,chunks=2",
        "chunks=3",
        "data=1,microbatches=4,shard=parameters",
        "tensor=2,every=8,outer=0.7:0.9",
    ],
)
def test_what_is_said_is_said_again(line: str) -> None:
    fixed = parse_auto(f"auto,{line}")
    assert fixed is not None and str(fixed) == line and parse_fixed(str(fixed)) == fixed


def test_only_plans_with_the_fixed_degrees_are_allowed() -> None:
    fixed = parse_fixed("data=2,pipeline=2,microbatches=4")
    assert fixed.allows((Degrees(2), Degrees(2)), 4)
    assert not fixed.allows((Degrees(2), Degrees(2)), 8)
    assert not fixed.allows((Degrees(2),), 4)
    assert not fixed.allows((Degrees(2), Degrees(1)), 4), "a degree is of every stage"
    assert parse_fixed("tensor=2").allows((Degrees(4, 1, 2),), 1)


def test_what_changes_the_numbers_is_never_tried_unasked() -> None:
    assert all(parse(f"data=2,shard={kind}").sync.is_exact for kind in FixedKeys().shardings)
    assert FixedKeys().shardings == ("optimizer", "gradients", "parameters")
    for said in ("shard=none", "shard=gradients", "every=2", "wire=bfloat16", "servers=1"):
        assert parse_fixed(said).shardings == ()


def test_the_schedules_that_are_compared_are_those_that_may_be() -> None:
    assert parse_fixed("").schedules == COMPARED
    assert set(parse_fixed("chunks=2").schedules) == {("interleaved", 2), ("zb-v", 2)}
    assert parse_fixed("chunks=3").schedules == (("interleaved", 3),)
    assert {name for name, _ in parse_fixed("chunks=1").schedules} == {"1f1b", "afab", "zb-h1", "zb-h2"}
    assert set(parse_fixed("schedule=interleaved").schedules) == {("interleaved", 2), ("interleaved", 4)}
    assert parse_fixed("schedule=naive").schedules == (("naive", 1),)
    assert parse_fixed("data=2").with_schedule("zb-v").schedules == (("zb-v", 2),)
    assert parse_fixed("schedule=auto").schedules == COMPARED
    assert parse_fixed("schedule=interleaved").with_schedule(chunks=5).schedules == (("interleaved", 5),)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("data=x", "plan 'data=x': data=x must be a whole number"),
        ("chunky=2", "unknown key 'chunky'"),
        ("schedule=zb-h3", "schedule=zb-h3 is not known, known are naive"),
        ("schedule=1f1b,chunks=2", "the schedule 1f1b has one stage on a worker"),
        ("schedule=zb-v,chunks=3", "the schedule zb-v has exactly 2 chunks"),
        ("pipeline=1,chunks=2", "are of a pipeline's workers"),
        ("chunks=0", "chunks=0 must be a whole number of at least 1"),
        ("shard=all", "shard=all must be none, optimizer"),
        ("shard=optimizer,every=2", "needs replicas that are alike"),
        ("precision=float8", "precision=float8 is not known"),
        ("precision=float16,every=2", "precision=float16 and every=2 exclude each other"),
        ("precision=float16,schedule=pipedream", "precision=float16 and schedule=pipedream exclude each other"),
        ("[data=2 | 1]", "meshes of every stage make a plan of their own"),
    ],
)
def test_bad_keys(line: str, sentence: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        parse_auto(f"auto,{line}")
    assert sentence in str(caught.value)
