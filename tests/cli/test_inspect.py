"""polylane inspect: nodes, stages, splits and predictions as text, as JSON and as pictures; plans that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polylane.commands import user_inputs as inputs
from polylane.commands.requests import RecipeRequest
from polylane.compile.compiled_training import compile_training
from polylane.cost.integer_program import IntegerProgram
from polylane.plan import plan_file as plans
from tests.cli.tiny_recipe import call


def test_inspect_draws_the_stages(tmp_path: Path) -> None:
    svg = tmp_path / "lanes.svg"
    branches = Path(__file__).parents[2] / "examples" / "plans" / "branches_in_pipeline.yaml"
    recipe = branches.parent.parent / "inception.py"
    tiny = ("--set", "width=4", "--set", "blocks=1", "--batch", "16")
    told = json.loads(call("inspect", recipe, "--plan", branches, "--svg", svg, "--json", *tiny).stdout)
    assert [stage["after"] for stage in told["stages"]] == [[], [0], [0], [0], [0], [1, 2, 3, 4]]
    assert [stage["mesh"] for stage in told["stages"]] == ["1"] * 5 + ["data=2"]
    assert [stage["live"] for stage in told["stages"]] == [3, 2, 2, 2, 2, 1]
    assert {(edge["from"], edge["to"]) for edge in told["edges"]} == {(0, s) for s in range(1, 5)} | {
        (s, 5) for s in range(1, 5)
    }
    assert 0 < told["utilization"] < 1 and svg.read_text().startswith("<svg")
    done = call("inspect", recipe, "--svg", svg)
    assert done.exit_code == 2 and "--svg" in done.stderr and "say which one with --plan" in done.stderr


def test_inspect_as_json(here: Path) -> None:
    result = json.loads(call("inspect", "tiny.py", "--batch", "6", "--json").stdout)
    assert result["samples"] == 6
    assert result["parameters"] == result["trainable"] == 4 * 8 + 8 + 3 * (8 * 8 + 8) + 8 * 2 + 2
    modules = {row["module"]: row for row in result["modules"]}
    assert modules["layers.1.0"]["parameters"] == 72
    assert modules["layers.1.0"]["flops"] == 2 * 6 * 8 * 8
    assert sum(row["nodes"] for row in result["modules"]) == result["nodes"]
    assert result["notes"] == []
    assert "stages" not in result


def test_inspect_with_a_plan(here: Path) -> None:
    line = ("inspect", "tiny.py", "--set", "depth=12", "--plan", "data=2,pipeline=3,microbatches=4")
    result = json.loads(call(*line, "--json").stdout)
    assert [stage["devices"] for stage in result["stages"]] == [[0, 3], [1, 4], [2, 5]]
    assert sum(stage["time_share"] for stage in result["stages"]) == pytest.approx(1)
    skip = next(crossing for crossing in result["crossings"] if crossing["value"] == "relu")
    assert skip["to"][-1] == 2  # straight from its producer, past the stage between
    assert skip["shape"] == [result["samples"], 8]
    assert skip["bytes"] == result["samples"] * 8 * 4
    assert skip["gradient"]
    shown = call("inspect", "tiny.py", "--plan", "pipeline=3").stdout
    assert "relu" in shown
    assert "comes back" in shown


def test_inspect_explains_how_operators_are_split(here: Path) -> None:
    result = json.loads(call("inspect", "tiny.py", "--plan", "sequence=2,tensor=2", "--json").stdout)
    assert result["plan"].startswith("data=1,pipeline=1,sequence=2,tensor=2,") and result["workers"] == 4
    assert [stage["devices"] for stage in result["stages"]] == [[0, 1, 2, 3]]
    assert list(result["splits"]) == ["sequence", "tensor"]
    tensor = result["splits"]["tensor"]
    assert tensor["degree"] == 2 and tensor["parameters"] < 0.75 * tensor["whole"]
    assert any(module["module"].startswith("layers.") for module in tensor["modules"])
    shown = call("inspect", "tiny.py", "--plan", "tensor=2").stdout
    assert "How operators are split along tensor, by data=1,pipeline=1,tensor=2" in shown
    assert "on each of 2 ranks" in shown and "along sequence" not in shown


def test_inspect_holds_to_a_plans_placements(here: Path) -> None:
    request = RecipeRequest(recipe="tiny.py", batch=64)
    problem = inputs.open_problem(inputs.open_recipe(request), request).problem
    made = compile_training(replace(problem, batch_size=None), "tensor=2").plan
    pins = {"layers.1.0.weight": {"tensor": "replicate"}}
    written = made.model_copy(update={"stages": (made.stages[0].model_copy(update={"placements": pins}),)})
    Path("pinned.yaml").write_text(plans.dump(written))
    lines = json.loads(call("inspect", "tiny.py", "--plan", "pinned.yaml", "--json").stdout)["splits"]["tensor"][
        "lines"
    ]
    assert any("layers.1.0.weight" in line and line.endswith(": pinned") for line in lines)
    Path("pinned.yaml").write_text(plans.dump(written).replace("layers.1.0.weight", "layers.1.0.wait"))
    refused = call("inspect", "tiny.py", "--plan", "pinned.yaml")
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    says = "plan pinned.yaml: stages.0.placements.layers.1.0.wait: the model has no parameter and no node of this name"
    assert says in refused.stderr


def test_inspect_writes_the_plan(here: Path) -> None:
    line = ("inspect", "tiny.py", "--plan", "data=2,pipeline=2,tensor=2,microbatches=4")
    shown = call(*line, "--write", "made/plan.yaml")
    assert "made/plan.yaml has this plan" in shown.stdout
    plan = plans.load("made/plan.yaml")
    assert plan.spec == "data=2,pipeline=2,tensor=2,schedule=1f1b,microbatches=4" and plan.graph is not None
    again = json.loads(call("inspect", "tiny.py", "--plan", "made/plan.yaml", "--write", "b.yaml", "--json").stdout)
    assert again["plan"] == plan.spec and again["file"] == "b.yaml" and plans.load("b.yaml") == plan
    assert "tiny.py/b.yaml cannot be written" in call(*line, "--write", "tiny.py/b.yaml").stderr


WRITTEN = """
stages:
- nodes: [inward, layers.1]
  devices: [0, 1]
  mesh: {tensor: 2}
  placements:
    inward.weight: {tensor: shard(0)}
