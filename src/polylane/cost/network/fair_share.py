"""Fair shares of what several use at the same time: the cores of a host, the bandwidth of links."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

# Sums of shares that should be 1 may miss it by rounding: that is no lack of anything.
_ENOUGH = 1 + 1e-12


def water_fill_level(capacity: float, demands: Sequence[tuple[float, int]]) -> float:
    """The most that one user of a capacity gets where all have equal rights, and nobody takes more than they ask for.

    Args:
        capacity: what there is.
        demands: what each user asks for, and how many such users there are.

    Returns:
        Every user gets the smaller of this and what it asks for; infinity where all get all they ask for.
    """
    if sum(demand * count for demand, count in demands) <= capacity * _ENOUGH:
        return float("inf")
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
    """How fast each of several transfers moves over links that they share, max-min fair.

    The links are filled: all transfers grow alike, measured in what each takes of the link of which it takes most,
    until a link is full or a transfer at its cap; those stay as they are, and the others grow on.

    Source: Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2.

    Args:
        caps: the most that each one may have, in parts of its undisturbed speed.
        takes: what each one takes of each of its links at its undisturbed speed.
        capacity: of every link.

    Returns:
        In parts of the undisturbed speed.
    """
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
