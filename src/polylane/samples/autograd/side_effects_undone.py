"""Side effects of user code that is called only for tracing: detected, and undone.

Such a call must not change a counter, a list or a random generator. What a custom autograd function can change is what
its code names: attributes of its class, globals, closure variables and their contents, also through the functions that
it calls, those of libraries included.
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
    """Context manager: restore random generators and all state that a custom autograd function's code can change.

    Args:
        apply: the bound ``apply`` of the autograd function's class.

    Yields:
        Function that tells, after the context, whether anything was changed.
    """
    changed = False
    reached = find_python_names((), [getattr(apply, "__self__", apply)], everything=True)
    random, held, put_back = generator_states(), _digests(reached), snapshot_names(reached, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield lambda: changed
        finally:
            # A function that changes state is not proven, even though the change is undone: it may depend
            # on it.
            changed = not states_equal(random, generator_states()) or _digests(reached) != held
            put_back()
            restore_generators(random)


def _digests(reached: Sequence[PythonName]) -> list[Any]:
    digests = StateDigests(())
    return [digests.of(place.get()) for place in reached]
