"""The forms of issues and the workflow are what GitHub takes: it refuses a form with a key that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.docs.page_blocks import ROOT

FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
# Keys of `attributes` by the type of a part of a form.
TEXT = {"label", "description", "placeholder", "value"}
ATTRIBUTES = {
    "markdown": {"value"},
    "input": TEXT,
    "textarea": TEXT | {"render"},
    "checkboxes": {"label", "description", "options"},
    "dropdown": {"label", "description", "options", "multiple", "default"},
}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_the_keys_of_forms(path: Path) -> None:
    """A comma in a text without quotes begins another key."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    labels = [part["attributes"].get("label") for part in form["body"]]
    assert len({*labels}) == len(labels)
    for part in form["body"]:
        assert part["attributes"].keys() <= ATTRIBUTES[part["type"]], part
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        assert all(isinstance(value, (str, list, bool, int)) for value in part["attributes"].values())


def test_the_targets_that_the_workflow_makes_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    halves = [half for job in jobs.values() for half in job.get("strategy", {}).get("matrix", {}).get("half", [])]
    lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = [line.partition("make ")[2].split()[0] for line in lines if "make " in line]
    targets = [target for target in targets if not target.startswith("$")] + halves
    assert {"check", "test-workers", "test-alone", "docs", "package"} <= {*targets}
    assert not [target for target in targets if f"\n{target}:" not in makefile]
