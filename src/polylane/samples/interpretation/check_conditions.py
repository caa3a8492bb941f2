"""Conditions of checks: does a check of every part of a batch raise exactly where one of the whole batch would?

A check raises if its condition is true (or is false). That the parts' checks do the same is proven where the whole's
condition is the disjunction of the parts' (``labels.max() >= n``, ``x.isnan().any()``), the conjunction for a check
that raises on false (``(x > 0).all()``), or the same for all parts.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor, fx

from polylane.graph.capture.python.raising_branches import BatchCheck
from polylane.graph.nodes.facts import base_name, unwrap_settings
from polylane.graph.symbolic_sizes import is_ragged
from polylane.placement.placement import REPLICATE, Shard
from polylane.samples.interpretation.additivity import Additive
from polylane.samples.interpretation.known_states import KnownStates


class Joined(Enum):
    """How the parts' values of a scalar make up the whole batch's."""

    SAME = "equal in all parts"
    ANY = "true if one part's is"
    ALL = "true if all parts' are"
    MAX = "the largest of the parts'"
    MIN = "the smallest of the parts'"


_REDUCTIONS = {"max": Joined.MAX, "amax": Joined.MAX, "min": Joined.MIN, "amin": Joined.MIN}
_REDUCTIONS |= {"any": Joined.ANY, "all": Joined.ALL}
_OPPOSITE = {Joined.ANY: Joined.ALL, Joined.ALL: Joined.ANY, Joined.SAME: Joined.SAME}
_ABOVE = {Joined.MAX: Joined.ANY, Joined.MIN: Joined.ALL, Joined.SAME: Joined.SAME}
_BELOW = {Joined.MAX: Joined.ALL, Joined.MIN: Joined.ANY, Joined.SAME: Joined.SAME}
_UNCHANGED = frozenset(("detach", "alias", "clone", "squeeze", "view", "reshape", "to", "_to_copy"))


def check_holds_by_parts(states: KnownStates, node: fx.Node) -> bool:
    """Return whether checks of all parts of a batch are proven to raise exactly where the whole batch's does.

    Args:
        states: what is known of the graph's values up to the check.
        node: the check; its only tensor is the condition.
    """
    check = unwrap_settings(node.target)
    assert isinstance(check, BatchCheck)
    tensors: Any = node.args[1]
    joined = _join(states, tensors[0])
    return joined is Joined.SAME or joined is (Joined.ALL if check.raised.answer else Joined.ANY)


def _join(states: KnownStates, value: Any) -> Joined | None:
    """Return how the parts' values of a scalar make up the whole's; None if that is unknown."""
    if not isinstance(value, fx.Node):
        return Joined.SAME  # a number of the user's code
    if not isinstance(value.meta.get("val"), Tensor):
        return None
    if states.states.get(states.key_of(value)) == REPLICATE:
        return Joined.SAME
    base = base_name(value)
    if base in _UNCHANGED:
        return _join(states, value.args[0])
    if base in _REDUCTIONS:
        return _join_reduced(states, value, _REDUCTIONS[base])
    if base in ("isnan", "isinf", "isfinite") and isinstance(_state_of(states, value.args[0]), Additive):
        return Joined.ALL if base == "isfinite" else Joined.ANY  # of a sum or mean over the parts
    if base in ("logical_not", "bitwise_not"):
        return _OPPOSITE.get(_join(states, value.args[0]) or Joined.MAX)
    return _join_two(states, base, value) if len(value.args) >= 2 else None


def _join_two(states: KnownStates, base: str, value: fx.Node) -> Joined | None:
    """Return the same for an operator of two operands: a comparison, or a logical one."""
    first, second = (_join(states, operand) for operand in value.args[:2])
    if first is None or second is None:
        return None
    if base in ("logical_or", "bitwise_or", "__or__"):
        return Joined.ANY if {first, second} <= {Joined.ANY, Joined.SAME} else None
    if base in ("logical_and", "bitwise_and", "__and__"):
        return Joined.ALL if {first, second} <= {Joined.ALL, Joined.SAME} else None
    above = {"ge": True, "gt": True, "le": False, "lt": False}.get(base)
    if above is None or Joined.SAME not in (first, second):
        return None
    moving, above = (first, above) if second is Joined.SAME else (second, not above)
    return (_ABOVE if above else _BELOW).get(moving)


def _join_reduced(states: KnownStates, value: fx.Node, reduced: Joined) -> Joined | None:
    """Return the same for a reduction over all samples: of rows, or of what is reduced alike already."""
    of: Any = value.args[0]
    key = states.key_of(of)
    if isinstance(states.states.get(key), Shard):
        rows = key not in states.size_cuts and not is_ragged(of.meta.get("val"))
        is_replicated = states.placements.get(states.key_of(value)) == REPLICATE
        return reduced if rows and is_replicated else None
    return reduced if _join(states, of) is reduced else None


def _state_of(states: KnownStates, value: Any) -> Any:
    return states.states.get(states.key_of(value)) if isinstance(value, fx.Node) else None
