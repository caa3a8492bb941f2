"""A model that another library's loop trains under a plan is an ordinary one: copied, loaded, and used afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from polylane.commands.verifying.script import is_script
from polylane.errors import PolylaneError
from polylane.integrations.planned_model import PlannedModel
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.session import ScriptSession, running_session
from tests.script.loops import samples, sums_of


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    weights, others = [model[0].weight, model[3].weight], [model[0].bias, *model[1].parameters(), model[3].bias]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.1}, {"params": others}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(plan: str | None) -> list[float]:
    """Train under the plan, then without, and under it again; return what the loop and the model say at each time."""
    model, optimizer = build()
    parameters, numbers = list(model.parameters()), list[float]()
    optimizer.load_state_dict(optimizer.state_dict())  # has other groups from here on
    for is_planned in (True, False, True):
        planned = PlannedModel(model, [optimizer], plan) if plan is not None and is_planned else None
        for x, y in DataLoader(samples(24), batch_size=12):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
            copied = copy.deepcopy(model).eval()
            numbers += [loss.item(), float(copied(x).sum().detach()), *sums_of(copied), *sums_of(model)]
            model.load_state_dict({name: value * 1 for name, value in model.state_dict().items()})
        if planned is not None:
            planned.release()
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        numbers += [float(p.grad.sum()) for p in parameters]
        numbers += [float(state["exp_avg"].sum()) for state in optimizer.state_dict()["state"].values()]
        numbers += [*sums_of(model), float(model.eval()(x).sum().detach())]
        model.train()
    return numbers


@pytest.mark.parametrize(
    "plan", ["pipeline=2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tensor=2", "data=2,shard=parameters"))]
)
def test_a_model_is_whole_again_after_its_training(plan: str) -> None:
    expected = train(None)

    def run(context: WorkerContext) -> list[float]:
        return train(plan)

    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_checkpoints_of_polylane_run_are_for_loops_of_a_script() -> None:
    model, optimizer = build()
    with (
        running_session(ScriptSession(checkpoints=Path("run"), save_every="1")),
        pytest.raises(PolylaneError, match="this Trainer writes checkpoints"),
    ):
        PlannedModel(model, [optimizer], "data=1")


def test_a_script_that_imports_a_bridge_is_no_recipe(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from polylane.integrations.lightning import PlanStrategy\n\ndef model():\n    return None\n")
    assert is_script(str(script))