- nodes: [layers.2.0/linear, loss]
  devices: [2, 3]
  mesh: {tensor: 2}
microbatches: 2
"""


def test_a_plan_that_a_person_writes(here: Path) -> None:
    Path("mine.yaml").write_text(WRITTEN)
    result = json.loads(call("inspect", "tiny.py", "--plan", "mine.yaml", "--write", "full.yaml", "--json").stdout)
    assert [stage["last"] for stage in result["stages"]] == ["layers.1.1/tanh", "loss/mul"]
    assert plans.load("mine.yaml").graph is None and plans.load("full.yaml").graph is not None
    Path("mine.yaml").write_text(WRITTEN.replace("layers.1]", "layers.7]"))
    refused = call("inspect", "tiny.py", "--plan", "mine.yaml")
    assert "plan mine.yaml: stages.0.nodes: the model has no node and no module 'layers.7'" in refused.stderr
    for placement, says in (
        ("{tensor: shard(0), tensor: shard(1)}", "tensor is there twice"),
        ("{tensor: partial}", ""),
    ):
        Path("mine.yaml").write_text(WRITTEN.replace("{tensor: shard(0)}", placement))
        refused = call("inspect", "tiny.py", "--plan", "mine.yaml")
        assert refused.exit_code == 2 and refused.stderr.startswith("polylane: plan mine.yaml: ")
        assert (says or "placements.inward.weight.tensor: partial: not possible here") in refused.stderr


def test_plans_of_thousands_of_workers_are_looked_at(here: Path) -> None:
    line = ("inspect", "tiny.py", "--set", "samples=8192", "--batch", "8192", "--plan", "data=4096,pipeline=2,tensor=2")
    shown = call(*line).stdout
    assert "0-1, 4-5, ..., 16380-16381 (8,192)" in shown and len(shown) < 9000
    refused = call("inspect", "tiny.py", "--plan", "tensor=4096")
    assert "tensor=4096: nothing in the model can be cut into so many parts, its longest dimension is" in refused.stderr


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ("data=1", "for 12 samples: the batch"),
        ("microbatches=3", "for 4 samples: a microbatch"),
        ("data=2", "for 6 samples: a replica's part of the batch"),
        ("data=2,microbatches=3", "for 2 samples: a replica's part of a microbatch"),
        ("data=12", "for 2 samples: no fewer are looked at, though the plan gives a worker fewer at a time"),
    ],
)
def test_inspect_says_for_how_many_samples(here: Path, plan: str, share: str) -> None:
    shown = call("inspect", "tiny.py", "--batch", "12", "--plan", plan).stdout
    assert f"forward, {share}" in " ".join(shown.split())


def test_inspect_says_that_replicas_compute_a_batch_together(here: Path) -> None:
    recipe = (
        Path("tiny.py")
        .read_text()
        .replace("F.cross_entropy(model(x), y)", "(model(x) @ model(x).T).softmax(1).diag().mean()")
    )
    Path("meeting.py").write_text(recipe)
    shown = call("inspect", "meeting.py", "--batch", "8", "--plan", "data=2").stdout
    share = "for 4 samples: as many as each replica has of a batch; samples meet, so 2 replicas compute it together"
    assert share in " ".join(shown.split()) and "How operators are split along data" in shown


def test_inspect_says_what_an_optimizer_kept_whole(here: Path) -> None:
    """Whose optimizer runs on these weights alone, and not on the larger values of a trial."""
    picky = (
        "if max(p.abs().max() for _, p in parameters) > 1: raise ValueError('too large')\n    return torch.optim.SGD"
    )
    recipe = Path("tiny.py").read_text().replace("return torch.optim.SGD", picky)
    Path("picky.py").write_text(recipe)
    with pytest.warns(UserWarning, match="10 parameters stay whole on every rank of tensor=2, .*ValueError: too large"):
        shown = call("inspect", "picky.py", "--plan", "tensor=2").stdout
    why = "its optimizer does not run on small parameters (picky.py:53: optimizer(parameters) raised ValueError: too"
    assert "whole on every rank: inward.weight (128 B): " + why in shown


def test_inspect_says_where_a_search_stopped_early(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = IntegerProgram.solve
    stopped = {"status": "stopped early", "gap": 0.031}
    monkeypatch.setattr(IntegerProgram, "solve", lambda *args, **more: replace(solve(*args, **more), **stopped))
    shown = call("inspect", "tiny.py", "--plan", "tensor=2").stdout
    assert "the search for the best split stopped early after 0 s: by the model it is within 3.1 % of it" in shown
    found = json.loads(call("inspect", "tiny.py", "--plan", "tensor=2", "--json").stdout)["splits"]["tensor"]
    assert found["report"]["status"] == "stopped early" and found["report"]["gap"] == 0.031


def test_inspect_sums_up_deep_models(here: Path) -> None:
    shown = call("inspect", "tiny.py", "--set", "depth=30").stdout
    assert "layers.*.0  x 30" in shown
    assert "layers.7.0" not in shown
