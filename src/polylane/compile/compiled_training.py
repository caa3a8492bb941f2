"""Compiled training: model, losses and example batch -> captured graphs, plan and cuts, before any worker computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from polylane.compile.compiled_graph import CompiledGraph, compile_graph, cut_graph, split_operators, warn_of_untried
from polylane.compile.dropped_tensors import find_dropped_tensors
from polylane.compile.objectives import Objective, named_parameters, trainable_names
from polylane.compile.optimizer_parts import find_unshardable
from polylane.compile.optimizer_probe import find_whole_parameters
from polylane.compile.plan_checks import check_optimizers, check_plan
from polylane.compile.python_effects import refuse_repeated_effects
from polylane.compile.sample_shares import compute_shares
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.graph.batch import count_parts, flatten, sampled_leaves
from polylane.graph.capture.export import Loss
from polylane.graph.capture.open_dimensions import Opening
from polylane.graph.capture.output_request import OutputRequest
from polylane.graph.graph import Graph
from polylane.graph.parameter_pieces import find_parameter_pieces
from polylane.graph.partition import Partition, align_partition
from polylane.graph.readings.asked_draws import StepDraws
from polylane.graph.readings.batch_readings import ask_batches
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.recompute import has_budget
from polylane.plan.spec import parse
from polylane.planner.find_order import find_measured_order
from polylane.profiling.time_operators import measure, measure_both
from polylane.samples.batch_division import choose_whole_batches, loss_couples_samples, refuse_undividable_samples
from polylane.samples.batch_layout import BatchLayout
from polylane.samples.counts import capture_with_counts
from polylane.samples.derivation import derive_composition
from polylane.samples.microbatch_limit import (
    MinSamples,
    captured_samples,
    limit_microbatches,
    make_split_check,
    min_samples_for,
    requested_microbatches,
)
from polylane.samples.split_dependence import note_microbatches
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
        samples: samples of a step, over all workers.
        held: by objective, names of the parameters that its optimizer holds, trained or not, in the model's order.
        unshardable: names of the parameters that ``shard=`` leaves whole, because the optimizer looks at all of them.
    """

    model: nn.Module
    objectives: Mapping[str, Objective]
    graphs: Mapping[str, CompiledGraph]
    evaluations: Mapping[str, CompiledGraph]
    plan: Plan
    in_float64: bool
    init: Callable[[nn.Module], None] | None
    min_samples: MinSamples
    samples: int
    held: Mapping[str, tuple[str, ...]]
    unshardable: frozenset[str] = frozenset()

    @property
    def partitions(self) -> dict[str, Partition]:
        """The partitions of every objective's graph, by name."""
        return {name: graph.partition for name, graph in self.graphs.items()}

    @property
    def main(self) -> CompiledGraph:
        """The first objective's graph, which the plan was made for."""
        return next(iter(self.graphs.values()))

    @property
    def main_partition(self) -> Partition:
        """The partition of the first objective's graph."""
        return self.main.partition

    @property
    def layouts(self) -> dict[str, StageLayouts]:
        """How the operators of every objective's graph are sharded, by name; empty where none is."""
        return {name: graph.layouts for name, graph in self.graphs.items() if graph.layouts.distinct}

    @property
    def losses(self) -> list[Loss]:
        """The loss of every objective."""
        return [objective.loss for objective in self.objectives.values()]

    @property
    def batch_is_sharded(self) -> bool:
        """Whether replicas shard operators along the batch dimension, because the loss couples samples."""
        return any(graph.layouts.batch_is_sharded for graph in self.graphs.values())

    @property
    def reads_whole_batches(self) -> bool:
        """Whether a graph holds for batches alone that answer questions of the loss as its own batch did."""
        graphs = (*self.graphs.values(), *self.evaluations.values())
        return any(ask_batches(graph.partition.graph.code.readings) for graph in graphs)

    @cached_property
    def owning_stages(self) -> dict[str, tuple[int, ...]]:
        """The stages that use a parameter in any objective, by its canonical name: all of them keep it up to date.

        Of several stages on the same workers, which have the parameter once, it names the first. What an optimizer
        holds and no stage uses yet has the stage where its module would run.
        """
        result: dict[str, set[int]] = {}
        for partition in self.partitions.values():
            for stage in range(partition.stages):
                for name in partition.parameters(stage):
                    result.setdefault(name, set()).add(self.plan.first_chunk(stage))
        main, held_names = self.main_partition, {name for names in self.held.values() for name in names}
        pieces = find_parameter_pieces(main.graph, Partition(main.graph, main.cuts).stage_of)
        for name in held_names - result.keys():
            result[name] = {self.plan.first_chunk(main.pieces[pieces[name]][2])}
        return {name: tuple(sorted(stages)) for name, stages in result.items()}

    def trained_names(self, objective: str) -> list[str]:
        """Return those of an optimizer's parameters that required a gradient at first, in the model's order."""
        graph = self.graphs[objective].partition.graph
        return [name for name, info in graph.parameters.items() if info.trainable]

    def microbatches_of(self, samples: int) -> int:
        """Return the number of microbatches of a batch in training: fewer for a short one, if the model needs it."""
        return count_parts(samples, self.plan.microbatches, self.min_samples.samples)

    def recapture(
        self,
        objective: str,
        batch: Any,
        training: bool,
        which: str = "the example batch",
        opening: Opening | None = None,
        draws: StepDraws | None = None,
        check_device: torch.device | None = None,
        outputs: OutputRequest | None = None,
    ) -> Partition:
        """Capture an objective in another mode or for another form of batch, and cut the graph where its first one is.

        Args:
            objective: name of the loss that is captured.
            batch: a few samples in the form of the batches to come.
            training: whether in training mode; else in evaluation mode, forward only.
            which: names the batch in error messages.
            opening: sizes other than the number of samples that are to be left open; default: none.
            draws: numbers of the step to come, which may decide which way the loss goes; None: of no step.
            check_device: where what is captured is held against the model; None: the device of the model.
            outputs: what is asked for beside the loss; None: in evaluation mode the objective's metrics.

        Raises:
            PolylaneError: it cannot be captured, or not with what is asked for beside the loss.
        """
        main, loss = self.graphs[objective].partition, self.objectives[objective].loss
        outputs = outputs or (None if training else self.objectives[objective].outputs)
        # What requires a gradient may be another choice than at the first capture.
        trainable = trainable_names(named_parameters(self.model, [loss]), self.held[objective])
        graph = capture_with_counts(
            self.model,
            loss,
            batch,
            trainable=trainable,
            training=training,
            in_float64=self.in_float64,
            batch_name=which,
            effects=main.graph.code.effects,
            opening=opening,
            asks=bool(main.graph.code.readings),
            draws=draws,
            check_device=check_device,
            outputs=outputs,
        )
        if outputs is not None and graph.is_opaque and not main.graph.is_opaque:
            raise PolylaneError(f"{outputs.call} cannot be captured with the model: {graph.notes[0]}")
        return align_partition(main, graph)

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
                    split, turns = self.plan.shares or replicas, self.plan.takes_turns
                    shares = (compute_shares(samples, parts, split, replica, turns) for replica in range(replicas))
                    # Replicas that take steps of their own compute nothing where they have no sample.
                    padded = not self.plan.sync.is_replica_local
                    for count in {share.samples for group in shares for share in group if share.weight or padded}:
                        layout.at(count)

    def compile_further(self, partition: Partition) -> CompiledGraph:
        """Compile one more graph of the model (evaluation, batches of another form), with the main graph's placements.

        Raises:
            PolylaneError: a value crosses between stages with different numbers of replicas, and cannot be resharded.
        """
        main = self.main.layouts
        layouts = layouts_like(main, partition, self.plan) if main.distinct else main
        return compile_graph(partition, self.plan, layouts, _known_batch_layouts(partition.graph, self.plan))


