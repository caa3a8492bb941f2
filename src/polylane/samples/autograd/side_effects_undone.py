"""Side effects of the user's own code that is called only to be traced: they are noticed, and put back.

Such a call must leave nothing behind: no counter, no list, no random number. What a custom autograd function may change
is what its code names: attributes of its class, globals, what it closes over, and what those hold, through the
functions that it calls, those of libraries included.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polylane.graph.python_state.random_generators import generator_states, restore_generators, states_equal
from polylane.graph.python_state.state import PythonName, find_python_names
from polylane.graph.python_state.state_digests import StateDigests
from polylane.graph.python_state.state_restore import snapshot_names


@contextmanager
def undo_side_effects(apply: Callable[..., Any]) -> Iterator[Callable[[], bool]]:
    """Inside, a custom autograd function may be called: random numbers and what its code may change are put back.

    Args:
        apply: the function's own ``apply``.

    Yields:
        Says afterwards whether any of it was changed.
    """
    changed = False
    reached = find_python_names((), [getattr(apply, "__self__", apply)], everything=True)
    random, held, put_back = generator_states(), _digests(reached), snapshot_names(reached, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield lambda: changed
        finally:
            changed = not states_equal(random, generator_states()) or _digests(reached) != held
            put_back()
            restore_generators(random)


def _digests(reached: Sequence[PythonName]) -> list[Any]:
    digests = StateDigests(())
    return [digests.of(place.get()) for place in reached]
