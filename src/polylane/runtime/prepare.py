"""From what the user hands over to a graph, a plan and its cuts: all that happens before any worker computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from polylane.errors import PolylaneError
from polylane.graph.batch import cloned, few, flatten, sample_count, sampled_leaves
from polylane.graph.export import Loss, python_kept
from polylane.graph.fewest import Fewest
from polylane.graph.graph import Graph
from polylane.graph.orders import Order, Seen, orders_of, why_unknown
from polylane.graph.partition import Partition, aligned, balanced
from polylane.plan import fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec, parse
from polylane.planner.layouts import SHARED_BY, Layouts, choose_layouts, layouts_like, shared
from polylane.profiling.time_operators import measure
from polylane.runtime.microbatches import asked_for, fewest_for, seen_to_split, with_enough
from polylane.runtime.optimizer_probe import Untried, whole_parameters
from polylane.runtime.own_python import keeps_state, refuse_effects, refuse_repeated
from polylane.runtime.sync.fitting import check_sync
from polylane.samples.counts import capture_with_counts
from polylane.samples.derivation import known_orders
from polylane.samples.division import samples_meet

Parameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Objective:
    """One loss and the optimizer that minimizes it; most trainings have one, a GAN has two."""

    name: str
    loss: Loss
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None


@dataclass(frozen=True)
class Prepared:
    """A model ready to be trained by a plan.

    Attributes:
        model: the user's, unchanged.
        objectives: by name, the first one is what the plan was made for.
        partitions: of every objective's graph, by name.
        plan: how it is split.
        in_float64: whether casts to lower types inside keep float64 (for proofs).
        evaluations: of the graphs in evaluation mode, as far as they were asked for; others are captured when needed.
        layouts: how the operators of every stage are split, for every objective's graph; empty where none is.
        init: fills a module's own tensors, for a model on the meta device.
        whole: parameters that every rank holds whole for their optimizer's sake, and why.
        seen: how the parts of a batch make up every value, for the graphs of which that was looked at.
    """

    model: nn.Module
    objectives: dict[str, Objective]
    partitions: dict[str, Partition]
    plan: Plan
    in_float64: bool = False
    evaluations: dict[str, Partition] = field(default_factory=dict)
    layouts: dict[str, Layouts] = field(default_factory=dict)
    init: Callable[[nn.Module], None] | None = None
    whole: Mapping[str, str] = field(default_factory=dict)
    seen: list[tuple[Partition, Seen]] = field(default_factory=list, repr=False, compare=False)
    _others: dict[int, tuple[Partition, Layouts]] = field(default_factory=dict, repr=False, compare=False)

    def axes(self, stage: int) -> tuple[str, ...]:
        """The axes along which a stage's operators are split; "data" among them where the samples of a batch meet."""
        return next((layouts.axes(stage) for layouts in self.layouts.values()), ())

    def layouts_of(self, partition: Partition) -> Layouts:
        """How the operators of one of the model's graphs are split; its parameters lie as the main graph's do."""
        if not self.layouts:
            return Layouts((None,) * self.plan.pipeline)
        for name, own in self.partitions.items():
            if own is partition:
                return self.layouts[name]
        if id(partition) not in self._others:
            main = next(iter(self.layouts.values()))
            self._others[id(partition)] = partition, layouts_like(main, partition, self.plan)
        return self._others[id(partition)][1]

    def orders_of(self, partition: Partition) -> Mapping[str, Order]:
        """How the parts of a batch are brought together in the values of one of the model's graphs that cross.

        Where all stages have as many replicas that is no question: whatever a value is, each replica's part of it stays
        with that replica, and is taken for its rows.

        Raises:
            PolylaneError: a value crosses between stages with different numbers of replicas, and cannot be divided
            anew.
        """
        replicas = [degrees.data for degrees in self.plan.meshes]
        if not self.plan.redivides:
            return {crossing.value: Order.ROWS for crossing in partition.crossings}
        seen = next((seen for other, seen in self.seen if other is partition), Seen())
        orders = orders_of(partition.graph, seen)
        for crossing in partition.crossings:
            counts = {replicas[stage] for stage in (crossing.producer, *crossing.consumers)}
            if orders[crossing.value] is Order.OTHER and len(counts) > 1:
                told = _cannot_cross(partition, seen, crossing.value, sorted(counts))
                raise PolylaneError(f"{self.plan.title}: {told}")
        return orders

    def look_at(self, partition: Partition) -> None:
        """Derive how the parts of a batch make up the values of one more of the model's graphs, where that matters."""
        if self.plan.redivides:
            self.seen.append((partition, known_orders(partition.graph, self.plan.per_sample)))

    @cached_property
    def fewest(self) -> Fewest:
        """How few samples a microbatch may have in training."""
        return fewest_for(self.plan, [partition.graph for partition in self.partitions.values()])

    @property
    def main(self) -> Partition:
        """The partition that the plan was made for."""
        return next(iter(self.partitions.values()))


