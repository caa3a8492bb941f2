"""A plan built in Python is held to the same rules as a file, in the same sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polylane.errors import PolylaneError
from polylane.plan.fit_to_graph import partition_for
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump, load
from polylane.plan.stage import Stage
from tests.plan.plan_files import GRAPH, PLAN
from tests.support.workers.training import batch_of, mlp, workers

WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "three devices for two replicas": (
        [{"nodes": ("a", "b"), "devices": (0, 1, 2), "mesh": {"data": 2}}],
        "plan: stages.0: 3 devices for a mesh of data=2",
    ),
    "a device on two stages": (
        [{"nodes": ("a", "b"), "devices": (0,)}, {"nodes": ("c", "d"), "devices": (0,)}],
        "plan: device 0 is on stages 0 and 1: every worker has one place",
    ),
    "a device twice": (
        [{"nodes": ("a", "b"), "devices": (0, 0), "mesh": {"data": 2}}],
        "plan: stages.0.devices names 0 twice: every worker has one place",
    ),
    "a gap": (
        [{"nodes": ("a", "b"), "devices": (0, 2), "mesh": {"data": 2}}],
        "plan: devices must be numbered from 0 to 1: 2 is there, but 1 is not",
    ),
    "no stages": ([], "plan: stages: there must be at least one"),
    "an axis that there is not": (
        [{"nodes": ("a", "b"), "devices": (0,), "placements": {"w": {"tensor": "shard(0)"}}}],
        "plan: stages.0.placements.w.tensor: the stage splits nothing along tensor: leave it out, or give",
    ),
}


@pytest.mark.parametrize(("stages", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_in_python(stages: list[dict[str, Any]], says: str) -> None:
    for build in (
        lambda: Plan(stages=tuple(Stage(**stage) for stage in stages)),
        lambda: Plan.model_validate({"stages": stages}),
    ):
        with pytest.raises(PolylaneError) as caught:
            build()
        assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            (PLAN.stages[0], PLAN.stages[0].model_copy(update={"nodes": ("layer2", "layer5")})),
            "plan: device 0 is on st",
        ),
        ((), "plan: stages: there must be at least one"),
    ],
)
def test_a_plan_that_was_changed_is_looked_at_before_it_is_used(stages: tuple[Stage, ...], says: str) -> None:
    """Copies of models are not validated by pydantic."""
    changed = PLAN.model_copy(update={"stages": stages})
    with pytest.raises(PolylaneError) as caught:
        partition_for(changed, GRAPH)
    assert str(caught.value).startswith(says)
    with pytest.raises(PolylaneError) as caught:
        workers(lambda job: job, mlp(6, 8, 4), changed, example=batch_of(8))
    assert str(caught.value).startswith(says)


def test_errors_of_a_file_name_it_once(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(dump(PLAN).replace("devices: [2, 5]", "devices: [2, 3]"))
    with pytest.raises(PolylaneError) as caught:
        load(file)
    assert str(caught.value) == f"plan {file}: device 3 is on stages 0 and 2: every worker has one place"


def test_a_read_plan_knows_its_file(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(dump(PLAN))
    assert load(tmp_path / "plan.yaml").title == f"plan {tmp_path / 'plan.yaml'}"
    assert Plan.model_validate(PLAN.model_dump()).title == "plan"


def test_stages_with_other_numbers_of_replicas_divide_samples_anew() -> None:
    one = Plan(stages=tuple(Stage(nodes=("a", "b"), devices=(s,)) for s in range(2)))
    other = Plan(stages=(*one.stages, Stage(nodes=("c", "d"), devices=(2, 3), mesh={"data": 2})))
    split = Plan(stages=(*one.stages, Stage(nodes=("c", "d"), devices=(2, 3), mesh={"tensor": 2})))
    assert (one.resplits_batch, other.resplits_batch, split.resplits_batch, PLAN.resplits_batch) == (
        False,
        True,
        False,
        False,
    )
    in_turn = Plan(stages=other.stages, replicas="round-robin", microbatches=4)
    assert in_turn.has_uneven_replicas and not in_turn.resplits_batch and in_turn.most_turns == 4
    assert (in_turn.turns(0), in_turn.turns(2)) == (4, 2)
    assert (in_turn.peers(0, 2), in_turn.peers(0, 2, 1), in_turn.peers(3, 0)) == ((2, 3), (3,), (0,))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"microbatches": 1}, "replicas: round-robin: 2 replicas cannot compute microbatches: 1 in turn: give 2 or"),
        ({"sync": {"shard": "optimizer"}}, "sync (shard=optimizer) is for replicas that split every microbatch: leave"),
        ({"schedule": "zb-h1"}, "schedule: zb-h1 needs as many replicas of every stage: give all the same data, or"),
        ({"schedule": "pipedream", "microbatches": 3}, "schedule: pipedream needs as many replicas of every stage"),
    ],
)
def test_replicas_in_turn_that_cannot_be(keys: dict[str, Any], says: str) -> None:
    one = Stage(nodes=("a", "b"), devices=(0,)), Stage(nodes=("c", "d"), devices=(1, 2), mesh={"data": 2})
    with pytest.raises(PolylaneError) as caught:
        Plan.model_validate({"stages": one, "replicas": "round-robin", "microbatches": 4} | keys)
    assert says in str(caught.value) and "\n" not in str(caught.value)
