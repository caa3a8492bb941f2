"""States and their algebra: how the values of a batch's parts make up the value of the whole batch.

A batch of n samples is divided into parts of n_i samples. In terms of the parts' values, the whole batch's value is

    rows            their concatenation along the dimension of the samples             Shard
    replicated      equal to each of them                                              Replicate
    additive(q)     the sum of (n_i / n)^q times each: q = 0 is a sum, q = 1 a mean    Additive
    proportional(p) part_i = (n_i / n)^p whole: a number of samples has p = 1          Proportional
    scaled(p)       rows, where part_i's rows are (n_i / n)^p times the whole's         ScaledRows
    regrouped       all rows of the parts, in an order that data decides               Regrouped, Groups, Inverse
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from polylane.graph.operators.whole_batch_counts import BatchShare, WholeSize
from polylane.graph.symbolic_sizes import is_dynamic, size_function
from polylane.placement.placement import REPLICATE, Placement, Shard, even_cuts

# The interpretation compares a whole of four samples with two replicas of two each.
OWN, REPLICAS = 2, 2
WHOLE = OWN * REPLICAS

# Numbers of samples at which a size's power law is tested: small ones, and some beyond any bound in user code.
PROBES = (*range(1, 2 * WHOLE), 63, 1024, 65_537)


@dataclass(frozen=True)
class Additive:
    """The whole's value is the sum of the parts' values, each times its share of the samples to a power.

    Attributes:
        power: 0 for a sum, 1 for a mean over samples.
    """

    power: int


@dataclass(frozen=True)
class Proportional:
    """A part's value is the whole's times its share of the samples to a power other than 0."""

    power: int


@dataclass(frozen=True)
class ScaledRows:
    """A part's rows are the whole's rows times its share of the samples to a power other than 0."""

    rows: Shard
    power: int


@dataclass(frozen=True)
class Regrouped:
    """The whole's rows are those of the parts, in an order that data decides; see :mod:`.regrouped_rows`.

    Attributes:
        rows: dimension 0, which has the rows, with their cuts.
        order: name of the operator that decides the order; values with the same order correspond row by row.
    """

    rows: Shard
    order: str


@dataclass(frozen=True)
class Groups:
    """How many rows each group of an order has, where the order sorts rows by group.

    Attributes:
        order: name of the operator that sorts.
        ends: whether the numbers are added up, so that they say where each group ends.
    """

    order: str
    ends: bool


@dataclass(frozen=True)
class Inverse:
    """The numbers that put rows of an order back where they were.

    Attributes:
        order: name of the operator that sorts.
        rows: the rows as they were.
    """

    order: str
    rows: Shard


State = Placement | Additive | Proportional | ScaledRows | Regrouped | Groups | Inverse
IN_OTHER_ORDER = Regrouped, Groups, Inverse


def power_of_additive(state: State | None) -> int | None:
    """Return the power with which a value is additive; None if it is not."""
    if isinstance(state, Additive):
        return state.power
    power = power_of_proportional(state)
    return None if power is None else 1 - power  # x = sum of share_i x, and part_i = share_i^p x


def power_of_proportional(state: State | None) -> int | None:
    """Return the power with which a part's value is proportional; 0 for replicated values; None if it is not."""
    if isinstance(state, Proportional):
        return state.power
    return 0 if state == REPLICATE else None


def proportional(power: int) -> State:
    """Return the state of a value proportional to a power of the share; replicated for power 0."""
    return Proportional(power) if power else REPLICATE


def power_of_size(node: fx.Node) -> int | None:
    """Return the power of the number of samples that a size follows; None if it follows none."""
    target: Any = node.target
    if isinstance(target, BatchShare):
        return -target.power
    if isinstance(target, WholeSize):
        return 0
    for power in (0, 1, -1):
        try:
            if all(math.isclose(target.of(n), target.of(1) * float(n) ** power, rel_tol=1e-12) for n in PROBES):
                return power
        except (ArithmeticError, TypeError, ValueError):
            return None
    return None


def multiply_states(left: State, right: State, sign: int) -> Sequence[State | None] | None:
    """Return the state of a product (sign 1) or quotient (sign -1); None if unknown."""
    a, b = power_of_proportional(left), power_of_proportional(right)
    if a is not None and b is not None:
        return [proportional(a + sign * b)]
    # x = sum share_i^q x_i and y_i = share_i^p y give xy = sum share_i^(q - p) x_i y_i; a quotient adds the
    # power.
    if b is not None and isinstance(left, Additive):
        return [Additive(left.power - sign * b)]
    if a is not None and isinstance(right, Additive) and sign == 1:
        return [Additive(right.power - a)]
    return None


def sample_order_placement(val: Tensor) -> Placement | None:
    """Return the placement of a tensor that has equally many rows per sample, in order; None if it cannot have.

    Tensors independent of the samples are replicated. For rows selected by a mask, each selected row counts as a
    sample.
    """
    growing = [dim for dim, size in enumerate(val.shape) if is_dynamic(size)]
    if not growing:
        return REPLICATE
    of = size_function(val.shape[growing[0]], ragged=True)
    try:
        if len(growing) > 1 or any(of(samples) != samples * of(1) for samples in PROBES):
            return None
    except (ArithmeticError, TypeError):
        return None
    return Shard(growing[0], even_cuts(of(WHOLE), REPLICAS))