def named_parameters(model: nn.Module, losses: Collection[Any]) -> Parameters:
    """All parameters by the model's own names, each once; a loss module's own under "loss."."""
    named = list(model.named_parameters())
    for loss in losses:
        if isinstance(loss, nn.Module):
            named += [(f"loss.{name}", parameter) for name, parameter in loss.named_parameters()]
    return named


def optimized(parameters: Parameters, factory: OptimizerFactory) -> set[str]:
    """Names of the parameters that an optimizer factory takes out of those it is given, without the frozen ones.

    Raises:
        PolylaneError: the factory fails, or takes a parameter that is not the model's; or nothing is there to train.
    """
    names = {id(parameter): name for name, parameter in parameters}
    try:
        optimizer = factory(list(parameters))
    except Exception as error:
        refuse_untrainable(parameters)  # torch's optimizers fail of an empty list
        raise PolylaneError(f"optimizer(parameters) fails: {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PolylaneError(
            f"optimizer(parameters) must return a torch.optim.Optimizer, not a {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PolylaneError(
            "torch.optim.LBFGS evaluates the loss several times a step, which no plan can do: take another optimizer"
        )
    taken = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in taken):
        raise PolylaneError("optimizer(parameters) must optimize the parameters it is given, not copies of them")
    refuse_untrainable(parameters)
    found = {names[id(parameter)] for parameter in taken if parameter.requires_grad}
    if not found:
        raise PolylaneError("the optimizer takes no parameter that requires a gradient, so that it would train nothing")
    return found


def refuse_untrainable(parameters: Parameters) -> None:
    """See that there is something to train.

    Raises:
        PolylaneError: no parameter requires a gradient, or none has any elements.
    """
    if not parameters:
        raise PolylaneError("the model has no parameters, so that there is nothing to train: see what model() returns")
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise PolylaneError(
            "no parameter of the model requires a gradient, so that there is nothing to train: unfreeze some"
        )
    if not any(parameter.requires_grad and parameter.numel() for _, parameter in parameters):
        raise PolylaneError(
            "no parameter of the model that requires a gradient has any elements, so that there is nothing to train: "
            "give it a width"
        )


def objectives_of(
    loss: Loss | Mapping[str, Loss],
    optimizer: OptimizerFactory | Mapping[str, OptimizerFactory],
    scheduler: SchedulerFactory | Mapping[str, SchedulerFactory] | None,
) -> dict[str, Objective]:
    """One objective, or one for each name of a mapping.

    Raises:
        PolylaneError: the mappings do not have the same names.
    """
    if not isinstance(loss, Mapping):
        if isinstance(optimizer, Mapping) or isinstance(scheduler, Mapping):
            raise PolylaneError(
                "one loss takes one optimizer and one scheduler: give a mapping of losses, or no mapping at all"
            )
        return {"loss": Objective("loss", loss, optimizer, scheduler)}
    if not isinstance(optimizer, Mapping) or set(loss) != set(optimizer):
        raise PolylaneError(f"losses named {sorted(loss)} take a mapping of optimizers with the same names")
    shared = [
        name for name, each in loss.items() if isinstance(each, nn.Module) and next(each.parameters(), None) is not None
    ]
    if len(shared) > 1:
        raise PolylaneError(f"losses {', '.join(sorted(shared))} both have parameters: move them into the model")
    schedulers = scheduler if isinstance(scheduler, Mapping) else dict.fromkeys(loss, scheduler)
    return {name: Objective(name, loss[name], optimizer[name], schedulers.get(name)) for name in loss}


def prepare(
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: str | Spec | Plan,
    *,
    batch_size: int | None = None,
    fewer: bool = False,
    in_float64: bool = False,
    evaluation: bool = False,
    init: Callable[[nn.Module], None] | None = None,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None = None,
) -> Prepared:
    """Capture every objective, choose the cuts, and refuse what would not be exact.

    Args:
        model: as the user built it.
        objectives: what is minimized.
        example: a batch.
        plan: one line, a read plan file, or a Spec.
        batch_size: of the training, if it is another than the example's.
        fewer: the microbatches may be fewer than the plan says, if the model needs more samples in each.
        in_float64: for proofs; ``model`` and ``example`` are float64 already.
        evaluation: capture the evaluation mode here too, once for all workers that are forked from this process.
        init: fills the tensors that a module itself owns, for a model on the meta device.
        seconds: time of every node of a graph; default: measured here, node by node.

    Raises:
        PolylaneError: a plan for another model, too many stages, too few samples for the model in a microbatch, or
        samples that cannot be split exactly.
    """
    with python_kept(model, *(objective.loss for objective in objectives.values())):
        return _prepare(model, objectives, example, plan, batch_size, fewer, in_float64, evaluation, init, seconds)


