"""Plans read and write as they were recorded, word for word: in one line, in a file, and as what a search must keep."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.fewer_workers import keep_numbers
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.fixed_keys import parse_auto
from polylane.plan.options import OPTIONS
from polylane.plan.plan_file import dump, parse_plan
from polylane.plan.spec import KEYS, default_microbatches, parse
from tests.plan.plan_files import GRAPH

# Of each text what became of it: sentences of errors, or what the plan writes again.
RECORDED = json.loads(Path(__file__).with_name("recorded_plans.json").read_text(encoding="utf-8"))
# Names of keys that are newer than the record, in a list of those that are known.
NEWER = re.compile("".join(f"(, {key})?" for key in {**KEYS, **OPTIONS} if f", {key}" not in str(RECORDED)) or "$^")
STAGES = "stages:\n- nodes: [n0, n5]\n  devices: [0, 1]\n  mesh: {data: 2}\n"


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except PolylaneError as error:
        return {"error": NEWER.sub("", str(error))}


def write(line: str) -> dict[str, str]:
    spec = parse(line)
    partition = Partition(GRAPH, tuple(range(1, len(spec.meshes))))
    plan = plan_from_partition(partition, spec, default_microbatches(spec, 8))
    text = dump(plan)
    assert text.startswith("polylane: 1\ngraph:") and dump(parse_plan(text, "of a test")) == text
    options = text[text.index("\nschedule:") + 1 :]
    return {"again": plan.spec, "file": options, "kept": str(keep_numbers(spec, 4))}


@pytest.mark.parametrize("line", RECORDED["lines"])
def test_lines(line: str) -> None:
    assert outcome(lambda: write(line)) == RECORDED["lines"][line]


@pytest.mark.parametrize("line", RECORDED["fixed"])
def test_keys_of_a_search(line: str) -> None:
    text = "auto" if line == "auto" else f"auto,{line}"
    assert outcome(lambda: str(parse_auto(text))) == RECORDED["fixed"][line]


@pytest.mark.parametrize("text", RECORDED["files"])
def test_files(text: str) -> None:
    assert outcome(lambda: parse_plan(f"{STAGES}{text}\n", "of a test").spec) == RECORDED["files"][text]
