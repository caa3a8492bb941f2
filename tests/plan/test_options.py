"""Keys of plans: what follows from a field's type and default, and what its row says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest

from polylane.errors import PolylaneError
from polylane.plan.options import OPTIONS, PlanKey, PlanOptions, keys_of
from polylane.plan.plan import Plan
from polylane.plan.spec import KEYS, Spec, parse
from tests.plan.plan_files import PLAN


@dataclass(frozen=True)
class MadeUp:
    rounding: Literal["nearest", "up"] = "nearest"
    groups: int = 1
    eager: Annotated[bool, PlanKey(shown="files", applies_alone=False)] = False
    names: tuple[str, ...] = ()
    no_key: float = 0.5


@pytest.mark.parametrize(
    ("key", "text", "value", "wrong", "sentence"),
    [
        ("rounding", "up", "up", "down", "rounding=down is not known, known are nearest, up"),
        ("groups", "3", 3, "0", "groups=0 must be a whole number of at least 1"),
        ("eager", "yes", True, "true", "eager=true must be yes or no"),
        ("names", "a+b.c", ("a", "b.c"), "a++b", "names=a++b: name modules, as in names=experts.0+experts.1, or model"),
    ],
)
def test_a_field_is_a_key(key: str, text: str, value: object, wrong: str, sentence: str) -> None:
    row = keys_of(MadeUp)[key]
    assert row.parse(key, text) == value and row.format(value) == text and row.default == getattr(MadeUp, key)
    with pytest.raises(PolylaneError) as caught:
        row.parse(key, wrong)
    assert str(caught.value) == sentence


def test_a_row_says_what_does_not_follow_from_the_type() -> None:
    rows = keys_of(MadeUp)
    assert list(rows) == ["rounding", "groups", "eager", "names"]
    assert (rows["eager"].shown, rows["eager"].applies_alone) == ("files", False)
    assert (rows["groups"].shown, rows["groups"].applies_alone) == ("nowhere", True)


def test_both_kinds_of_plans_have_all_options() -> None:
    assert set(PlanOptions().option_values()) == set(OPTIONS) == set(PLAN.option_values())
    assert set(OPTIONS) < set(Plan.model_fields) and set(KEYS) - {"chunks"} - set(OPTIONS) < set(vars(Spec()))
    assert Spec(precision="bfloat16").option_values() == {**Spec().option_values(), "precision": "bfloat16"}
    spec = parse(PLAN.spec)
    assert {**PLAN.option_values(), "order": ()} == spec.option_values()


def test_a_changed_plan_is_checked() -> None:
    assert PLAN.changed(precision="bfloat16").precision == "bfloat16" and PLAN.precision == "float32"
    for plan in (PLAN, parse("data=2,pipeline=3,schedule=afab")):
        assert plan.changed(schedule="1f1b") == (
            replace(plan, schedule="1f1b") if isinstance(plan, Spec) else plan.model_copy(update={"schedule": "1f1b"})
        )
    with pytest.raises(PolylaneError, match="vertical_sync is for schedule=pipedream, not afab"):
        PLAN.changed(vertical_sync=True)
    with pytest.raises(PolylaneError, match="plan: compile and shard=parameters exclude each other"):
        PLAN.changed(compile=True, sync=PLAN.sync.changed(shard="parameters"))