def _prepare(
    model: nn.Module,
    objectives: dict[str, Objective],
    example: Any,
    plan: str | Spec | Plan,
    batch_size: int | None,
    fewer: bool,
    in_float64: bool,
    evaluation: bool,
    init: Callable[[nn.Module], None] | None,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None,
) -> Prepared:
    leaves, rebuild = flatten(example)
    total = batch_size or sample_count(leaves)
    spec = parse(plan) if isinstance(plan, str) else plan
    microbatches = asked_for(spec, total)
    # What a worker will have in hand: the sizes that count for time and memory.
    hand = max(2, -(-total // (microbatches * spec.data)))
    part = few(leaves, min(hand, sample_count(leaves)))
    parameters = named_parameters(model, [o.loss for o in objectives.values()])
    graphs = {n: _graph_of(model, o, parameters, rebuild(cloned(part)), in_float64) for n, o in objectives.items()}
    fewer = fewer or spec.microbatches is None
    if spec.microbatches is None and keeps_state(graphs.values()):
        microbatches = 1
    microbatches = with_enough(microbatches, total, fewest_for(spec, graphs.values()), fewer)
    for graph in graphs.values():
        refuse_repeated(graph, spec, microbatches)
    partitions, seen, meets = _partitions(
        model, objectives, graphs, spec, leaves, part, microbatches, seconds, in_float64=in_float64
    )
    chosen = _plan_of(next(iter(partitions.values())), spec, microbatches)
    evaluations = {
        name: recaptured(model, objectives[name], partition, rebuild(cloned(part)), False, in_float64)
        for name, partition in (partitions.items() if evaluation else ())
    }
    for partition in partitions.values():
        refuse_effects(partition, chosen)
    check_sync(chosen, partitions, meets)
    layouts, whole = dict[str, Layouts](), dict[str, str]()
    if chosen.axes or meets:
        whole = _kept_whole(parameters, objectives, chosen)
        sampled = sampled_leaves(leaves) if meets else ()
        layouts = _layouts(partitions, chosen, -(-total // microbatches), whole, sampled)
    prepared = Prepared(model, objectives, partitions, chosen, in_float64, evaluations, layouts, init, whole, seen)
    for partition in evaluations.values():
        prepared.look_at(partition)
    _see_through(prepared)
    return prepared


def _partitions(
    model: nn.Module,
    objectives: Mapping[str, Objective],
    graphs: Mapping[str, Graph],
    spec: Spec | Plan,
    leaves: list[Any],
    part: list[Any],
    microbatches: int,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None,
    *,
    in_float64: bool,
) -> tuple[dict[str, Partition], list[tuple[Partition, Seen]], bool]:
    """Every objective's cuts, what is known of how samples lie in their values, and whether samples meet in a loss."""
    partitions, seen, meets = dict[str, Partition](), list[tuple[Partition, Seen]](), False
    for objective in objectives.values():
        graph = graphs[objective.name]
        if spec.data > 1 or microbatches > 1:
            seen_to = seen_to_split(graph, model, objective.loss, leaves, in_float64)
            sync = "" if spec.sync.plain else ",".join(spec.sync.words())
            meets = samples_meet(graph, microbatches, spec.data, spec.per_sample, seen_to, sync) or meets
        known = Seen()
        if spec.redivides:
            known = known_orders(graph, spec.per_sample)
        main = next(iter(partitions.values()), None)
        partitions[objective.name] = _cut(graph, model, objective.loss, part, spec, main, seconds, known)
        seen.append((partitions[objective.name], known))
    return partitions, seen, meets


def _graph_of(model: nn.Module, objective: Objective, parameters: Parameters, batch: Any, in_float64: bool) -> Graph:
    trainable = optimized(parameters, objective.optimizer)
    return capture_with_counts(model, objective.loss, batch, trainable=trainable, in_float64=in_float64)


def _see_through(prepared: Prepared) -> None:
    """Ask for what workers will: what cannot be is refused here, and what is forked from here has the answers."""
    for partition in (*prepared.partitions.values(), *prepared.evaluations.values()):
        prepared.orders_of(partition)
    for partition in prepared.evaluations.values():
        prepared.layouts_of(partition)


def recaptured(
    model: nn.Module,
    objective: Objective,
    main: Partition,
    batch: Any,
    training: bool,
    in_float64: bool,
    which: str = "the example batch",
) -> Partition:
    """Capture an objective in another mode, for batches of another form, or anew, and cut it where ``main`` is cut.

    Parameters that were frozen meanwhile get no gradient.
    """
    known = dict(named_parameters(model, [objective.loss]))
    trainable = [n for n, info in main.graph.parameters.items() if info.trainable and known[n].requires_grad]
    effects = main.graph.code.effects
    more: dict[str, Any] = {"trainable": trainable, "training": training, "in_float64": in_float64}
    graph = capture_with_counts(model, objective.loss, batch, **more, which=which, effects=effects)
    return aligned(main, graph)


def _cut(
    graph: Graph,
    model: nn.Module,
    loss: Loss,
    leaves: list[Any],
    plan: Spec | Plan,
    main: Partition | None,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None,
    seen: Seen,
) -> Partition:
    if main is not None:
        return aligned(main, graph)
    if isinstance(plan, Plan):
        return fit.partition_for(plan, graph)
    if plan.pipeline == 1:
        return Partition(graph, ())
    times = seconds(graph, loss, leaves) if seconds is not None else measure(graph, model, loss, cloned(leaves))
    staying: list[str] = []
    if plan.redivides:
        staying = [name for name, order in orders_of(graph, seen).items() if order is Order.OTHER]
    return balanced(graph, plan.pipeline, times, [degrees.workers for degrees in plan.meshes], staying)


def _cannot_cross(partition: Partition, seen: Seen, name: str, replicas: Sequence[int]) -> str:
    node = partition.graph.nodes[partition.graph.positions[name]]
    line = f" ({node.source})" if node.source else ""
    return (
        f"stages: {name}{line} crosses between stages with {' and '.join(f'data={n}' for n in replicas)}, but how the "
        "samples of a batch make it up is not known, so that it cannot be divided anew: give them the same data, or "
        f"cut elsewhere{why_unknown(partition.graph, seen, name)}"
    )


def _plan_of(main: Partition, spec: Spec | Plan, microbatches: int) -> Plan:
    """The plan, with all that it says of its graph.

    Raises:
        PolylaneError: of some axis' ranks there are so many that some would have no part of anything.
    """
    graph = main.graph
    plan = fit.completed(spec, graph) if isinstance(spec, Plan) else fit.from_partition(main, spec, microbatches)
    shapes = [*(node.shape for node in graph.nodes), *(info.shape for info in graph.parameters.values())]
    longest = max((size for shape in shapes for size in shape), default=1)
    for axis in plan.axes:
        if plan.degree(axis) > longest:
            raise PolylaneError(
                f"{axis}={plan.degree(axis)}: nothing in the model can be cut into so many parts, its longest "
                f"dimension is {longest}: lower {axis}"
            )
    return plan


def _kept_whole(parameters: Parameters, objectives: Mapping[str, Objective], plan: Plan) -> dict[str, str]:
    """What optimizers must see whole, and why; with a warning where that is not known."""
    whole = whole_parameters(parameters, [o.optimizer for o in objectives.values()])
    untried = [why for why in whole.values() if isinstance(why, Untried)]
    if untried and plan.tensor > 1:
        warnings.warn(
            f"{len(untried)} parameters stay whole on every rank of tensor={plan.tensor}, for it is not known whether "
            f"parts of them can be updated apart: {untried[0]}",
            stacklevel=3,
        )
    return whole


def _layouts(
    partitions: Mapping[str, Partition], plan: Plan, samples: int, whole: Mapping[str, str], sampled: Sequence[bool]
) -> dict[str, Layouts]:
    layouts: dict[str, Layouts] = {}
    whole = {**dict.fromkeys(shared(partitions.values(), plan), SHARED_BY), **whole}
    for name, partition in partitions.items():
        first = next(iter(layouts.values()), None)
        if first is None:
            layouts[name] = _first_layouts(partition, plan, samples, whole, sampled)
        else:
            layouts[name] = layouts_like(first, partition, plan)
        if cut := layouts[name].cuts(shared(partitions.values(), plan)):
            raise PolylaneError(
                f"{plan.title}: {cut[0]} is on stages with different meshes, but cannot be whole on all of them: give "
                "these stages the same mesh"
            )
    return layouts


def _first_layouts(
    partition: Partition, plan: Plan, samples: int, whole: Mapping[str, str], sampled: Sequence[bool]
) -> Layouts:
    try:
        return choose_layouts(partition, plan, samples, whole, sampled)
    except PolylaneError as error:
        about, colon, rest = str(error).removeprefix("plan: ").partition(":")
        if not about.startswith("placements"):
            raise
        raise PolylaneError(f"{plan.title}: {about}{colon}{rest}") from error
