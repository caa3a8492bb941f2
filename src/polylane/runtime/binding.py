"""Binding: a training's graphs made ready on one worker, anew where a batch of another form or size comes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from polylane.errors import PolylaneError
from polylane.graph.batch import few, part_count, signature
from polylane.graph.export import python_kept
from polylane.graph.orders import digest
from polylane.graph.partition import Partition
from polylane.program.program import Program
from polylane.runtime.captures import Captures
from polylane.runtime.connections import Connections
from polylane.runtime.division import Batch, Form
from polylane.runtime.holding import Holding
from polylane.runtime.lane import bind, counts_of, programs_of
from polylane.runtime.own_python import effects_in, refuse_effects
from polylane.runtime.prepare import recaptured
from polylane.runtime.sync.codec import Codec
from polylane.runtime.worker import Worker
from polylane.samples.division import refuse_meeting


@dataclass
class Lane:
    """One graph, bound."""

    partition: Partition
    programs: tuple[Program, ...]
    worker: Worker


# By (the form of a batch, into how many microbatches it is divided, whether each replica goes its own way, the number
# of the settings that they were captured with).
Lanes = dict[tuple[Any, int, bool, int], Lane]


class Binding:
    """Binds graphs to this worker's tensors and connections.

    Args:
        holding: what this worker holds.
        connections: what it reaches the others by.
        example: the form of the example batch.
        form: its structure, and the signature of its leaves.
    """

    def __init__(self, holding: Holding, connections: Connections, example: Form, form: Any) -> None:
        self._holding, self._connections = holding, connections
        self._prepared, self._plan = holding.prepared, holding.prepared.plan
        self._example, self._form = example, form
        self._losses = [objective.loss for objective in self._prepared.objectives.values()]
        self._evaluations: dict[str, Lanes] = {name: {} for name in self._prepared.objectives}
        ahead = ((True, self._prepared.partitions), (False, self._prepared.evaluations))
        self._captures = {
            (name, training): Captures(self._prepared, name, training, partitions.get(name))
            for training, partitions in ahead
            for name in self._prepared.objectives
        }

    def microbatches(self, samples: int) -> int:
        """Into how many microbatches a batch is divided: a short one into fewer, if the model needs the samples."""
        return part_count(samples, self._plan.microbatches, self._prepared.fewest.samples)

    def lane(
        self, partition: Partition, programs: Sequence[Program], alone: bool = False, codec: Codec | None = None
    ) -> Lane:
        """A partition of one of the model's graphs, with every worker's program, bound to this worker.

        Args:
            partition: the graph and its cuts.
            programs: of all workers.
            alone: every replica goes its own way.
            codec: how replicas sum gradients, the same for all lanes of an objective; None: plainly, or not at all.
        """
        stage = self._holding.stage
        counted = counts_of(partition, stage).buffers
        self._holding.tensors.hold({*partition.parameters(stage), *partition.buffers(stage), *counted})
        layouts, transport = self._prepared.layouts_of(partition), self._connections.transport
        if layouts.distinct and len(set(transport.all_gather_object(layouts.digest))) > 1:
            raise PolylaneError(
                "workers chose different splits of the operators: are their models, batches and library versions the "
                "same? A plan file may fix placements"
            )
        orders = self._prepared.orders_of(partition)
        if self._plan.redivides and len(set(transport.all_gather_object(digest(partition, orders)))) > 1:
            raise PolylaneError(
                "workers found the samples in another order in what crosses between stages: are their models, batches "
                "and library versions the same? Stages with the same data do not divide samples anew"
            )
        worker = bind(
            programs[self._holding.world.rank],
            self._plan,
            self._holding.tensors,
            transport,
            self._connections.statistics,
            self._connections.mesh,
            layouts,
            orders,
            alone,
            self._holding.shards,
            codec,
        )
        return Lane(partition, tuple(programs), worker)

    def for_training(
        self, lanes: Lanes, name: str, batch: Batch, alone: bool = False, codec: Codec | None = None
    ) -> Lane:
        """An objective's lane for batches like this one, bound when the first of them comes; see :meth:`lane`."""
        return self._for(lanes, name, batch, True, alone, codec)

    def for_evaluation(self, name: str, batch: Batch) -> Lane:
        """As :meth:`for_training`, in evaluation mode and forward only."""
        return self._for(self._evaluations[name], name, batch, False, False, None)

    def kept(self, partition: Partition) -> AbstractContextManager[None]:
        """While a graph is evaluated: what the user's own Python in it keeps is afterwards as it was."""
        if not effects_in(partition.graph):
            return nullcontext()
        return python_kept(self._prepared.model, *self._losses)

    def _for(self, lanes: Lanes, name: str, batch: Batch, training: bool, alone: bool, codec: Codec | None) -> Lane:
        structure = (batch.form or self._example).structure
        form, count = (structure, signature(batch.leaves, batch.sampled)), self.microbatches(batch.samples)
        captures = self._captures[name, training]
        number, forgotten = captures.number()
        for key in [key for key in lanes if key[3] == forgotten]:
            del lanes[key]
        if (form, count, alone, number) not in lanes:
            full = self._plan.microbatches
            if (form, full, alone, number) not in lanes:
                other = lanes.get((form, full, not alone, number))
                known = None if other is None else other.partition
                if known is None and not training and form == self._form and number == 0:
                    known = self._prepared.evaluations.get(name)
                found, programs = self._captured(name, batch, form, training, alone, known)
                captures.add(number, found)
                lanes[form, full, alone, number] = self.lane(found, programs, alone, codec)
            if count < full:
                lane = lanes[form, full, alone, number]
                programs = tuple(shortened(p, count) for p in lane.programs)
                lanes[form, count, alone, number] = self.lane(lane.partition, programs, alone, codec)
        return lanes[form, count, alone, number]

    def _captured(
        self, name: str, batch: Batch, form: Any, training: bool, alone: bool, partition: Partition | None
    ) -> tuple[Partition, tuple[Program, ...]]:
        """A graph that is captured now, or was captured ahead, and every worker's program for it."""
        prepared = self._prepared
        if partition is None:
            rebuild, main = (batch.form or self._example).rebuild, prepared.partitions[name]
            example = rebuild(few(batch.leaves, 4, batch.sampled))
            objective = prepared.objectives[name]
            which = "a batch like the example" if form == self._form else "a batch of another form than the example's"
            which += "" if training else " in evaluation mode"
            with self._holding.wholes.in_model(self._holding.materialized), python_kept(prepared.model, *self._losses):
                partition = recaptured(prepared.model, objective, main, example, training, prepared.in_float64, which)
                prepared.look_at(partition)
        self._refuse_moved(partition)
        self._refuse_meeting(partition)
        if training:
            refuse_effects(partition, self._plan)
        self._refuse_new_statistics(partition)
        layouts = prepared.layouts_of(partition)
        programs = programs_of(partition, self._plan, self._holding.holders, training, layouts, alone)
        return partition, self._holding.layout.regrouped(programs)

    def _refuse_new_statistics(self, partition: Partition) -> None:
        graphs = [each.graph for each in self._prepared.partitions.values()]
        if partition.graph.code.batch_statistics and self._plan.data > 1:
            if any(graph.code.batch_statistics for graph in graphs):
                return
            raise PolylaneError(
                "a part of the model normalizes by statistics of the batch now, but did not when the training was "
                "prepared, so that replicas have no way to share them: let it train() then, and eval() it before the "
                "first step"
            )

    def _refuse_meeting(self, partition: Partition) -> None:
        """A batch of another form, or another mode, may have another loss: it must be divisible as the first one is."""
        if not any(layouts.together for layouts in self._prepared.layouts.values()):
            refuse_meeting(partition.graph, self._plan.microbatches, self._plan.data, self._plan.per_sample)

    def _refuse_moved(self, partition: Partition) -> None:
        holders = self._holding.holders
        for stage in range(self._plan.pipeline):
            for name in partition.parameters(stage):
                if name in holders and stage not in holders[name]:
                    raise PolylaneError(
                        f"for batches of this form stage {stage} needs {name}, which stage {min(holders[name])} "
                        "holds: give an example batch of the form that training has"
                    )


def shortened(program: Program, microbatches: int) -> Program:
    """A program of the first microbatches only: what a worker does where the others have no samples."""
    actions = tuple(a for a in program.actions if a.microbatch is None or a.microbatch < microbatches)
    return replace(program, actions=actions)