def compile_training(
    problem: TrainingProblem,
    plan: str | AnyPlan,
    *,
    fewer: bool = False,
    evaluation: bool = False,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None = None,
) -> CompiledTraining:
    """Capture every objective, choose the cuts, and refuse what would not be exact.

    Args:
        problem: what is to be trained; its model is as the user built it, in training mode.
        plan: a plan in one line, a plan read from a file, or a Spec.
        fewer: whether there may be fewer microbatches than the plan says, if the model needs more samples in each.
        evaluation: capture the evaluation mode here too, once for all workers that are forked from this process.
        seconds: returns the time of every node of a graph; default: measured here, node by node.

    Raises:
        PolylaneError: a plan for another model, too many stages, too few samples for the model in a microbatch, or
            samples that cannot be split exactly.
    """
    spec = parse(plan) if isinstance(plan, str) else plan
    requested, samples = requested_microbatches(spec, problem.samples), captured_samples(spec, problem.samples)
    with problem.python_kept():
        graphs = {name: problem.capture(samples, objective) for name, objective in problem.objectives.items()}
        refuse_undividable_samples(graphs.values() if problem.must_divide else (), spec.per_sample)
        fewest = min_samples_for(spec, graphs.values())
        fewer = fewer or spec.microbatches is None
        requested = 1 if fewer and problem.must_keep_whole(graphs.values()) else requested
        microbatches = _choose_microbatches(spec, graphs.values(), requested, problem.samples, fewest, fewer)
        partitions, orders, couples = _partition_objectives(problem, graphs, spec, samples, microbatches, seconds)
        if note := note_microbatches(graphs.values(), microbatches, problem.samples):
            warnings.warn(note, stacklevel=2)
        chosen = _complete_plan(next(iter(partitions.values())), spec, microbatches)
        if chosen.schedule == "auto" and not chosen.order:
            chosen = _find_order(problem, partitions, chosen, samples, isinstance(spec, Plan))
        fit.check_recompute(chosen, partitions.values())
        check_plan(problem.parameters, problem.objectives, partitions, chosen)
        check_optimizers(problem.parameters, problem.objectives, partitions, chosen)
        layouts = _shard_operators(problem, partitions, chosen, microbatches, couples)
        compiled = {name: compile_graph(part, chosen, layouts[name], orders[name]) for name, part in partitions.items()}
        _check_budgets(chosen, compiled.values(), problem)
        training = CompiledTraining(
            model=problem.model,
            objectives=MappingProxyType(problem.objectives),
            graphs=MappingProxyType(compiled),
            evaluations=MappingProxyType({}),
            plan=chosen,
            in_float64=problem.in_float64,
            init=problem.init,
            min_samples=fewest,
            samples=problem.samples,
            held=MappingProxyType(problem.held),
            unshardable=_find_unshardable(problem, chosen),
        )
        evaluations = {
            name: training.compile_further(training.recapture(name, problem.take_batch(samples), training=False))
            for name in (graphs if evaluation else ())
        }
    return replace(training, evaluations=MappingProxyType(evaluations))


