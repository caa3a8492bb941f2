"""Inspect and simulate say the same of a stage: they ask the same cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polylane.cli import app
from polylane.cluster.spec import parse
from polylane.cost.operators.profile import Both, Profile
from polylane.graph.graph import Graph
from tests.support import subsets

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 16
# In a gpt of one layer the planner would cut the embedding, which the stages of unequal meshes must both hold whole.
SMALL = {"digits": ("digits", "blocks=1"), "gpt": ("gpt", "layers=2"), "one layer": ("gpt", "layers=1")}


def stages(command: str, example: str, *options: str) -> list[dict[str, Any]]:
    file, setting = SMALL[example]
    words = [command, str(EXAMPLES / f"{file}.py"), "--batch", str(BATCH), "--set", setting, *options, "--json"]
    done = CliRunner().invoke(app, words, prog_name="polylane")
    assert done.exit_code == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["stages"]
    return found


def node_seconds(graph: Graph, *_: Any) -> tuple[Both, ...]:
    """In proportion to the samples of a graph: the commands capture it with other numbers of them."""
    return tuple((1e-5 * graph.samples, (2e-5 * graph.samples if node.requires_grad else 0.0)) for node in graph.nodes)


def profile_of(graph: Graph, *_: Any) -> Profile:
    """The same times, as if they had been measured."""
    seconds = node_seconds(graph)
    forward, backward = (sum(both[way] for both in seconds) for way in (0, 1))
    nodes = {node.name: (both,) for node, both in zip(graph.nodes, seconds, strict=True)}
    return Profile((graph.samples,), nodes, ((forward, backward),))


@pytest.mark.parametrize(
    ("plan", "example"),
    subsets.one_in(
        4,
        [
            *subsets.pairs(
                ["data=2", "pipeline=2,microbatches=4", "tensor=2", "[data=2 | tensor=2],microbatches=1"],
                ["digits", "gpt"],
            ),
            ("[data=2 | tensor=2],microbatches=1", "one layer"),
        ],
        first=1,
        several=True,
    ),
)
def test_inspect_says_of_a_stage_what_simulate_says(
    example: str, plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster, written = "4:cpu", tmp_path / "plan.yaml"
    monkeypatch.setattr("polylane.profiling.time_operators._measured", node_seconds)
    monkeypatch.setattr("polylane.inspection.plan_report.running_cluster", lambda *_: parse(cluster))
    monkeypatch.setattr("polylane.probe.profiles.load_profile", profile_of)
    inspected = stages("inspect", example, "--plan", plan, "--write", str(written))
    simulated = stages("simulate", example, "--plan", str(written), "--cluster", cluster, "--profile")
    for ours, theirs in zip(inspected, simulated, strict=True):
        assert ours["memory"] == theirs["memory"] and ours["mesh"] == theirs["mesh"]
        assert ours["parameter_bytes"] == theirs["memory"]["parameters"]
        assert ours["seconds"] == pytest.approx(theirs["forward"] + theirs["backward"], rel=1e-9)
