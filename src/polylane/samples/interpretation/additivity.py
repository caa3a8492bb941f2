"""Additivity over samples: how the values of a batch's parts make up the value of the whole batch, and its algebra.

A batch of n samples is divided into parts of n_i samples. A value of the whole batch is, of the values of the parts,

    rows            the parts one after another along the dimension of the samples     Shard
    alike           each of them                                                       Replicate
    additive(q)     the sum of (n_i / n)^q times each: q = 0 is a sum, q = 1 a mean    Additive
    proportional(p) part_i = (n_i / n)^p whole: a number of samples has p = 1          Proportional
    scaled(p)       rows, of which part_i has (n_i / n)^p times the whole's            ScaledRows
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

# Two replicas with two samples each.
OWN, REPLICAS = 2, 2
WHOLE = OWN * REPLICAS
ROW_EACH = even_cuts(WHOLE, REPLICAS)

# Numbers of samples at which a size must be proportional to them: small ones, and some beyond any bound in the code.
PROBES = (*range(1, 2 * WHOLE), 63, 1024, 65_537)


@dataclass(frozen=True)
class Additive:
    """The whole's value is the sum of the parts' values, each times its share of the samples to some power.

    Attributes:
        power: 0 for a sum, 1 for a mean over samples.
    """

    power: int


@dataclass(frozen=True)
class Proportional:
    """A part's value is the whole's times its share of the samples to some power, which is not 0."""

    power: int


@dataclass(frozen=True)
class ScaledRows:
    """A part's rows are the whole's times its share of the samples to some power, which is not 0."""

    rows: Shard
    power: int


State = Placement | Additive | Proportional | ScaledRows


def power_of_additive(state: State | None) -> int | None:
    """The power with which a value is additive; None where it is not known to be."""
    if isinstance(state, Additive):
        return state.power
    power = power_of_proportional(state)
    return None if power is None else 1 - power  # the shares of all parts make up 1


def power_of_proportional(state: State | None) -> int | None:
    """The power of the share that a part has of a value; 0 where all parts are alike; None where it is not known."""
    if isinstance(state, Proportional):
        return state.power
    return 0 if state == REPLICATE else None


def proportional(power: int) -> State:
    """A value of which a part has its share of the samples, to some power."""
    return Proportional(power) if power else REPLICATE


def power_of_size(node: fx.Node) -> int | None:
    """With which power of the number of samples a size grows; None where it is no power."""
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
    """A product (sign 1) or quotient (sign -1) of two numbers."""
    a, b = power_of_proportional(left), power_of_proportional(right)
    if a is not None and b is not None:
        return [proportional(a + sign * b)]
    if b is not None and isinstance(left, Additive):
        return [Additive(left.power - sign * b)]
    if a is not None and isinstance(right, Additive) and sign == 1:
        return [Additive(right.power - a)]
    return None


def sample_order_placement(val: Tensor) -> Placement | None:
    """How a tensor lies if it holds its samples in order, all with as many rows, or none of them; None: it cannot.

    Of a tensor whose rows a mask selected, the rows stand for the samples.
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