def _find_unshardable(problem: TrainingProblem, plan: Plan) -> frozenset[str]:
    """Find the parameters that replicas keep whole under ``shard``, because an optimizer needs them so."""
    if plan.sync.shard == "none":
        return frozenset()
    return frozenset(
        find_unshardable(problem.parameters, [objective.optimizer for objective in problem.objectives.values()])
    )


def _find_order(
    problem: TrainingProblem, partitions: Mapping[str, Partition], plan: Plan, samples: int, placed: bool
) -> Plan:
    """Return the plan with an order of passes found for the measured times of the first objective's graph."""
    name, partition = next(iter(partitions.items()))
    leaves, _ = flatten(problem.take_batch(samples))
    loss, device = problem.objectives[name].loss, problem.device
    seconds = measure_both(partition.graph, problem.model, loss, leaves, device=device)
    kind = next((p.device.type for p in problem.model.parameters()), "cpu") if device is None else device.type
    return find_measured_order(partition, plan, seconds, kind, placed)


def _choose_microbatches(
    spec: AnyPlan, graphs: Collection[Graph], requested: int, total: int, fewest: MinSamples, fewer: bool
) -> int:
    """Choose the number of microbatches, which every graph can be run in.

    Args:
        spec: the plan; its number of microbatches is None where it leaves the choice open.
        graphs: captured graphs of all objectives.
        requested: number of microbatches that the plan, or its default, asks for.
        total: samples of a step, over all workers.
        fewest: fewest samples that a microbatch of the model needs.
        fewer: whether the number is a default, and may be lowered: to give a microbatch enough samples, or because
            the batch must stay whole.

    Raises:
        PolylaneError: too few samples in a microbatch, or a model with side effects in each of several passes.
    """
    if fewer:
        requested = choose_whole_batches(spec, graphs, requested)
    microbatches = limit_microbatches(requested, total, fewest, fewer)
    for graph in graphs:
        refuse_repeated_effects(graph, spec, microbatches)
    return microbatches


