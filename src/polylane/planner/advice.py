"""Advice: in words, why a plan wins, what it is bound by, what would help, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polylane.cluster.cluster import Cluster, Links
from polylane.cluster.link import Link
from polylane.cost.footprint import Footprint
from polylane.cost.predict import Basis, Prediction
from polylane.planner.candidate import Candidate
from polylane.planner.estimate import Estimates
from polylane.planner.search import Answer, Found, Wish, search

ISSUING = "the host, which does not issue operators as fast as the device computes them"
# A change that makes a step less than this much faster is no help.
WORTH = 0.03


@dataclass(frozen=True)
class Part:
    """What a share of a step goes by with, on the worker that ends last."""

    name: str
    share: float


@dataclass(frozen=True)
class Help:
    """What a change would bring: ``faster`` is how many times as many samples a second."""

    change: str
    faster: float
    plan: str


@dataclass(frozen=True)
class Advice:
    """All that is to be said of an answer.

    Attributes:
        parts: of the best plan's step, the largest first.
        families: of every other way to split that fits, its best plan, and how many times as long a step takes.
        alone: how many times as long one device takes; None where the model does not fit on it.
        helps: what would help, the most first.
        excluded: plans that would be faster but do not fit, and the bytes that they lack.
    """

    parts: tuple[Part, ...]
    families: tuple[tuple[str, str, float], ...]
    alone: float | None
    helps: tuple[Help, ...]
    excluded: tuple[tuple[str, float, float], ...]


def advise(
    estimates: Estimates,
    footprint: Footprint,
    wish: Wish,
    answer: Answer,
    with_cluster: Callable[[Cluster], Basis],
) -> Advice:
    """What is to be said of an answer that found something.

    Args:
        estimates, footprint, wish: of the search.
        answer: what it found.
        with_cluster: the same job on another cluster.
    """
    best = answer.found[0]
    return Advice(
        parts(best.prediction),
        tuple(_families(answer, best)),
        _alone(answer, best),
        tuple(_helps(estimates, footprint, wish, best, with_cluster)),
        tuple(
            (described(c), c.seconds / best.candidate.seconds, c.bytes - c.limit)
            for c in answer.excluded
            if c.seconds < best.candidate.seconds * (1 - WORTH)
        ),
    )


def parts(prediction: Prediction) -> tuple[Part, ...]:
    """What a step goes by with: computing, collectives inside passes, the pipeline, gradients, the optimizer."""
    step, timeline = prediction.seconds, prediction.timeline
    if not step:
        return ()
    lane = max(range(timeline.ranks), key=lambda rank: timeline.busy()[rank])
    stage = prediction.plan.place(prediction.lanes[lane])[0]
    own, microbatches = prediction.stages[stage], prediction.plan.microbatches
    waits = microbatches * own.waits
    exposed = max(0.0, timeline.exposed_communication()[lane] - waits)
    issuing = microbatches * own.passes.stalled
    found = {
        "computing": timeline.busy()[lane] - own.update - issuing,
        ISSUING: issuing,
        "collectives of split operators": waits,
        "gradients and messages that nothing hides": exposed,
        "waiting for other stages": timeline.idle()[lane],
        "the optimizer": own.update,
    }
    return tuple(Part(n, s / step) for n, s in sorted(found.items(), key=lambda item: -item[1]) if s > 0.005 * step)


def family(candidate: Candidate) -> str:
    """What kind of plan it is: which axes it has."""
    if candidate.workers == 1:
        return "one device"
    if candidate.owners:
        return "branches"
    axes = [axis for axis in ("data", "sequence", "tensor") if max(getattr(m, axis) for m in candidate.meshes) > 1]
    if len(candidate.meshes) > 1:
        axes.append("pipeline")
    return " and ".join(axes) + (", unequal stages" if len(set(candidate.meshes)) > 1 else "")


def described(candidate: Candidate) -> str:
    """A candidate in one line."""
    if len(set(candidate.meshes)) > 1:
        line = f"[{' | '.join(map(str, candidate.meshes))}]"
    else:
        mesh = candidate.meshes[0]
        line = f"data={mesh.data},pipeline={len(candidate.meshes)}"
        line += "".join(f",{axis}={n}" for axis in ("sequence", "tensor") if (n := getattr(mesh, axis)) > 1)
    return f"{line},microbatches={candidate.microbatches}"


def _families(answer: Answer, best: Found) -> list[tuple[str, str, float]]:
    found: dict[str, Candidate] = {}
    for candidate in answer.fitting:
        found.setdefault(family(candidate), candidate)
    found.pop(family(best.candidate), None)
    found.pop("one device", None)
    order = sorted(found.items(), key=lambda item: item[1].seconds)
    return [(name, described(c), c.seconds / best.candidate.seconds) for name, c in order]


def _alone(answer: Answer, best: Found) -> float | None:
    single = [c.seconds for c in answer.fitting if c.workers == 1]
    return min(single) / best.candidate.seconds if single else None


def _helps(
    estimates: Estimates,
    footprint: Footprint,
    wish: Wish,
    best: Found,
    with_cluster: Callable[[Cluster], Basis],
) -> list[Help]:
    """Twice the bandwidth, twice the memory, twice the batch: each searched anew, without simulation."""
    cluster, found = estimates.basis.cluster, list[Help]()
    now = best.candidate.seconds / estimates.batch

    def tried(change: str, other: Estimates, wanted: Wish) -> None:
        answer = search(other, footprint, replace(wanted, top=1), finalists=0)
        if answer.fitting:
            first = answer.fitting[0]
            found.append(Help(change, now / (first.seconds / other.batch), described(first)))

    if cluster.count > 1:
        quicker = Estimates(with_cluster(linked(cluster, 2.0)), estimates.batch)
        tried("links twice as fast", quicker, wish)
    tried("twice the memory", estimates, replace(wish, limit=2 * wish.limit))
    twice = Estimates(estimates.basis, 2 * estimates.batch)
    tried("twice the batch", twice, replace(wish, batch=2 * wish.batch))
    return sorted((h for h in found if h.faster > 1 + WORTH), key=lambda h: -h.faster)


def linked(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links of so many times the bandwidth."""

    def better(link: Link | None) -> Link | None:
        if link is None:
            return None
        total = None if link.total is None else link.total * factor
        own = None if link.local is None else link.local * factor
        return link.model_copy(update={"bandwidth": link.bandwidth * factor, "total": total, "local": own})

    hosts = tuple(group.model_copy(update={"link": better(group.link)}) for group in cluster.hosts)
    links = cluster.links
    return Cluster(
        hosts, Links(hosts=better(links.hosts), racks=better(links.racks), sites=better(links.sites)), cluster.speeds
    )


