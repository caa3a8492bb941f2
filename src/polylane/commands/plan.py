"""``polylane plan``: the fastest plan for a cluster, and why it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table as Grid
from rich.text import Text

from polylane.commands import inputs, planning
from polylane.commands.output import console, count, plural, print_json, write
from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.commands.requests import PlanRequest
    from polylane.cost.footprint import Footprint
    from polylane.cost.method import Method
    from polylane.cost.predict import Basis, Prediction
    from polylane.planner.estimate import Estimates
    from polylane.planner.search import Answer, Found, Wish
    from polylane.planner.setup import CapturedProblem

MOST = 1 << 14  # devices that are thought of where nothing fits


@planning.uncollected()
def run(request: PlanRequest) -> None:
    """Search, say what was found and why, and write the best plan where that is asked for.

    Raises:
        PolylaneError: what was given is wrong, or nothing fits: with the number of devices that would do.
    """
    from polylane.cluster.line import given
    from polylane.plan.plan import dump
    from polylane.planner import advice

    method, output = planning.method_of(request), request.output
    if output is not None:
        _see_that_a_plan_says(method)
    bound = None if request.memory is None else _bytes(request.memory)
    cluster = given(request.cluster)
    problem = planning.capture_for(planning.open_on_meta(inputs.open_recipe(request), request), cluster, request)
    found = search_for(problem, cluster, request.batch, method, workers=request.workers, memory=bound, top=request.top)
    answer = found.answer
    told = advice.advise(found.estimates, found.weigh, found.wish, answer, found.on)
    if output is not None:
        write(output, dump(answer.found[0].plan))
    words = advice.sentences(told, answer.found[0], lambda bytes_: count(bytes_, "B"))
    if request.json:
        print_json({"plans": [_row(each, cluster) for each in answer.found], "advice": asdict(told), "words": words})
        return
    _show(answer, cluster, words)
    if output is not None:
        console().print(f"The best plan is in {output}: polylane train {request.recipe} --plan {output}")


def _see_that_a_plan_says(method: Method) -> None:
    """A plan that is written is the one that was priced, or none is.

    Raises:
        PolylaneError: the prices would rest on what no plan says, for the runtime does not do it.
    """
    for option, value in (("recompute", method.recompute), ("dtype", method.dtype)):
        if value in ("selective", "full", "float16"):
            raise PolylaneError(
                f"--{option} {value} is priced, but the runtime does not do it, and no plan says it: leave out "
                f"--{option}, or -o"
            )


@dataclass(frozen=True)
class Searched:
    """A search on a cluster, and what it rested on.

    Attributes:
        basis: what predictions on the cluster rest on.
        estimates: seconds of stages, by which plans were compared.
        weigh: bytes of a worker, by which plans were excluded.
        wish: the numbers of workers, the memory and the methods that were allowed.
        answer: the plans that were found, at least one.
    """

    basis: Basis
    estimates: Estimates
    weigh: Footprint
    wish: Wish
    answer: Answer

    def on(self, other: Cluster) -> Basis:
        """The same on another cluster."""
        return replace(self.basis, cluster=other, stages=self.basis.stages.fresh())


def search_for(
    problem: CapturedProblem,
    cluster: Cluster,
    batch: int,
    method: Method,
    *,
    workers: int | None = None,
    memory: int | None = None,
    top: int = 5,
) -> Searched:
    """The fastest plans for a training on a cluster.

    Args:
        problem: what is to be trained, captured.
        cluster: the machines that it shall run on.
        batch: samples of a step, over all workers.
        method: how training is done.
        workers: how many devices to use at most; None: all.
        memory: bytes that a worker may use; None: all.
        top: how many plans are wanted.

    Raises:
        PolylaneError: more workers than devices, or nothing fits: with the number of devices that would do.
    """
    from polylane.planner import advice, setup
    from polylane.planner.estimate import Estimates
    from polylane.planner.search import Wish, search

    most = cluster.count if workers is None else workers
    if most > cluster.count:
        raise PolylaneError(f"--workers {most}: the cluster has {plural(cluster.count, 'device')}")
    limit = min(device.memory for device in cluster.devices(range(most)))
    limit = min(limit, memory or limit)
    wish = Wish(batch, worthwhile(most), _inner(cluster), (method,), float(limit), top=max(top, 1))
    basis = setup.basis(problem, cluster, method)
    estimates, weigh = Estimates(basis, batch), setup.footprint(problem, cluster)
    found = Searched(basis, estimates, weigh, wish, search(estimates, weigh, wish))
    if not found.answer.found:
        enough = partial(advice.enough, weigh, wish, estimates, found.on, MOST)
        raise PolylaneError(_nothing(found.answer, wish, enough))
    return replace(found, answer=_first_exactly(basis, batch, found.answer))


def _first_exactly(basis: Basis, batch: int, answer: Answer) -> Answer:
    """The answer with the memory of its first plan as ``simulate`` has it, of the samples in hand.

    That of the others is in proportion to a batch of the example's size, and so at most what they need: what does not
    grow with the samples is counted for each of them. A first plan that turns out not to fit is left out.
    """
    from polylane.cost.predict import predict

    for index, found in enumerate(answer.found):
        own = replace(basis, method=found.candidate.method)
        prediction = predict(own, found.partition, found.plan, batch)
        if max(stage.memory.total for stage in prediction.stages) <= found.candidate.limit:
            first = replace(found, prediction=prediction)
            return replace(answer, found=(first, *answer.found[index + 1 :]))
    return answer


def worthwhile(most: int) -> tuple[int, ...]:
    """Numbers of workers to look at: all, and fewer where these might be better: halves of it, down to one."""
    found = [most]
    while found[-1] > 1 and len(found) < 3:
        found.append(found[-1] // 2)
    return tuple(dict.fromkeys([*found, 1]))


def _inner(cluster: Cluster) -> int:
    """The most ranks that share an operator: those of a host."""
    return max(group.devices for group in cluster.hosts)


def _bytes(text: str) -> int:
    from polylane.cluster.units import figure

    found = figure(text)
    if found is None or not found[0] > 0 or found[1] not in ("size", None):
        raise PolylaneError(f'--memory takes a size, as in "30 GB", not {text!r}')
    return int(found[0])


def _nothing(answer: Answer, wish: Wish, would_do: Callable[[], int | None]) -> str:
    """That nothing fits, by how much, and how many devices would do."""
    workers = plural(max(wish.workers), "worker")
    if not answer.excluded:
        return f"no plan for {workers}: a batch of {plural(wish.batch, 'sample')} is too small"
    least = min(answer.excluded, key=lambda c: c.bytes)
    words = (
        f"nothing fits on {workers}: the leanest plan needs {count(least.bytes, 'B')} per worker, "
        f"{count(least.bytes - least.limit, 'B')} more than it may have"
    )
    found = would_do()
    return f"{words}; {found} such devices would do" if found else f"{words}; more devices do not help"


def _row(found: Found, cluster: Cluster) -> dict[str, Any]:
    prediction = found.prediction
    worst = max((stage.memory for stage in prediction.stages), key=lambda memory: memory.total)
    return {
        "plan": found.plan.spec,
        "workers": found.plan.workers,
        "step_seconds": prediction.seconds,
        "samples_per_second": prediction.samples_per_second,
        "memory": worst.total,
        "utilization": prediction.utilization,
        "exposed_communication": _share(prediction),
        "price": cluster.price * found.plan.workers / cluster.count * prediction.seconds / 3600,
        "estimate_seconds": found.candidate.seconds,
    }


def _share(prediction: Prediction) -> float:
    timeline = prediction.timeline
    return sum(timeline.exposed_communication()) / (timeline.ranks * timeline.makespan() or 1.0)


def _show(answer: Answer, cluster: Cluster, words: Sequence[str]) -> None:
    grid = Grid(box=box.SIMPLE, title=f"Of {answer.looked} plans, {len(answer.fitting)} fit; the fastest")
    grid.add_column("plan", overflow="fold", ratio=1)
    for name in ("workers", "step", "samples/s", "memory", "computing", "messages", "price"):
        grid.add_column(name, justify="right")
    for found in answer.found:
        row = _row(found, cluster)
        bound = "" if found is answer.found[0] else "≤ "
        grid.add_row(
            Text(row["plan"]),
            str(row["workers"]),
            planning.duration(row["step_seconds"]),
            f"{row['samples_per_second']:,.1f}",
            bound + count(row["memory"], "B"),
            f"{row['utilization']:.0%}",
            f"{row['exposed_communication']:.0%}",
            f"{row['price']:.2g}" if row["price"] else "",
        )
    console().print(grid)
    for line in words:
        console().print(line, markup=False)
