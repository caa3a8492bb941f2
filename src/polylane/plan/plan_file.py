"""Plan files: a plan as YAML, written and read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from polylane.errors import PolylaneError, format_value
from polylane.plan.options import OPTIONS
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.spec import parse as parse_line
from polylane.plan.stage import Fingerprint, Stage
from polylane.plan.sync import SyncOptions
from polylane.yaml_file import FileForm, StrictMapping, error_sentence, first_error, parse, read
from polylane.yaml_file import dump as dump_yaml


def dump(plan: Plan) -> str:
    """Format a plan as YAML.

    Args:
        plan: the plan that the file is to hold.

    Returns:
        The text of a plan file.

    Examples:
        >>> from polylane.plan import plan_file
        >>> text = "stages: [{nodes: [model, loss], devices: [0, 1], mesh: {tensor: 2}}]"
        >>> plan = plan_file.parse_plan(text, "of two workers")
        >>> print(plan_file.dump(plan.changed(microbatches=4)))
        polylane: 1
        ...
        microbatches: 4
        ...
    """
    values = plan.model_dump(mode="json")
    data = {key: values[key] for key in _KEYS}
    if plan.graph is None:
        del data["graph"]
    # Keys at their defaults are left out where most plans have no use for them; sync always shows its kind.
    for key, row in OPTIONS.items():
        if row.shown == "nowhere" and getattr(plan, key) == row.default:
            del data[key]
    for stage in data["stages"]:
        for key in ("placements", "recompute"):
            if not stage[key]:
                del stage[key]
    sync = plan.sync.model_dump(mode="json", exclude_defaults=True)
    data["sync"] = {"kind": plan.sync.kind, **({} if plan.sync.has_servers else {"every": plan.sync.every}), **sync}
    return dump_yaml(data)


def load(path: str | Path) -> Plan:
    """Read a plan file.

    Args:
        path: path of the file.

    Returns:
        The plan, for ``polylane.parallelize(..., plan=plan)`` and ``polylane.prepare(..., plan=plan)``.

    Raises:
        PolylaneError: the file cannot be read, or a key is missing, unknown or wrong; one sentence that names it.

    Examples:
        >>> from pathlib import Path
        >>> from polylane.plan import plan_file
        >>> _ = Path("plan.yaml").write_text("stages: [{nodes: [model, loss], devices: [0, 1], mesh: {tensor: 2}}]")
        >>> plan_file.load("plan.yaml").workers
        2
    """
    return _validate(read(path, "plan"), str(path))


def load_or_parse(text: str) -> AnyPlan:
    """Read the plan that a user names: a file, or one line.

    Raises:
        PolylaneError: a key or value is wrong, or the file cannot be read; the message names it.

    Examples:
        >>> from polylane.plan import plan_file
        >>> plan_file.load_or_parse("data=2,pipeline=2").workers
        4
    """
    is_file = text.endswith((".yaml", ".yml")) or (bool(text.strip()) and os.path.exists(text))
    return load(text) if is_file else parse_line(text)


def parse_plan(text: str, name: str) -> Plan:
    """Read a plan from the text of a plan file.

    Args:
        text: the text, as ``dump`` formats it.
        name: what errors call it.

    Returns:
        The plan.

    Raises:
        PolylaneError: for the reasons of ``load``.

    Examples:
        >>> from polylane.plan import plan_file
        >>> plan_file.parse_plan("stages: [{nodes: [model, loss], devices: [0]}]", "of one worker").workers
        1
    """
    try:
        data = parse(text)
    except PolylaneError as error:
        raise PolylaneError(f"plan {name}: {error}") from error
    return _validate(data, name)


def _validate(data: dict[Any, Any], path: str) -> Plan:
    try:
        return Plan.model_validate(data, context={"file": path})
    except pydantic.ValidationError as error:
        details = first_error(error)
        if details["loc"][0] == "polylane":
            raise PolylaneError(
                f"plan {path}: polylane: {format_value(details['input'])} is a form that this version cannot read"
            ) from error
        raise PolylaneError(f"plan {path}: {error_sentence(details, _FORM, data)}") from error


def _keys(location: Sequence[int | str]) -> list[str]:
    """Return the keys that a mapping at a place of a plan file may have, for suggestions in errors."""
    models: dict[str, type[StrictMapping]] = {"graph": Fingerprint, "stages": Stage, "sync": SyncOptions}
    return list(models[str(location[0])].model_fields) if location else list(_KEYS)


# The keys of a file: what the plan is for comes first.
_KEYS = ("polylane", "graph", "stages", *OPTIONS)
_FORM = FileForm("a plan", _keys)
