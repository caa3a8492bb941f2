"""What scripts do that a recording could get wrong: each trap works exactly, or is refused with its line and reason."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

import polylane
from polylane.errors import PolylaneError
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.script.call_traps import CALL_TRAPS
from tests.script.mode_traps import MODE_TRAPS
from tests.script.model_state.state_traps import STATE_TRAPS
from tests.script.traps import TRAPS
from tests.script.weight_traps import WEIGHT_TRAPS

PLANS = ["data=2", "pipeline=2", "tensor=2", "data=2,shard=parameters"]
ALL_TRAPS = TRAPS | WEIGHT_TRAPS | CALL_TRAPS | MODE_TRAPS | STATE_TRAPS
QUICK = {
    "scaled_gradients",
    "infer",
    "write_views",
    "weigh_by_results",
    "apply_functions",
    "keep_activations",
    "leave_attributes",
    "make_alike",
    "leave_evaluation",
    "write_state_before_backward",
    "edit_optimizer_state",
    "swap_weights",
}
REFUSED = [name for name, trap in ALL_TRAPS.items() if trap.refusal]
# Python that one stage's workers alone run is refused: the script may read on all of them what it keeps.
STATEFUL = {"remember": "self.last", "read_counters": "self."}
BOUNDS = {"scaled_gradients": 1e-5, "casts": 1e-2}  # of single precision, and of bfloat16


def unprepared(*objects: Any) -> Any:
    return objects


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_trap_names_its_reason(name: str) -> None:
    with pytest.raises((PolylaneError, RuntimeError), match=re.escape(ALL_TRAPS[name].refusal)):
        ALL_TRAPS[name].loop(partial(polylane.prepare, plan="data=1"))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=() if name in QUICK and plan == "pipeline=2" else pytest.mark.slow)
        for name in ALL_TRAPS
        if name not in REFUSED
        for plan in PLANS
        if name not in STATEFUL or "pipeline" not in plan
    ],
)
def test_a_trap_prints_the_plain_loop_s_numbers(name: str, plan: str) -> None:
    expected, bound = ALL_TRAPS[name].loop(unprepared), BOUNDS.get(name, 1e-9)

    def run(context: WorkerContext) -> list[float]:
        return ALL_TRAPS[name].loop(partial(polylane.prepare, plan=plan))

    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(expected, rel=bound, abs=bound / 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_python_that_keeps_state_is_refused_under_a_pipeline(name: str) -> None:
    with pytest.raises(PolylaneError, match=rf"writes {STATEFUL[name]}.* runs on the workers of its stage alone"):
        fork_workers(lambda context: ALL_TRAPS[name].loop(partial(polylane.prepare, plan="pipeline=2")), 2)