def grown(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with so many times the hosts of each kind; a lone host's link then leads to others as well."""
    hosts = tuple(group.model_copy(update={"count": group.count * factor}) for group in cluster.hosts)
    between = cluster.links.hosts or cluster.hosts[0].link
    return Cluster(hosts, cluster.links.model_copy(update={"hosts": between}), cluster.speeds)


def enough(
    footprint: Footprint, wish: Wish, estimates: Estimates, with_cluster: Callable[[Cluster], Basis], most: int
) -> int | None:
    """How many such devices would have the memory, in steps of two; None where even ``most`` have not."""
    cluster, factor = estimates.basis.cluster, 2
    while cluster.count * factor <= most:
        workers = max(wish.workers) * factor
        more = Estimates(with_cluster(grown(cluster, factor)), estimates.batch)
        if search(more, footprint, replace(wish, workers=(workers,)), finalists=0).fitting:
            return workers
        factor *= 2
    return None


def _why_alone(advice: Advice) -> str:
    if advice.parts and advice.parts[0].name == ISSUING:
        return "the host has as many operators to issue however few samples are in hand, so a part takes as long"
    return "what they would send each other takes longer than it saves"


def sentences(advice: Advice, best: Found, show_bytes: Callable[[float], str]) -> Sequence[str]:
    """An advice in words."""
    lines = []
    if advice.parts:
        first, *rest = advice.parts
        also = ", ".join(f"{part.name} {part.share:.0%}" for part in rest)
        lines.append(f"Bound by {first.name}, {first.share:.0%} of a step{f'; then {also}' if also else ''}.")
    for name, line, times in advice.families[:4]:
        lines.append(f"Best with {name} instead: {line}, {times:.2f} times as long.")
    if best.candidate.workers == 1:
        lines.append(f"One device is better than several: {_why_alone(advice)}.")
    elif advice.alone is not None:
        lines.append(f"One device alone would take {advice.alone:.2f} times as long.")
    else:
        lines.append("One device alone does not have the memory.")
    for help_ in advice.helps:
        lines.append(f"With {help_.change}: {help_.faster:.2f} times as fast, as {help_.plan}.")
    if not advice.helps:
        lines.append("Neither faster links, nor more memory, nor a bigger batch would make it more than 3% faster.")
    for line, times, lack in advice.excluded[:3]:
        lines.append(f"{line} would take {times:.2f} of the time, but needs {show_bytes(lack)} more memory per worker.")
    return lines
