"""Binding: the slow path of a worker's compile cache: capture a further form, lower it, bind it, fit it to a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from polylane.compile.batch_split import count_replica_samples
from polylane.compile.cache import CacheKey
from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import recapture_objective
from polylane.compile.python_effects import collect_effects, refuse_effects
from polylane.errors import PolylaneError
from polylane.graph.capture.export import python_kept
from polylane.graph.partition import Partition
from polylane.program.program import Program
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.shared_buffers import stages_of_buffers
from polylane.runtime.pipeline.bound_program import batch_statistics_of, bind_program, lower_programs
from polylane.runtime.pipeline.connections import Connections
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.samples.batch_layout import hash_crossing_layouts
from polylane.samples.loss_coupling import refuse_coupled_samples


@dataclass(frozen=True)
class BoundProgram:
    """One graph's programs, bound to one worker; once it is fitted, ready for batches of one size.

    Attributes:
        partition: the graph and its cuts.
        programs: of every worker, by rank.
        executor: runs this worker's program.
        buffers: of every buffer that the graph uses, the stages that do.
        passes: microbatches of a batch that have samples.
        counted: samples of a batch that count at each replica, where replicas may go their own ways.
    """

    partition: Partition
    programs: tuple[Program, ...]
    executor: Executor
    buffers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    passes: int = 0
    counted: tuple[int, ...] = ()


class ProgramBinder:
    """Makes graphs ready on this worker: see :class:`polylane.compile.cache.Compiler`.

    Args:
        holding: what this worker holds.
        connections: what it reaches the others by.
        programs: of all workers, for every objective's graph that was compiled ahead for training.
        replica_local: likewise, for steps in which replicas go their own ways; empty where they never do.
        codecs: how replicas sum the gradients of each objective, whatever the form of its batches.
    """

    def __init__(
        self,
        holding: LocalModel,
        connections: Connections,
        programs: Mapping[str, tuple[Program, ...]],
        replica_local: Mapping[str, tuple[Program, ...]],
        codecs: Mapping[str, GradientCompressor],
    ) -> None:
        self._local_model, self._connections, self._codecs = holding, connections, codecs
        self._ahead = {False: programs, True: replica_local}
        self._prepared, self._plan = holding.prepared, holding.prepared.plan
        self._losses = [objective.loss for objective in self._prepared.objectives.values()]

    def capture(self, objective: str, training: bool, batch: Any, which: str) -> CompiledGraph:
        """Capture an objective anew from a small batch, and see that the plan can run what is found.

        Args:
            objective: name of the loss.
            training: whether in training mode.
            batch: a few samples of the form that came.
            which: what batch it is, for the user.
        """
        prepared = self._prepared
        main, about = prepared.graphs[objective].partition, prepared.objectives[objective]
        with (
            self._local_model.full_tensors.installed_in_model(self._local_model.was_on_meta),
            python_kept(prepared.model, *self._losses),
        ):
            partition = recapture_objective(prepared.model, about, main, batch, training, prepared.in_float64, which)
        self._refuse(partition, training)
        return prepared.compile_further(partition)

    def lower(self, key: CacheKey, graph: CompiledGraph, replica_local: bool) -> tuple[Program, ...]:
        """Every worker's program for a graph."""
        if graph is self._prepared.graphs[key.objective]:
            return self._ahead[replica_local][key.objective]
        if graph is self._prepared.evaluations.get(key.objective):
            self._refuse(graph.partition, key.training)
        programs = lower_programs(
            graph.partition, self._plan, self._local_model.owning_stages, key.training, graph.layouts, replica_local
        )
        return self._local_model.shard_units.regroup_buckets(programs)

    def bind(
        self, key: CacheKey, graph: CompiledGraph, programs: tuple[Program, ...], microbatches: int, replica_local: bool
    ) -> BoundProgram:
        """The programs of the first microbatches, bound to this worker's tensors and connections."""
        if microbatches < self._plan.microbatches:
            programs = tuple(truncate_program(program, microbatches) for program in programs)
        codec = self._codecs[key.objective] if key.training and not replica_local else None
        return self.bind_graph(graph, programs, replica_local, codec)

    def fit_to_samples(self, bound: BoundProgram, samples: int) -> BoundProgram:
        """A lane for batches of one size."""
        plan, parts = self._plan, bound.executor.microbatches
        own = tuple(count_replica_samples(samples, parts, plan.data)) if plan.sync.is_replica_local else ()
        return replace(bound, executor=bound.executor.fit_to_samples(samples), passes=min(parts, samples), counted=own)

    def bind_graph(
        self,
        graph: CompiledGraph,
        programs: Sequence[Program],
        replica_local: bool = False,
        codec: GradientCompressor | None = None,
    ) -> BoundProgram:
        """One of the model's graphs, with every worker's program, bound to this worker.

        Args:
            graph: as the plan runs it.
            programs: of all workers.
            replica_local: replicas do not sum gradients with each other.
            codec: how replicas sum gradients, the same for all lanes of an objective; None: plainly, or not at all.
        """
        partition, stage = graph.partition, self._local_model.stage
        counts = batch_statistics_of(partition, stage).buffers
        self._local_model.tensors.move_to_device({*partition.parameters(stage), *partition.buffers(stage), *counts})
        transport = self._connections.transport
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
        worker = bind_program(
            programs[self._local_model.world.rank],
            self._plan,
            self._local_model.tensors,
            transport,
            self._connections.sum_replicas,
            self._connections.mesh,
            graph,
            self._local_model.shards,
            replica_local,
            codec,
        )
        return BoundProgram(partition, tuple(programs), worker, stages_of_buffers(partition))

    def restoring_python_state(self, partition: Partition) -> AbstractContextManager[None]:
        """While a graph is evaluated: what the user's own Python in it keeps is afterwards as it was."""
        if not collect_effects(partition.graph):
            return nullcontext()
        return python_kept(self._prepared.model, *self._losses)

    def _refuse(self, partition: Partition, training: bool) -> None:
        self._refuse_moved_use(partition)
        self._refuse_coupled_samples(partition)
        if training:
            refuse_effects(partition, self._plan)
        self._refuse_new_statistics(partition)

    def _refuse_new_statistics(self, partition: Partition) -> None:
        graphs = [each.graph for each in self._prepared.partitions.values()]
        if partition.graph.code.has_batch_statistics and self._plan.data > 1:
            if any(graph.code.has_batch_statistics for graph in graphs):
                return
            raise PolylaneError(
                "a part of the model normalizes by statistics of the batch now, but did not when the training was "
                "prepared, so that replicas have no way to share them: let it train() then, and eval() it before the "
                "first step"
            )

    def _refuse_coupled_samples(self, partition: Partition) -> None:
        """A batch of another form, or another mode, may have another loss: it must be divisible as the first one is."""
        if not self._prepared.batch_is_sharded:
            refuse_coupled_samples(partition.graph, self._plan.microbatches, self._plan.data, self._plan.per_sample)

    def _refuse_moved_use(self, partition: Partition) -> None:
        holders = self._local_model.owning_stages
        for stage in range(self._plan.pipeline):
            for name in partition.parameters(stage):
                if name in holders and stage not in holders[name]:
                    raise PolylaneError(
                        f"for batches of this form stage {stage} needs {name}, which stage {min(holders[name])} "
                        "holds: give an example batch of the form that training has"
                    )


def truncate_program(program: Program, microbatches: int) -> Program:
    """A program of the first microbatches only: what a worker does where the others have no samples."""
    actions = tuple(a for a in program.actions if a.microbatch is None or a.microbatch < microbatches)
    return replace(program, actions=actions)
