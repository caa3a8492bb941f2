"""Which tests guard a change."""

from __future__ import annotations

from tests.support.quick import HOUSE, select_tests

SOURCES = {
    HOUSE: "",
    "tests/program/test_waits.py": "from polylane.program.waits import LOOKAHEAD",
    "tests/program/test_lower.py": "from polylane.program.lower import lower",
    "tests/properties/test_program_laws.py": "from polylane.program import lower, waits",
    "tests/cost/test_predict.py": "from polylane.cost.predict import predict",
    "tests/test_docs.py": "",
}


def test_the_tests_of_a_file_come_before_those_that_import_it() -> None:
    tests = select_tests(["src/polylane/program/waits.py"], SOURCES)
    assert tests == [HOUSE, "tests/program/test_waits.py", "tests/properties/test_program_laws.py"]


def test_each_changed_file_has_the_test_of_its_name() -> None:
    tests = select_tests(["src/polylane/program/lower.py", "src/polylane/cost/predict.py"], SOURCES)
    assert tests[:3] == [HOUSE, "tests/cost/test_predict.py", "tests/program/test_lower.py"]


def test_changed_tests_come_first_and_pages_have_theirs() -> None:
    tests = select_tests(["tests/cost/test_predict.py", "docs/index.md"], SOURCES)
    assert tests == [HOUSE, "tests/cost/test_predict.py", "tests/test_docs.py"]


def test_every_selected_file_is_there() -> None:
    assert set(select_tests(["src/polylane/errors.py", "Makefile", "src/none.py"], SOURCES)) <= set(SOURCES)
