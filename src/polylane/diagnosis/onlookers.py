"""Onlookers: ranks that do not go on, and that need not: nobody waits for them.

what the rank is in                      it counts
a step, its loader, its start, ...       always
a dedicated server, the end              if its process cannot run
the user's own code in a script          if somebody waits for it, be it for others: a script may do anything there
"""

from __future__ import annotations

from collections.abc import Mapping

from polylane.diagnosis.culprit import RankState, find_blockers
from polylane.diagnosis.page_layout import Phase

_IDLE = frozenset({Phase.SERVING, Phase.ENDING})


def without_onlookers(states: Mapping[int, RankState], phases: Mapping[int, Phase]) -> dict[int, RankState]:
    """Return the ranks that the walk to a culprit may pass.

    Args:
        states: by rank, those whose processes have not ended.
        phases: by rank, what it is in.
    """
    counted = {rank: state for rank, state in states.items() if phases[rank] not in _IDLE or state.is_frozen}
    awaited = {blocker for rank in counted for blocker in find_blockers(counted, rank)}
    return {
        rank: state
        for rank, state in counted.items()
        if phases[rank] is not Phase.SCRIPT or state.is_waiting or rank in awaited
    }
