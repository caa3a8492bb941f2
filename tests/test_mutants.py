"""The table of mutants fits the code as it is, and what is planted stands where it should, and nowhere else."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import fits
from tests.mutants.planting import Misfit, Mutant, mutated
from tests.mutants.table import MUTANTS

SOURCE = '''"""A module."""


def other(a, b):
    return a + b


class Sum:
    def of(self, a, b):
        total = (a
                 + b)  # both
        print("§", a + b)
        return total

    def other(self, a, b):
        return a * b
'''


def mutant(where: str, find: str, put: str, times: int = 1) -> Mutant:
    return Mutant("id", "wrong", where, find, put, "", times=times)


def test_every_mutant_fits_the_code() -> None:
    assert fits(MUTANTS) == []
    assert len(MUTANTS) == len({each.id for each in MUTANTS}) >= 60


def test_an_expression_is_replaced_in_its_function_alone() -> None:
    changed = mutated(mutant("m:Sum.of", "a + b", "a - b", times=2), SOURCE)
    assert changed.count("(a - b") == 2 and "return a + b" in changed
    assert changed.count("\n") == SOURCE.count("\n")  # errors and culprits name the lines that they named before


def test_a_qualname_is_the_whole_way_to_a_function() -> None:
    """A method may have the name of a function of its module."""
    assert "return a - b" in mutated(mutant("m:other", "return a + b", "return a - b"), SOURCE)
    assert "return a - b" in mutated(mutant("m:Sum.other", "return a * b", "return a - b"), SOURCE)


def test_statements_are_replaced() -> None:
    changed = mutated(mutant("m:Sum.of", "total = a + b", "total = a\ntotal += 2 * b"), SOURCE)
    scope: dict[str, type] = {}
    exec(changed, scope)
    assert scope["Sum"]().of(1, 2) == 5


def test_what_is_planted_reads_only_names_that_are_there() -> None:
    """Else it is a NameError, and whoever notices that has noticed nothing of the bug."""
    with pytest.raises(Misfit, match=r"reads total_of_all, which m:Sum\.of does not have"):
        mutated(mutant("m:Sum.of", "return total", "return total_of_all"), SOURCE)
    assert "total = sum" in mutated(mutant("m:Sum.of", "total = a + b", "total = sum((a, b), start=0)"), SOURCE)


@pytest.mark.parametrize(
    ("where", "find", "times"),
    [("m:Sum.of", "a + b", 1), ("m:Sum.of", "a * b", 1), ("m:Sum.off", "a + b", 2), ("m:other", "a + b", 2)],
)
def test_what_does_not_fit_is_refused(where: str, find: str, times: int) -> None:
    with pytest.raises(Misfit):
        mutated(mutant(where, find, "a", times), SOURCE)


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(Misfit, match="no Python"):
        mutated(mutant("m:other", "a + b", "a +"), SOURCE)
