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

from polylane.graph.generators import restore, same, states
from polylane.graph.own_state import Place, places
from polylane.graph.state_digests import Digests
from polylane.graph.state_restore import remember


@contextmanager
def untouched(apply: Callable[..., Any]) -> Iterator[Callable[[], bool]]:
    """Inside, a custom autograd function may be called: random numbers and what its code may change are put back.

    Args:
        apply: the function's own ``apply``.

    Yields:
        Says afterwards whether any of it was changed.
    """
    changed = False
    reached = places((), [getattr(apply, "__self__", apply)], everything=True)
    random, held, put_back = states(), _digests(reached), remember(reached, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield lambda: changed
        finally:
            changed = not same(random, states()) or _digests(reached) != held
            put_back()
            restore(random)


def _digests(reached: Sequence[Place]) -> list[Any]:
    digests = Digests(())
    return [digests.of(place.get()) for place in reached]
