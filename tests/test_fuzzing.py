"""A few of the inputs of ``make fuzz``, and that it would notice what is wrong with an end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

import pytest

from polylane.yaml_file import parse
from tests.fuzzing.inputs import CHEAP, CLUSTER, KINDS, PLAN, STAGES, make_input
from tests.fuzzing.isolation import FuzzInput, run_here, run_inputs
from tests.fuzzing.warm_start import warm_up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

ORDINARY = {
    "stages": (("lanes", "1f1b", "--stages", "f.yaml", "--microbatches", "3"), STAGES),
    "plan": (("inspect", "tiny.py", "--plan", "f.yaml", "--batch", "12"), PLAN),
    "cluster": (("simulate", "tiny.py", "--cluster", "f.yaml", "--plan", "data=5", "--batch", "20"), CLUSTER),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_mutated_is_right_before(name: str) -> None:
    arguments, text = ORDINARY[name]
    parse(text)
    tiny = make_input(0, 0).files["tiny.py"]
    outcome = run_here(FuzzInput(name, arguments, {"f.yaml": text.encode(), "tiny.py": tiny}), warm_up())
    assert (outcome.code, outcome.wrong) == (0, ""), outcome


def test_sixty_inputs_end_well_or_in_one_sentence() -> None:
    cheap = [f" {kind.__name__[5:]}" for kind in CHEAP]
    inputs = [one for number in range(150) if (one := make_input(0, number)).name.endswith(tuple(cheap))][:60]
    outcomes = list(run_inputs(inputs, warm_up()))
    assert len(outcomes) == 60
    assert [(one.name, one.wrong, one.said) for one in outcomes if one.wrong] == []


def test_an_input_is_the_same_each_time() -> None:
    assert [make_input(3, number) for number in range(40)] == [make_input(3, number) for number in range(40)]
    assert len({make_input(3, number).name.split()[1] for number in range(300)}) == len(KINDS)


def _main(words: Sequence[str]) -> object:
    match words[0]:
        case "traceback":
            raise KeyError("x")
        case "code":
            sys.exit(7)
        case "silent":
            sys.exit(2)
        case "two lines":
            print("polylane: one\npolylane: two", file=sys.stderr)
            sys.exit(2)
        case "escape":
            print("polylane: \x1b[31m", file=sys.stderr)
            sys.exit(2)
        case "long":
            print("polylane: " + "x" * 5000, file=sys.stderr)
            sys.exit(2)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "memory":
            return bytearray(700 * 2**20)
        case "sentence":
            print("note: a note\npolylane: one sentence", file=sys.stderr)
            sys.exit(2)
    return None


NOTICED = {
    "traceback": "KeyError at test_fuzzing.py",
    "code": "exit code 7, not 2",
    "silent": "0 lines, not one sentence",
    "two lines": "2 lines",
    "escape": "control characters",
    "long": "a sentence of 5010 characters",
    "crash": "its process ended (-9)",
    "hang": "no end within 1 s",
    "memory": " MB",
    "sentence": "",
    "well": "",
}


def test_what_is_wrong_is_noticed() -> None:
    # Only what never ends is waited for to the end of its time: the others have as much as a busy machine takes.
    first = [FuzzInput(name, (name,)) for name in NOTICED if name != "hang"]
    outcomes = [*run_inputs(first, _main), *run_inputs([FuzzInput("hang", ("hang",))], _main, seconds=1.0)]
    assert sorted(one.name for one in outcomes) == sorted(NOTICED)
    for one in outcomes:
        assert NOTICED[one.name] in one.wrong and bool(NOTICED[one.name]) == bool(one.wrong), one


def test_trainings_do_not_go_on_from_what_was_edited() -> None:
    """Those to which the edit says nothing do."""
    inputs = [one for number in range(300) if (one := make_input(1, number)).name.endswith(" resumed")]
    outcomes = list(run_inputs(inputs, warm_up()))
    assert [(one.name, one.wrong, one.said) for one in outcomes if one.wrong] == []
    assert 2 in {one.code for one in outcomes} <= {0, 2}
