"""Plans, and files of them with something changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump, load
from polylane.plan.spec import Spec
from tests.support.synthetic_graphs import chain

GRAPH = chain(6)
PLAN = plan_from_partition(Partition(GRAPH, (2, 4)), Spec(data=2, pipeline=3, schedule="afab"), microbatches=4)
MESH = plan_from_partition(Partition(GRAPH, (2,)), Spec(data=2, pipeline=2, tensor=3, sequence=2), microbatches=4)


def edited(path: Path, plan: Plan = PLAN, **changes: Any) -> Path:
    """A plan file with some of its keys changed; "stages.1.devices" reaches inside, None removes."""
    data = yaml.safe_load(dump(plan))
    for key, value in changes.items():
        inside: Any = data
        *way, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        for part in way:
            inside = inside[part]
        if value is None:
            del inside[last]
        else:
            inside[last] = value
    file = path / "plan.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def refusal(file: Path) -> str:
    with pytest.raises(PolylaneError) as caught:
        load(file)
    message = str(caught.value)
    assert message.startswith(f"plan {file}") and "\n" not in message
    return message
