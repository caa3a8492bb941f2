"""Compiled training: model, losses and example batch -> captured graphs, plan and cuts, before any worker computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from polylane.compile.compiled_graph import CompiledGraph, compile_graph, cut_graph, split_operators, warn_of_untried
from polylane.compile.objectives import Objective, Parameters, named_parameters, optimized_names
from polylane.compile.optimizer_probe import find_whole_parameters
from polylane.compile.python_effects import keeps_python_state, refuse_effects, refuse_repeated_effects
from polylane.compile.sample_shares import compute_shares
from polylane.compile.sync_check import check_sync
from polylane.errors import PolylaneError
from polylane.graph.batch import clone_leaves, count_parts, flatten, sample_count, sampled_leaves, take_first_samples
from polylane.graph.capture.export import Loss, python_kept
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, align_partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec, parse
from polylane.samples.batch_division import loss_couples_samples
from polylane.samples.batch_layout import BatchLayout
from polylane.samples.counts import capture_with_counts
from polylane.samples.derivation import derive_composition
from polylane.samples.microbatch_limit import (
    MinSamples,
    limit_microbatches,
    make_split_check,
    min_samples_for,
    requested_microbatches,
)
from polylane.sharding.stage_layouts import StageLayouts, layouts_like


@dataclass(frozen=True)
class CompiledTraining:
    """A model compiled for a plan; immutable. Further forms of batches are compiled into a worker's own CompileCache.

    Attributes:
        model: the user's module, not modified here.
        objectives: losses with their optimizers by name; the plan was made for the first one.
        graphs: every objective's graph in training mode, by name.
        evaluations: the graphs in evaluation mode, by name; empty unless they were asked for ahead of the workers.
        plan: stages, meshes, schedule and sync that it is compiled for.
        in_float64: whether casts to lower types inside keep float64 (for proofs).
        init: fills a module's own tensors, for a model on the meta device.
        min_samples: fewest samples that a microbatch may have in training.
    """

    model: nn.Module
    objectives: Mapping[str, Objective]
    graphs: Mapping[str, CompiledGraph]
    evaluations: Mapping[str, CompiledGraph]
    plan: Plan
    in_float64: bool
    init: Callable[[nn.Module], None] | None
    min_samples: MinSamples

    @property
    def partitions(self) -> dict[str, Partition]:
        """The partitions of every objective's graph, by name."""
        return {name: graph.partition for name, graph in self.graphs.items()}

    @property
    def main_partition(self) -> Partition:
        """The partition of the first objective's graph, which the plan was made for."""
        return next(iter(self.graphs.values())).partition

    @property
    def layouts(self) -> dict[str, StageLayouts]:
        """How the operators of every objective's graph are sharded, by name; empty where none is."""
        return {name: graph.layouts for name, graph in self.graphs.items() if graph.layouts.distinct}

    @property
    def batch_is_sharded(self) -> bool:
        """Whether replicas shard operators along the batch dimension, because the loss couples samples."""
        return any(graph.layouts.batch_is_sharded for graph in self.graphs.values())

    def axes(self, stage: int) -> tuple[str, ...]:
        """Return the axes along which a stage's operators are sharded; "data" too where the loss couples samples."""
        return next(iter(self.graphs.values())).layouts.axes(stage)

    def microbatches_of(self, samples: int) -> int:
        """Return the number of microbatches of a batch in training: fewer for a short one, if the model needs it."""
        return count_parts(samples, self.plan.microbatches, self.min_samples.samples)

    def graph_of(self, partition: Partition) -> CompiledGraph:
        """Return one of the graphs that were compiled ahead, by its partition.

        Raises:
            KeyError: there is none with this partition.
        """
        for graph in (*self.graphs.values(), *self.evaluations.values()):
            if graph.partition is partition:
                return graph
        raise KeyError("no graph of this training has this partition")

    def layouts_of(self, partition: Partition) -> StageLayouts:
        """Return the sharding of one of these graphs; its parameters are placed as in the main graph."""
        return self.graph_of(partition).layouts

    def batch_layouts_of(self, partition: Partition) -> Mapping[str, BatchLayout]:
        """Return the batch layouts of the values of one of these graphs that cross between stages."""
        return self.graph_of(partition).orders

    def carry_over_layouts(self, sizes: Iterable[int]) -> None:
        """Carry the sharding of the training graphs over to batches of other sizes, before workers are forked.

        Each worker would do it for itself otherwise, the same for all of them.

        Args:
            sizes: numbers of samples of whole batches, over all replicas.

        Raises:
            PolylaneError: the model does not compute with the number of samples that a worker gets.
        """
        for graph in self.graphs.values():
            for stage, layout in enumerate(graph.layouts.stages):
                if layout is None:
                    continue
                replicas = 1 if graph.layouts.batch_is_sharded else self.plan.degree("data", stage)
                for samples in set(sizes):
                    parts = self.microbatches_of(samples)
                    shares = (compute_shares(samples, parts, replicas, replica) for replica in range(replicas))
                    for count in {share.samples for own in shares for share in own}:
                        layout.at(count)

    def compile_further(self, partition: Partition) -> CompiledGraph:
        """Compile one more graph of the model (evaluation, batches of another form), with the main graph's placements.

        Raises:
            PolylaneError: a value crosses between stages with different numbers of replicas, and cannot be resharded.
        """
        main = next(iter(self.graphs.values())).layouts
        layouts = layouts_like(main, partition, self.plan) if main.distinct else main
        return compile_graph(partition, self.plan, layouts, _known_batch_layouts(partition.graph, self.plan))