def _partition_objectives(
    problem: TrainingProblem,
    graphs: Mapping[str, Graph],
    spec: AnyPlan,
    samples: int,
    microbatches: int,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None,
) -> tuple[dict[str, Partition], dict[str, Mapping[str, BatchLayout]], bool]:
    """Return every objective's partition, the known batch layouts of its values, and whether a loss couples samples."""
    partitions, orders, couples = dict[str, Partition](), dict[str, Mapping[str, BatchLayout]](), False
    leaves, _ = flatten(problem.take_batch(samples))
    clock = seconds or (lambda graph, loss, leaves: measure(graph, problem.model, loss, leaves, problem.device))
    for name, graph in graphs.items():
        loss = problem.objectives[name].loss
        if spec.data > 1 or microbatches > 1:
            find_difference = make_split_check(graph, problem.model, loss, problem.flat_example[0], problem.in_float64)
            local = ",".join(spec.sync.to_words()) if spec.sync.is_replica_local else ""
            couples = (
                loss_couples_samples(graph, microbatches, spec.data, spec.per_sample, find_difference, local) or couples
            )
        orders[name] = _known_batch_layouts(graph, spec)
        main = next(iter(partitions.values()), None)
        partitions[name] = cut_graph(graph, spec, main, partial(clock, graph, loss, leaves), orders[name])
    return partitions, orders, couples


def _known_batch_layouts(graph: Graph, plan: AnyPlan) -> Mapping[str, BatchLayout]:
    """Return the batch layouts of a graph's values as far as they are known; none where a plan does not need them."""
    return derive_composition(graph, plan.per_sample).batch_layouts if plan.resplits_batch else {}


def _check_budgets(plan: Plan, graphs: Iterable[CompiledGraph], problem: TrainingProblem) -> None:
    """Refuse budgets of recomputation that no stage can keep, before any worker starts."""
    if any(has_budget(plan.recompute_of(stage)) for stage in range(plan.pipeline)):
        for graph in graphs:
            find_dropped_tensors(graph.partition, plan, graph.layouts, problem.samples, in_float64=problem.in_float64)


def _shard_operators(
    problem: TrainingProblem, partitions: Mapping[str, Partition], plan: Plan, microbatches: int, couples_samples: bool
) -> dict[str, StageLayouts]:
    """Return how the operators of every objective's graph are sharded, by name; no stage has a layout where none is."""
    if not plan.axes and not couples_samples:
        return dict.fromkeys(partitions, StageLayouts((None,) * plan.pipeline))
    sparse = {name for partition in partitions.values() for name in find_sparse_gradients(partition.graph)}
    reasons = find_whole_parameters(problem.parameters, [o.optimizer for o in problem.objectives.values()], sparse)
    warn_of_untried(reasons, plan)
    sampled = sampled_leaves(problem.flat_example[0]) if couples_samples else ()
    return split_operators(partitions, plan, -(-problem.samples // microbatches), reasons, sampled)


def _complete_plan(main: Partition, spec: AnyPlan, microbatches: int) -> Plan:
    """Complete the plan with the stages' nodes and the graph's fingerprint."""
    if isinstance(spec, Plan):
        return fit.with_fingerprint(spec, main.graph)
    return fit.plan_from_partition(main, spec, microbatches)
