"""Max-min fairness: shares of the cores of a host, or of the bandwidth of links, that several use at the same time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

# Shares that add up to 1 may exceed it by rounding, which must not count as contention.
_ENOUGH = 1 + 1e-12


def water_fill_level(capacity: float, demands: Sequence[tuple[float, int]]) -> float:
    """Return the water level of a capacity that users share equally, none taking more than its demand.

    Args:
        capacity: total that is shared, in the unit of the demands.
        demands: (demand of a user, number of such users) pairs.

    Returns:
        The level: every user gets the smaller of it and its demand; infinity where all demands are met.
    """
    if sum(demand * count for demand, count in demands) <= capacity * _ENOUGH:
        return float("inf")
    # In ascending order: a demand below the current equal share is met in full, which raises the share of the
    # others.
    left, users = capacity, sum(count for _, count in demands)
    for demand, count in sorted(demands):
        if demand * users > left:
            break
        left -= demand * count
        users -= count
    return left / users


def max_min_speeds(
    caps: Sequence[float], takes: Sequence[Mapping[Hashable, float]], capacity: Mapping[Hashable, float]
) -> list[float]:
    """Return max-min fair speeds of transfers over shared links.

    Progressive filling: the speeds of all transfers grow together, each weighted by its largest demand on a link, until
    a link is full or a transfer reaches its cap; the transfers concerned are then fixed and the others grow on.

    Source: Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2.

    Args:
        caps: upper limit of each transfer, as a fraction of its undisturbed speed.
        takes: for each transfer, link -> amount that it takes at its undisturbed speed.
        capacity: link -> capacity, in the unit of the amounts.

    Returns:
        Speeds as fractions of the undisturbed ones.
    """
    # Common case: all transfers at their caps fit.
    left = dict(capacity)
    found = list(caps)
    for i, links in enumerate(takes):
        for link, amount in links.items():
            left[link] -= amount * caps[i]
    if all(rest >= -(_ENOUGH - 1) * capacity[link] for link, rest in left.items()):
        return found
    growing = dict.fromkeys(range(len(caps)))
    weights = [max(links.values(), default=1.0) for links in takes]
    fixed: dict[Hashable, float] = dict.fromkeys(capacity, 0.0)
    # Each round finds the level at which the next link is full, ends the transfers that reach their cap before
    # it, or else those on the full link.
    while growing:
        slopes: dict[Hashable, float] = {}
        for i in growing:
            for link, amount in takes[i].items():
                slopes[link] = slopes.get(link, 0.0) + amount / weights[i]
        full = min(((capacity[link] - fixed[link]) / slope for link, slope in slopes.items()), default=float("inf"))
        ended = [i for i in growing if caps[i] * weights[i] <= full]
        if not ended:
            tight = {link for link, slope in slopes.items() if (capacity[link] - fixed[link]) / slope <= full}
            ended = [i for i in growing if not tight.isdisjoint(takes[i])]
        for i in ended:
            found[i] = min(caps[i], full / weights[i])
            del growing[i]
            for link, amount in takes[i].items():
                fixed[link] += amount * found[i]
    return found
