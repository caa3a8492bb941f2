"""Compile cache: compiled programs by the form of the batch; one look-up in every step, one slow path for a miss.

The form of a batch is all that a captured graph depends on: the pytree structure, dtypes and sizes of its tensors
(without the number of samples), and the user's settings that the capture took for constants (attributes, flags, the
environment). These are guards as in ``torch.compile`` (Ansel et al., ASPLOS'24): compare what the code was compiled
for, run it if nothing differs, else recompile. The least recently used forms are evicted.

    looked up by                                  found                   on a miss          kept at most
    objective, mode, structure, sizes, settings   compiled graph          capture, compile   FORMS_KEPT
    + replica_local                               programs of all ranks   lower
    + number of microbatches                      bound program           bind
    + number of samples, open sizes               fitted program          fit_to_samples     SIZES_KEPT

A graph that was captured for a batch's answers to what the loss asks of it
(:mod:`polylane.graph.readings.batch_readings`) is found by asking every batch of its form the same questions.

A size that differs from the example's is left open in the capture that it causes (:mod:`polylane.graph.open_sizes`), as
``torch.compile`` does: the graph then serves other sizes too, so far as its guards admit them. A batch that no graph
admits is captured for its own sizes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch, BatchForm
from polylane.diagnosis.page_layout import Phase
from polylane.graph.batch import CarriedLeaves, clone_leaves
from polylane.graph.capture.open_dimensions import NotOpened, Opening
from polylane.graph.capture.output_request import OutputRequest
from polylane.graph.readings.asked_draws import StepDraws
from polylane.graph.readings.batch_readings import answer_alike, are_answered, ask_batches, refuse_part
from polylane.program.program import Program
from polylane.runtime.data.batch_forms import BatchForms, capture_of_few, without_sizes
from polylane.runtime.program_binder import BoundProgram, CacheKey, ProgramBinder
from polylane.runtime.progress_page import UNWATCHED, Progress
from polylane.runtime.state.settings_versions import Agree, Purpose, SettingsVersions

FORMS_KEPT = 32  # compiled graphs kept at once, least recently used evicted; those compiled ahead do not count
SIZES_KEPT = 64  # sizes of batches for which one graph's programs are kept at once
PLACED_KEPT = 4096  # forms for which it is known which graph with open sizes admits them


@dataclass
class _Entry:
    """One graph, with what was made of it so far.

    Attributes:
        graph: the graph as it was captured and compiled.
        programs: programs of all workers, by whether the step is replica-local.
        bound: programs bound to this worker, by (microbatches, whether the step is replica-local).
        fitted: bound programs for one size of batch, by (samples, open sizes, whether the step is replica-local); in
            the order in which they were made, for eviction.
    """

    graph: CompiledGraph
    programs: dict[bool, tuple[Program, ...]] = field(default_factory=dict)
    bound: dict[tuple[int, bool], BoundProgram] = field(default_factory=dict)
    fitted: OrderedDict[tuple[int, tuple[int, ...], bool], BoundProgram] = field(default_factory=OrderedDict)


class CompileCache:
    """All that one worker compiled for the batches of a training.

    Args:
        training: the training as it was compiled ahead of the workers.
        compiler: the slow path, called on a miss.
        example: a batch of the form that the training was compiled for.
        agree: called before every step with the setting that has changed, or None, and with the file that has: "" if
            none has, None if none is read. It returns what all workers take for the latter. Collective.
        progress: where this worker says that it compiles.

    Attributes:
        sampled: for every leaf of the example, whether it is split with the samples.
        has_common_tensors: whether a tensor of the example is not.
    """

    def __init__(
        self,
        training: CompiledTraining,
        compiler: ProgramBinder,
        example: Any,
        agree: Agree,
        progress: Progress = UNWATCHED,
    ) -> None:
        batch, self._agree, self._progress = Batch.whole(example), agree, progress
        self._training, self._compiler, self._example = training, compiler, BatchForm.of_batch(example)
        self.sampled, self.has_common_tensors = batch.sampled, batch.has_common_tensors
        self._whole, self._carried = batch, CarriedLeaves()
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()
        self._versions: dict[Purpose, SettingsVersions] = {}
        # By form, the key of the graph with open sizes that admits it, and the sizes.
        self._placed: dict[CacheKey, tuple[CacheKey, tuple[int, ...]]] = {}
        self._opened = self.settings_version = 0  # graphs with open sizes, which number their keys; of the last look-up
        # By form, the keys of further graphs for it, which hold for batches of other answers.
        self._answering: dict[CacheKey, list[CacheKey]] = {}
        # What was compiled ahead has settings number 0. An objective whose evaluation was not compiled ahead has no
        # entry, but still a list of versions, which begins with its first capture here.
        ahead = ((True, training.graphs), (False, training.evaluations))
        for in_training, graphs in ahead:
            for name in training.objectives:
                graph = graphs.get(name)
                partition, purpose = None if graph is None else graph.partition, Purpose(name, in_training)
                self._versions[purpose] = SettingsVersions(training, purpose, partition)
                if graph is not None:
                    key = self._form(purpose, batch, 0, graph)
                    self._entries[key] = _Entry(graph)
        self._ahead = frozenset(self._entries)
        main = self._form(Purpose(next(iter(training.objectives)), True), batch, 0)
        self._forms = BatchForms(main.structure, main.signature, batch)
        self._draws: StepDraws | None = None  # of the step that is asked for

    def compiled_for(
        self,
        objective: str,
        batch: Batch,
        training: bool = True,
        replica_local: bool = False,
        draws: StepDraws | None = None,
        request: OutputRequest | None = None,
    ) -> BoundProgram:
        """Return the programs for a batch, bound to this worker: looked up by the batch's form and size, or compiled.

        Where operators are split this is collective on a miss: every worker must ask for the same form at the same
        time.

        Args:
            objective: name of the loss to be computed.
            batch: the whole batch, or this worker's samples of it.
            training: whether in training mode; else in evaluation mode, forward only.
            replica_local: whether replicas take this step without summing gradients with each other.
            draws: numbers of the step, which may decide which way the loss goes; None: no one asks for them.
            request: what is asked for beside the loss; None: an evaluation's metrics, if the objective has any.

        Raises:
            PolylaneError: the plan cannot run this form of batch, or the settings that the user changed.
        """
        self._draws, purpose = draws, Purpose(objective, training, request)
        if purpose not in self._versions:
            self._versions[purpose] = SettingsVersions(self._training, purpose, None)
        # Settings first: they are read from the model as it is now, and may evict graphs of old versions.
        number = self.settings_version = self._versions[purpose].current(self._forget, self._agree)
        form = self._form(purpose, batch, number)
        location, fitted = self._place(form, batch), None
        if location is not None:
            fitted = self._entries[location[0]].fitted.get((batch.samples, location[1], replica_local))
        if fitted is None:
            # Not before: who waits above for others, as in every step, does not compile.
            with self._progress.during(Phase.COMPILING):
                location = location or self._capture(form, batch)
                fitted = self._fit(location[0], batch.samples, location[1], replica_local)
        assert location is not None
        self._entries.move_to_end(location[0])
        return fitted

    def _form(self, purpose: Purpose, batch: Batch, settings: int, graph: CompiledGraph | None = None) -> CacheKey:
        """Return the form of a batch for one purpose; of a new graph, record which leaves it carries."""
        structure = (batch.form or self._example).structure
        if graph is not None:
            self._carried.record(purpose, structure, batch.leaves, graph.partition.graph.code.carried)
        signature = self._carried.sign(purpose, structure, batch.leaves, batch.sampled)
        return CacheKey(purpose, structure, signature, settings)

    def _place(self, form: CacheKey, batch: Batch) -> tuple[CacheKey, tuple[int, ...]] | None:
        """Return the key of the graph that holds for a batch, and the batch's open sizes; None if there is no graph."""
        for key in (form, *self._answering.get(form, ())):
            if key in self._entries and self._answers(key, batch):
                return key, ()
        if form in self._placed and self._answers(self._placed[form][0], batch):
            return self._placed[form]
        family = without_sizes(form.signature)
        for key, entry in self._entries.items():
            opened = entry.graph.partition.graph.code.open
            if opened is None or key.signature[0] != family or key._replace(signature=form.signature) != form:
                continue
            if (sizes := opened.find(batch.leaves)) is not None and self._answers(key, batch):
                if len(self._placed) == PLACED_KEPT:
                    self._placed.clear()
                self._placed[form] = key, sizes
                return key, sizes
        return None

    def _answers(self, key: CacheKey, batch: Batch) -> bool:
        """Return whether a batch answers what the loss asks as the batch did from which a graph was captured."""
        readings = self._entries[key].graph.partition.graph.code.readings
        if not readings:
            return True
        if ask_batches(readings) and not batch.is_whole:
            raise refuse_part(readings)
        return are_answered(readings, batch.leaves, self._draws)

    def bind_ahead(self, replica_local: Sequence[bool]) -> None:
        """Bind what was compiled ahead for training, so that its errors are raised before the first step.

        Args:
            replica_local: the values of ``replica_local`` that steps of this training have.
        """
        for key, entry in self._entries.items():
            for own_way in replica_local if key.purpose.training else ():
                self._bound(key, entry, self._training.plan.microbatches, own_way)

    def __len__(self) -> int:
        """Return the number of graphs in the cache."""
        return len(self._entries)

    def _fit(self, key: CacheKey, samples: int, sizes: tuple[int, ...], replica_local: bool) -> BoundProgram:
        """Compile what is missing for a batch; programs and bindings that exist already are used again."""
        entry = self._entries[key]
        # A short batch may have fewer microbatches (BatchNorm needs several samples in each), so binding comes after.
        bound = self._bound(key, entry, self._training.microbatches_of(samples), replica_local)
        fitted = entry.fitted[samples, sizes, replica_local] = self._compiler.fit_to_samples(bound, samples, sizes)
        if len(entry.fitted) > SIZES_KEPT:
            entry.fitted.popitem(last=False)
        return fitted

    def _capture(self, form: CacheKey, batch: Batch) -> tuple[CacheKey, tuple[int, ...]]:
        """Capture a graph for a batch, with the sizes open that vary where this is possible; return its key, sizes."""
        self._forms.record(form.structure, form.signature, batch)
        purpose = form.purpose, form.settings
        opening = self._forms.find_opening(purpose, form.structure, form.signature, batch)
        main = self._training.graphs[form.purpose.objective].partition.graph.code.readings
        if opening is not None and main and batch.is_whole:  # of other answers none would show that a graph holds
            other_leaves = tuple(leaves for leaves in opening.others if answer_alike(main, leaves, batch.leaves))
            opening = Opening(opening.dims, other_leaves) if other_leaves else None
        if opening is not None:
            try:
                graph = self._captured(form, batch, opening)
            except NotOpened as error:
                self._forms.fail(purpose, form.structure, form.signature, error)
            else:
                opened = graph.partition.graph.code.open
                sizes = None if opened is None else opened.find(batch.leaves)
                assert sizes is not None, "a graph admits the batch from which it was captured"
                self._opened += 1
                form = self._form(form.purpose, batch, form.settings, graph)
                key = form._replace(signature=(without_sizes(form.signature), self._opened))
                self._store(key, graph)
                self._placed[form] = key, sizes
                return key, sizes
        start = time.perf_counter()
        graph = self._captured(form, batch)
        key = form = self._form(form.purpose, batch, form.settings, graph)
        if form in self._entries:  # whose graph holds for other answers
            keys = self._answering.setdefault(form, [])
            key = form._replace(answers=1 + max((entry.answers for entry in keys), default=0))
            keys.append(key)
        self._store(key, graph)
        seconds = time.perf_counter() - start
        if key.answers:
            self._forms.count_answers(graph.partition.graph.code.readings, seconds)
        self._forms.count_single(form.structure, form.signature, seconds)
        return key, ()

    def _captured(self, key: CacheKey, batch: Batch, opening: Opening | None = None) -> CompiledGraph:
        of_example = key == self._form(key.purpose, self._whole, key.settings)
        kind = "a batch like the example" if of_example else "a batch of another form than the example's"
        kind += "" if key.purpose.training else " in evaluation mode"
        form = batch.form or self._example

        def capture(leaves: list[Any]) -> CompiledGraph:
            return self._compiler.capture(key.purpose, form.rebuild(leaves), kind, opening, self._draws)

        graph = capture_of_few(batch, capture)
        readings = graph.partition.graph.code.readings
        if ask_batches(readings) and not batch.is_whole:
            raise refuse_part(readings)
        if not are_answered(readings, batch.leaves):  # a few samples answer otherwise than all of them
            graph = capture(clone_leaves(batch.leaves))
        return graph

    def _store(self, key: CacheKey, graph: CompiledGraph) -> None:
        self._versions[key.purpose].add(key.settings, graph.partition)
        self._entries[key] = _Entry(graph)
        self._make_room()

    def _bound(self, key: CacheKey, entry: _Entry, microbatches: int, replica_local: bool) -> BoundProgram:
        if replica_local not in entry.programs:
            entry.programs[replica_local] = self._compiler.lower(key, entry.graph, replica_local)
        if (microbatches, replica_local) not in entry.bound:
            programs = entry.programs[replica_local]
            entry.bound[microbatches, replica_local] = self._compiler.bind(
                key, entry.graph, programs, microbatches, replica_local
            )
        return entry.bound[microbatches, replica_local]

    def _make_room(self) -> None:
        """Evict the least recently used graph if there are too many; those compiled ahead stay."""
        keys = [key for key in self._entries if key not in self._ahead]
        if len(keys) > FORMS_KEPT:
            self._evict(keys[0])

    def _evict(self, key: CacheKey) -> None:
        del self._entries[key]
        for keys in self._answering.values():
            keys[:] = [kept_key for kept_key in keys if kept_key != key]
        self._placed = {form: placed for form, placed in self._placed.items() if placed[0] != key}

    def _forget(self, purpose: Purpose, settings: int) -> None:
        """Evict all graphs that were captured with one version of the settings, which was evicted itself."""
        for key in [*self._entries]:
            if (key.purpose, key.settings) == (purpose, settings):
                self._evict(key)
