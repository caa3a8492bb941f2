"""Program binder: the slow path of a worker's compile cache; captures a further form, lowers, binds and fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.python_effects import refuse_effects
from polylane.compile.sample_shares import count_replica_samples
from polylane.errors import PolylaneError, format_plural
from polylane.graph.batch import flatten, to_device
from polylane.graph.capture.export import python_kept
from polylane.graph.capture.open_dimensions import Opening
from polylane.graph.partition import Partition
from polylane.graph.python_state.moved_module import joined_modules
from polylane.graph.readings.asked_draws import StepDraws
from polylane.plan.lanes import stage_graph_of
from polylane.program.program import Program
from polylane.runtime.connections.connections import Connections
from polylane.runtime.parameters.full_tensors import FullTensors
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.shared_buffers import stages_of_buffers
from polylane.runtime.parameters.weight_versions import WeightVersions
from polylane.runtime.pipeline.asynchronous import AsynchronousExecutor, AsynchronousPipeline
from polylane.runtime.pipeline.bind_program import bind_program, lower_programs
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.state.settings_versions import Purpose
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.samples.batch_division import check_open_sizes, refuse_coupled_samples
from polylane.samples.batch_layout import hash_crossing_layouts
from polylane.samples.leaf_effects import collect_effects
from polylane.schedule.action import ActionKind
from polylane.schedule.asynchronous import steps_in_flight, weight_delays


class CacheKey(NamedTuple):
    """The guards of a compiled graph: what it was compiled for.

    Attributes:
        purpose: what the graph computes, in which mode.
        structure: how the batch is nested, see :func:`polylane.graph.batch.batch_structure`.
        signature: dtypes and sizes of the batch's leaves, see :func:`polylane.graph.batch.batch_signature`.
        settings: version number of the user's settings that the graph was captured with; 0 is the version at the start.
        answers: tells graphs of one form apart that hold for other answers to what the loss asks of a batch.
    """

    purpose: Purpose
    structure: Any
    signature: tuple[Any, ...]
    settings: int
    answers: int = 0


@dataclass(frozen=True)
class BoundProgram:
    """One graph's programs, bound to one worker; once it is fitted, ready for batches of one size.

    Attributes:
        programs: programs of every worker, by rank.
        executor: runs this worker's program on its tensors.
        buffers: for every buffer that the graph uses, the stages that use it.
        passes: number of microbatches of a batch that have samples.
        counted: samples of a batch that each replica computes, by replica; empty where replicas always sum gradients.
    """

    programs: tuple[Program, ...]
    executor: Executor
    buffers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    passes: int = 0
    counted: tuple[int, ...] = ()

    @property
    def partition(self) -> Partition:
        """The graph and its cuts into stages."""
        return self.executor.program.partition


class ProgramBinder:
    """Compiles and binds graphs on this worker: the slow path of its compile cache.

    Args:
        local_model: this worker's part of the model.
        connections: transports and mesh of this worker.
        programs: by objective, all workers' programs of the graph that was compiled ahead for training.
        replica_local: the same for steps without gradient sums between replicas; empty where there are none.
        updates: by objective, its update; the compressor of its gradients is shared by all forms of batches.

    Attributes:
        pipeline: the batches under way, where the plan's schedule is asynchronous; else None.
        keeps_state: whether the user's own Python keeps in evaluations what it does.
    """

    def __init__(
        self,
        local_model: LocalModel,
        connections: Connections,
        programs: Mapping[str, tuple[Program, ...]],
        replica_local: Mapping[str, tuple[Program, ...]],
        updates: Mapping[str, ObjectiveUpdate],
    ) -> None:
        self._local_model, self._connections, self._updates = local_model, connections, updates
        self.keeps_state = False
        self._ahead = {False: programs, True: replica_local}
        self._prepared, self._plan = local_model.prepared, local_model.prepared.plan
        self.pipeline = self._open_pipeline() if self._plan.is_asynchronous else None

    def _open_pipeline(self) -> AsynchronousPipeline:
        """Return an empty pipeline, with versions of this worker's weights."""
        plan = self._plan
        graph = stage_graph_of(self._prepared.main_partition, plan)
        delays = weight_delays(plan.schedule, graph, plan.most_turns, plan.vertical_sync)
        (update,) = self._updates.values()
        trained = {name: p for name, p in update.full_parameters.items() if p.requires_grad}
        versions = WeightVersions(trained, delays[self._local_model.stage])
        return AsynchronousPipeline(versions, steps_in_flight(graph, plan.most_turns))

    def capture(
        self,
        purpose: Purpose,
        batch: Any,
        kind: str,
        opening: Opening | None = None,
        draws: StepDraws | None = None,
    ) -> CompiledGraph:
        """Capture a graph for another form of batch, or with sizes left open, and compile it like the first one.

        Raises:
            NotOpened: the sizes of ``opening`` cannot be left open.
            PolylaneError: the plan cannot run such batches.
        """
        prepared = self._prepared
        own_device, (leaves, rebuild) = self._local_model.world.device, flatten(batch)
        modules = [module for module in (prepared.model, *prepared.losses) if isinstance(module, nn.Module)]
        # Capture runs the user's model: it needs parameters of full shape, and must leave Python state as it was.
        with (
            FullTensors(self._local_model).installed_in_model(),
            python_kept(prepared.model, *prepared.losses),
            joined_modules(modules, own_device) as device,
        ):
            if device != own_device:
                batch = rebuild(to_device(leaves, device))
                if opening is not None:
                    opening = replace(opening, others=tuple(to_device(leaves, device) for leaves in opening.others))
            partition = prepared.recapture(
                purpose.objective, batch, purpose.training, kind, opening, draws, own_device, purpose.request
            )
        if opening is not None and not prepared.batch_is_sharded and max(self._plan.data, self._plan.microbatches) > 1:
            check_open_sizes(partition.graph, self._plan.per_sample, opening.others)
        self._refuse(partition, purpose.training)
        return prepared.compile_further(partition)

    def lower(self, key: CacheKey, graph: CompiledGraph, replica_local: bool) -> tuple[Program, ...]:
        if graph is self._prepared.graphs[key.purpose.objective]:  # lowered before the first step, for its connections
            return self._ahead[replica_local][key.purpose.objective]
        if graph is self._prepared.evaluations.get(
            key.purpose.objective
        ):  # compiled ahead, not checked by capture() here
            self._refuse(graph.partition, key.purpose.training)
        programs = lower_programs(self._prepared, graph, key.purpose.training, replica_local)
        return self._local_model.shard_units.regroup_buckets(programs)

    def bind(
        self, key: CacheKey, graph: CompiledGraph, programs: tuple[Program, ...], microbatches: int, replica_local: bool
    ) -> BoundProgram:
        if microbatches < self._plan.microbatches:
            programs = tuple(truncate_program(program, microbatches) for program in programs)
        codec = self._updates[key.purpose.objective].compressor if key.purpose.training and not replica_local else None
        if key.purpose.training and microbatches < self._plan.microbatches and self.pipeline is not None:
            raise PolylaneError(
                f"schedule={self._plan.schedule} divides every batch into {self._plan.microbatches} microbatches, and "
                f"this one only into {microbatches}: leave it out, with drop_last=True of batches()"
            )
        return self.bind_graph(graph, programs, replica_local, codec)

    def fit_to_samples(self, bound: BoundProgram, samples: int, open_sizes: tuple[int, ...] = ()) -> BoundProgram:
        plan, parts = self._plan, bound.executor.microbatches
        if isinstance(bound.executor, AsynchronousExecutor) and plan.takes_turns and samples < plan.data:
            raise PolylaneError(
                f"replicas={plan.replicas}: under schedule={plan.schedule} each of {plan.data} replicas needs a "
                f"microbatch of every batch, and one has {format_plural(samples, 'sample')}: leave it out, with "
                "drop_last=True of batches()"
            )
        counts = tuple(count_replica_samples(samples, parts, plan.data)) if plan.sync.is_replica_local else ()
        return replace(
            bound,
            executor=bound.executor.fit_to_samples(samples, open_sizes),
            passes=min(parts, samples),
            counted=counts,
        )

    def bind_graph(
        self,
        graph: CompiledGraph,
        programs: Sequence[Program],
        replica_local: bool = False,
        codec: GradientCompressor | None = None,
    ) -> BoundProgram:
        """Bind one of the model's graphs, with every worker's program, to this worker; collective where checks need it.

        Args:
            graph: the graph as compiled for the plan.
            programs: programs of all workers, by rank.
            replica_local: whether replicas do not sum gradients with each other.
            codec: compressor of the gradients, the same for all bound programs of an objective; None: uncompressed, or
                not summed at all.
        """
        partition, transport = graph.partition, self._connections.transport
        # Every worker solved for placements on its own. Different results would exchange shards of wrong shapes, so
        # their hashes are compared before the first message.
        if graph.layouts.distinct and len(set(transport.all_gather_object(graph.layouts.placement_hash))) > 1:
            raise PolylaneError(
                "workers chose different splits of the operators: are their models, batches and library versions the "
                "same? A plan file may fix placements"
            )
        if (
            self._plan.resplits_batch
            and len(set(transport.all_gather_object(hash_crossing_layouts(partition, graph.orders)))) > 1
        ):
            raise PolylaneError(
                "workers found the samples in another order in what crosses between stages: are their models, batches "
                "and library versions the same? Stages with the same data do not divide samples anew"
            )
        program = programs[self._local_model.world.rank]
        trains = any(action.kind is ActionKind.STEP for action in program.actions)
        pipeline = self.pipeline if trains else None
        executor = bind_program(program, graph, self._local_model, self._connections, replica_local, codec, pipeline)
        # Several stages on the same workers have a buffer once: they are known by the first.
        used = stages_of_buffers(partition).items()
        buffers = {name: frozenset(map(self._plan.first_chunk, stages)) for name, stages in used}
        return BoundProgram(tuple(programs), executor, buffers)

    def restoring_python_state(self, partition: Partition) -> AbstractContextManager[None]:
        """Return a context manager that restores the state of the user's own Python after an evaluation."""
        if self.keeps_state or not collect_effects(partition.graph):
            return nullcontext()
        return python_kept(self._prepared.model, *self._prepared.losses, is_trial=False)

    def _refuse(self, partition: Partition, training: bool) -> None:
        # The plan was made for the first graph of the objective; another form or mode may need what it does not give.
        self._refuse_moved_use(partition)
        if not self._prepared.batch_is_sharded:
            refuse_coupled_samples(partition.graph, self._plan.microbatches, self._plan.data, self._plan.per_sample)
        if training:
            refuse_effects(partition, self._plan)
        self._refuse_new_statistics(partition)

    def _refuse_new_statistics(self, partition: Partition) -> None:
        graphs = [earlier_partition.graph for earlier_partition in self._prepared.partitions.values()]
        is_known = any(graph.code.has_batch_statistics for graph in graphs)
        if partition.graph.code.has_batch_statistics and self._plan.data > 1 and not is_known:
            raise PolylaneError(
                "a part of the model normalizes by statistics of the batch now, but did not when the training was "
                "prepared, so that replicas have no way to share them: let it train() then, and eval() it before the "
                "first step"
            )

    def _refuse_moved_use(self, partition: Partition) -> None:
        holders = self._local_model.owning_stages
        for stage in range(self._plan.pipeline):
            for name in partition.parameters(stage):
                if name in holders and self._plan.first_chunk(stage) not in holders[name]:
                    if partition.graph.output_form is not None:
                        raise PolylaneError(
                            f"pipeline={self._plan.pipeline}: metrics(model, batch) or predict(model, batch) needs "
                            f"{name} on stage {stage}, which stage {min(holders[name])} holds: it runs the model in "
                            "another order than the loss, or a second time with other inputs, or through a module that "
                            "cannot be captured; call it as the loss does, or take a plan without pipeline"
                        )
                    raise PolylaneError(
                        f"for batches of this form stage {stage} needs {name}, which stage {min(holders[name])} "
                        "holds since the first step was cut into stages: begin with a batch, or a loss, of the form "
                        "that later steps have, or take a plan without pipeline"
                    )


def truncate_program(program: Program, microbatches: int) -> Program:
    """Return a program of the first microbatches only, for a batch that is too short for all of them."""
    actions = tuple(a for a in program.actions if a.microbatch is None or a.microbatch < microbatches)
    return replace(program, actions=actions, microbatches=microbatches)