def compile_training(
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
) -> CompiledTraining:
    """Capture every objective, choose the cuts, and refuse what would not be exact.

    Args:
        model: the module as the user built it, in training mode.
        objectives: losses to minimize with their optimizers, by name.
        example: a batch of the user's data, for its form and its size.
        plan: a plan in one line, a plan read from a file, or a Spec.
        batch_size: samples of a batch in the training, if not as many as the example has.
        fewer: whether there may be fewer microbatches than the plan says, if the model needs more samples in each.
        in_float64: whether this is for proofs; ``model`` and ``example`` are float64 already.
        evaluation: capture the evaluation mode here too, once for all workers that are forked from this process.
        init: fills the tensors that a module itself owns, for a model on the meta device.
        seconds: returns the time of every node of a graph; default: measured here, node by node.

    Raises:
        PolylaneError: a plan for another model, too many stages, too few samples for the model in a microbatch, or
            samples that cannot be split exactly.
    """
    with python_kept(model, *(objective.loss for objective in objectives.values())):
        return _compile_training(
            model, objectives, example, plan, batch_size, fewer, in_float64, evaluation, init, seconds
        )


def _compile_training(
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
) -> CompiledTraining:
    leaves, rebuild = flatten(example)
    total = batch_size or sample_count(leaves)
    spec = parse(plan) if isinstance(plan, str) else plan
    microbatches = requested_microbatches(spec, total)
    # The samples of one rank in one microbatch: the sizes that determine time and memory.
    hand = max(2, -(-total // (microbatches * spec.data)))
    part = take_first_samples(leaves, min(hand, sample_count(leaves)))
    parameters = named_parameters(model, [o.loss for o in objectives.values()])
    graphs = {
        n: _capture_objective(model, o, parameters, rebuild(clone_leaves(part)), in_float64)
        for n, o in objectives.items()
    }
    fewer = fewer or spec.microbatches is None
    fewest = min_samples_for(spec, graphs.values())
    microbatches = _choose_microbatches(spec, graphs.values(), microbatches, total, fewest, fewer)
    partitions, seen, meets = _partition_objectives(
        model, objectives, graphs, spec, leaves, part, microbatches, seconds, in_float64=in_float64
    )
    chosen = _complete_plan(next(iter(partitions.values())), spec, microbatches)
    captured = {
        name: recapture_objective(model, objectives[name], partition, rebuild(clone_leaves(part)), False, in_float64)
        for name, partition in (partitions.items() if evaluation else ())
    }
    for partition in partitions.values():
        refuse_effects(partition, chosen)
    check_sync(chosen, partitions, meets)
    layouts = dict.fromkeys(partitions, StageLayouts((None,) * chosen.pipeline))
    if chosen.axes or meets:
        whole = find_whole_parameters(parameters, [o.optimizer for o in objectives.values()])
        warn_of_untried(whole, chosen)
        sampled = sampled_leaves(leaves) if meets else ()
        layouts = split_operators(partitions, chosen, -(-total // microbatches), whole, sampled)
    compiled = {name: compile_graph(each, chosen, layouts[name], seen[name]) for name, each in partitions.items()}
    training = CompiledTraining(
        model=model,
        objectives=MappingProxyType(objectives),
        graphs=MappingProxyType(compiled),
        evaluations=MappingProxyType({}),
        plan=chosen,
        in_float64=in_float64,
        init=init,
        min_samples=fewest,
    )
    evaluations = {name: training.compile_further(each) for name, each in captured.items()}
    return replace(training, evaluations=MappingProxyType(evaluations))


def _choose_microbatches(
    spec: Spec | Plan, graphs: Collection[Graph], requested: int, total: int, fewest: MinSamples, fewer: bool
) -> int:
    """Choose the number of microbatches, which every graph can be run in.

    Args:
        spec: the plan; its number of microbatches is None where it leaves the choice open.
        graphs: captured graphs of all objectives.
        requested: number of microbatches that the plan, or its default, asks for.
        total: samples of a step, over all workers.
        fewest: fewest samples that a microbatch of the model needs.
        fewer: whether the number may be lowered to give a microbatch enough samples.

    Raises:
        PolylaneError: too few samples in a microbatch, or a model with side effects in each of several passes.
    """
    # Python state allows one call a step: a number of microbatches that the user did not ask for is lowered to 1.
    if spec.microbatches is None and keeps_python_state(graphs):
        requested = 1
    microbatches = limit_microbatches(requested, total, fewest, fewer)
    for graph in graphs:
        refuse_repeated_effects(graph, spec, microbatches)
    return microbatches


def _partition_objectives(
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
) -> tuple[dict[str, Partition], dict[str, Mapping[str, BatchLayout]], bool]:
    """Return every objective's partition, the known batch layouts of its values, and whether a loss couples samples."""
    partitions, seen, meets = dict[str, Partition](), dict[str, Mapping[str, BatchLayout]](), False
    for objective in objectives.values():
        graph = graphs[objective.name]
        if spec.data > 1 or microbatches > 1:
            seen_to = make_split_check(graph, model, objective.loss, leaves, in_float64)
            sync = "" if spec.sync.is_plain_sum else ",".join(spec.sync.to_words())
            meets = loss_couples_samples(graph, microbatches, spec.data, spec.per_sample, seen_to, sync) or meets
        known = seen[objective.name] = _known_batch_layouts(graph, spec)
        main = next(iter(partitions.values()), None)
        partitions[objective.name] = cut_graph(graph, model, objective.loss, part, spec, main, seconds, known)
    return partitions, seen, meets


def _known_batch_layouts(graph: Graph, plan: Spec | Plan) -> Mapping[str, BatchLayout]:
    """Return the batch layouts of a graph's values as far as they are known; none where a plan does not need them."""
    return derive_composition(graph, plan.per_sample).batch_layouts if plan.resplits_batch else {}


def _capture_objective(
    model: nn.Module, objective: Objective, parameters: Parameters, batch: Any, in_float64: bool
) -> Graph:
    trainable = optimized_names(parameters, objective.optimizer)
    return capture_with_counts(model, objective.loss, batch, trainable=trainable, in_float64=in_float64)


def recapture_objective(
    model: nn.Module,
    objective: Objective,
    main: Partition,
    batch: Any,
    training: bool,
    in_float64: bool,
    which: str = "the example batch",
) -> Partition:
    """Capture an objective in another mode or for another form of batch, and cut the graph where ``main`` is cut."""
    # Parameters that were frozen since the first capture get no gradient.
    known = dict(named_parameters(model, [objective.loss]))
    trainable = [n for n, info in main.graph.parameters.items() if info.trainable and known[n].requires_grad]
    effects = main.graph.code.effects
    more: dict[str, Any] = {"trainable": trainable, "training": training, "in_float64": in_float64}
    graph = capture_with_counts(model, objective.loss, batch, **more, which=which, effects=effects)
    return align_partition(main, graph)


def _complete_plan(main: Partition, spec: Spec | Plan, microbatches: int) -> Plan:
    """Complete the plan with the stages' nodes and the graph's fingerprint.

    Raises:
        PolylaneError: an axis has more ranks than the longest dimension of any tensor, so that some had no part of any.
    """
    graph = main.graph
    plan = (
        fit.with_fingerprint(spec, graph)
        if isinstance(spec, Plan)
        else fit.plan_from_partition(main, spec, microbatches)
    )
    shapes = [*(node.shape for node in graph.nodes), *(info.shape for info in graph.parameters.values())]
    longest = max((size for shape in shapes for size in shape), default=1)
    for axis in plan.axes:
        if plan.degree(axis) > longest:
            raise PolylaneError(
                f"{axis}={plan.degree(axis)}: nothing in the model can be cut into so many parts, its longest "
                f"dimension is {longest}: lower {axis}"
            )
    return plan
