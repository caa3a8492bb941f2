"""Iterators are seen where they are, and put back there; what cannot be put back is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.graph.python_state.iterators import copy_iterator, digest_parts, find_forward_only
from polylane.graph.python_state.state import PythonName
from polylane.graph.python_state.state_snapshots import StateDigests, snapshot_names
from tests.support.workers.training import batch_of, classify, mlp, sgd

LETTERS = list("abcdefgh")

ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "a list": lambda: iter(LETTERS),
    "a tuple": lambda: iter(tuple(LETTERS)),
    "a range": lambda: iter(range(8)),
    "a dictionary": lambda: iter(dict.fromkeys(LETTERS)),
    "zip": lambda: zip(LETTERS, itertools.count(), strict=False),
    "enumerate": lambda: enumerate(LETTERS),
    "reversed": lambda: reversed(LETTERS),
    "map": lambda: map(str.upper, LETTERS),
    "filter": lambda: filter(str.isalpha, LETTERS),
    "count": lambda: itertools.count(3, 2),
    "cycle": lambda: itertools.cycle(LETTERS[:3]),
    "chain": lambda: itertools.chain(LETTERS[:2], itertools.repeat("z")),
    "islice": lambda: itertools.islice(LETTERS, 1, 8),
    "accumulate": lambda: itertools.accumulate(range(9)),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
@pytest.mark.parametrize("begun", [0, 1, 4])
def test_a_copy_begins_where_its_original_is(make: Callable[[], Iterator[Any]], begun: int) -> None:
    own, truth = make(), make()
    for _ in range(begun):
        next(own), next(truth)
    copied = copy_iterator(own)
    assert [next(copied) for _ in range(3)] == [next(own) for _ in range(3)] == [next(truth) for _ in range(3)]


OVER_LISTS: dict[str, Callable[[list[str]], Iterator[Any]]] = {
    "iter": iter,
    "zip": lambda items: zip(items, itertools.count(), strict=False),
    "enumerate": enumerate,
    "map": lambda items: map(str.upper, items),
    "chain": lambda items: itertools.chain(items, items),
    "cycle": itertools.cycle,
    "accumulate": itertools.accumulate,
    "of lists": lambda items: itertools.chain([items], [items]),
}


@pytest.mark.parametrize("make", OVER_LISTS.values(), ids=OVER_LISTS)
def test_a_copy_goes_over_the_same_list(make: Callable[[list[str]], Iterator[Any]]) -> None:
    """What is put into the list later comes to both."""
    items = list("ab")
    own = make(items)
    next(own)
    copied = copy_iterator(own)
    items.append("c")
    assert list(itertools.islice(copied, 5)) == list(itertools.islice(own, 5)) != []
    assert "c" in str(list(itertools.islice(make(items), 5))).lower()


@pytest.mark.parametrize("begun", [1, 3, 4])
def test_a_cycle_and_its_copy_have_lists_of_their_own_of_what_they_have_given(begun: int) -> None:
    own, truth = itertools.cycle(LETTERS[:3]), itertools.cycle(LETTERS[:3])
    for _ in range(begun):
        next(own), next(truth)
    copied = copy_iterator(own)
    list(itertools.islice(copied, 4))
    assert list(itertools.islice(own, 9)) == list(itertools.islice(truth, 9))


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_what_goes_forward_is_seen_and_put_back(make: Callable[[], Iterator[Any]]) -> None:
    """Two names of one iterator, one of them in a table of an object, have one again."""
    shared = make()
    owner: Any = SimpleNamespace(direct=shared, table={"kept": shared}, still=make())
    places = [PythonName(owner, name, name, "attribute") for name in ("direct", "table", "still")]
    restore, truth, still = snapshot_names(places, ()), next(make()), owner.still
    for _ in range(2):
        before = StateDigests(()).of(owner.direct)
        assert next(owner.direct) == truth
        assert StateDigests(()).of(owner.direct) != before
        next(owner.table["kept"])
        restore()
        assert owner.direct is owner.table["kept"] and owner.still is still


def test_an_iterator_in_a_closure_of_a_table() -> None:
    """A hook of a module counts in its closure: the table of hooks is the module's, the closure is the function's."""
    passes = itertools.count()

    def hook() -> int:
        return next(passes)

    owner: Any = SimpleNamespace(hooks={0: hook})
    restore = snapshot_names([PythonName(owner, "hooks", "hooks", "attribute")], ())
    for _ in range(2):
        assert (owner.hooks[0](), owner.hooks[0]()) == (0, 1)
        restore()


def numbered() -> Iterator[int]:
    yield from range(9)


def test_what_cannot_be_put_back_is_found() -> None:
    loader = iter(DataLoader([1, 2, 3]))
    for value, found in ((numbered(), True), (loader, True), (iter([1]), False)):
        assert (find_forward_only({"a": [(value,)]}) is value) == found
        before = StateDigests(()).of(value)
        assert digest_parts(value) is not None
        next(value)
        assert StateDigests(()).of(value) != before
    assert find_forward_only(zip(numbered(), [1], strict=False)) is not None


def test_a_generator_in_a_loss_is_refused_and_one_beside_it_is_not() -> None:
    factors, beside = (1.0 * i for i in range(99)), numbered()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        assert beside is not None
        return classify(model, batch) * (next(factors) if model is not None and uses else 1.0)

    for uses in (False, True):
        problem = TrainingProblem(mlp(6, 8, 4), build_objectives(loss, sgd, None), batch_of(4))
        if uses:
            with pytest.raises(PolylaneError, match=r"factors of .*loss is a generator, which goes forward"):
                problem.capture()
        else:
            problem.capture()
    assert next(beside) == 0
