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
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch, BatchForm
from polylane.errors import PolylaneError
from polylane.graph.batch import CarriedLeaves, clone_leaves
from polylane.graph.capture.open_dimensions import NotOpened, Opening
from polylane.graph.partition import Partition
from polylane.graph.python_state.captured_settings import CapturedSettings
from polylane.graph.python_state.side_effects import SideEffects
from polylane.graph.readings.asked_draws import StepDraws
from polylane.graph.readings.batch_readings import answer_alike, are_answered, ask_batches, refuse_part
from polylane.program.program import Program
from polylane.runtime.data.batch_forms import BatchForms, capture_of_few, without_sizes
from polylane.runtime.program_binder import BoundProgram, CacheKey, ProgramBinder

FORMS_KEPT = 32  # compiled graphs kept at once, least recently used evicted; those compiled ahead do not count
SIZES_KEPT = 64  # sizes of batches for which one graph's programs are kept at once
PLACED_KEPT = 4096  # forms for which it is known which graph with open sizes admits them
SETTINGS_KEPT = 8  # versions of the settings kept at once, for each objective and mode
MANY_SETTINGS = 4  # captures with other settings after which the user is warned


Agree = Callable[[str | None, str | None], str | None]


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

    Attributes:
        sampled: for every leaf of the example, whether it is split with the samples.
        has_common_tensors: whether a tensor of the example is not.
    """

    def __init__(self, training: CompiledTraining, compiler: ProgramBinder, example: Any, agree: Agree) -> None:
        batch, self._agree = Batch.whole(example), agree
        self._training, self._compiler, self._example = training, compiler, BatchForm.of_batch(example)
        self.sampled, self.has_common_tensors = batch.sampled, batch.has_common_tensors
        self._whole, self._carried = batch, CarriedLeaves()
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()
        self._versions: dict[tuple[str, bool], SettingsVersions] = {}
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
                partition = None if graph is None else graph.partition
                self._versions[name, in_training] = SettingsVersions(training, name, in_training, partition)
                if graph is not None:
                    key = self._form(name, in_training, batch, 0, graph)
                    self._entries[key] = _Entry(graph)
        self._ahead = frozenset(self._entries)
        main = self._form(next(iter(training.objectives)), True, batch, 0)
        self._forms = BatchForms(main.structure, main.signature, batch)
        self._draws: StepDraws | None = None  # of the step that is asked for

    def compiled_for(
        self,
        objective: str,
        batch: Batch,
        training: bool = True,
        replica_local: bool = False,
        draws: StepDraws | None = None,
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

        Raises:
            PolylaneError: the plan cannot run this form of batch, or the settings that the user changed.
        """
        self._draws = draws
        # Settings first: they are read from the model as it is now, and may evict graphs of old versions.
        number = self.settings_version = self._versions[objective, training].current(self._forget, self._agree)
        form = self._form(objective, training, batch, number)
        key, sizes = self._place(form, batch) or self._capture(form, batch)
        fitted = self._entries[key].fitted.get((batch.samples, sizes, replica_local))
        if fitted is None:
            fitted = self._fit(key, batch.samples, sizes, replica_local)
        self._entries.move_to_end(key)
        return fitted

    def _form(
        self, objective: str, training: bool, batch: Batch, settings: int, graph: CompiledGraph | None = None
    ) -> CacheKey:
        """Return the form of a batch for one objective and mode; of a new graph, record which leaves it carries."""
        purpose, structure = (objective, training), (batch.form or self._example).structure
        if graph is not None:
            self._carried.record(purpose, structure, batch.leaves, graph.partition.graph.code.carried)
        signature = self._carried.sign(purpose, structure, batch.leaves, batch.sampled)
        return CacheKey(objective, training, structure, signature, settings)

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
            for own_way in replica_local if key.training else ():
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
        purpose = form.objective, form.training, form.settings
        opening = self._forms.find_opening(purpose, form.structure, form.signature, batch)
        main = self._training.graphs[form.objective].partition.graph.code.readings
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
                form = self._form(form.objective, form.training, batch, form.settings, graph)
                key = form._replace(signature=(without_sizes(form.signature), self._opened))
                self._store(key, graph)
                self._placed[form] = key, sizes
                return key, sizes
        start = time.perf_counter()
        graph = self._captured(form, batch)
        key = form = self._form(form.objective, form.training, batch, form.settings, graph)
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
        of_example = key == self._form(key.objective, key.training, self._whole, key.settings)
        kind = "a batch like the example" if of_example else "a batch of another form than the example's"
        kind += "" if key.training else " in evaluation mode"
        form = batch.form or self._example

        def capture(leaves: list[Any]) -> CompiledGraph:
            return self._compiler.capture(key.objective, key.training, form.rebuild(leaves), kind, opening, self._draws)

        graph = capture_of_few(batch, capture)
        readings = graph.partition.graph.code.readings
        if ask_batches(readings) and not batch.is_whole:
            raise refuse_part(readings)
        if not are_answered(readings, batch.leaves):  # a few samples answer otherwise than all of them
            graph = capture(clone_leaves(batch.leaves))
        return graph

    def _store(self, key: CacheKey, graph: CompiledGraph) -> None:
        self._versions[key.objective, key.training].add(key.settings, graph.partition)
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

    def _forget(self, objective: str, training: bool, settings: int) -> None:
        """Evict all graphs that were captured with one version of the settings, which was evicted itself."""
        for key in [*self._entries]:
            if (key.objective, key.training, key.settings) == (objective, training, settings):
                self._evict(key)


@dataclass
class _Version:
    """One version of the settings.

    Attributes:
        number: version number, part of the cache key.
        settings: values of the user's settings at the time of the capture, to be compared with those of now.
        effects: side effects of all captures with these settings; they say which settings the code read.
    """

    number: int
    settings: CapturedSettings
    effects: SideEffects


class SettingsVersions:
    """The versions of the user's settings that one objective was captured with in one mode; 0 is that at the start.

    Args:
        training: the training as it was compiled ahead of the workers.
        objective: name of the loss that is captured.
        in_training: whether in training mode; else in evaluation mode.
        ahead: the partition that was captured before the workers were started; None where there is none.
    """

    def __init__(self, training: CompiledTraining, objective: str, in_training: bool, ahead: Partition | None) -> None:
        self._training, self._objective, self._in_training = training, objective, in_training
        self._losses = training.losses
        self._known: list[_Version] = []  # most recently used first
        self._next = 0
        self._first = None if ahead is None else self.add(0, ahead)

    def current(self, forget: Callable[[str, bool, int], None], agree: Agree) -> int:
        """Return the version number of the settings as they are now; a new number for values not seen before.

        Args:
            forget: called with objective, mode and number of a version that is evicted.
            agree: returns which file all workers take to have changed, see :class:`CompileCache`.

        Raises:
            PolylaneError: they have changed on some workers alone, or the plan cannot follow the change (a parameter
                frozen or unfrozen between steps).
        """
        # The common case, in every step: the version used last is still that of now, and is found first.
        if self._known:
            latest = self._known[0].settings
            change = latest.find_change()
            # One worker's look at files counts for all: another one may look behind the moment of a change.
            changed_file = agree(change, (latest.find_changed_file() or "") if latest.files else None)
            if change is None and not changed_file:
                return self._known[0].number
            for i, version in enumerate(self._known[1:], 1):
                has_same_files = version.settings.files == ({} if changed_file else latest.files)
                if has_same_files and version.settings.find_change() is None:
                    self._known.insert(0, self._known.pop(i))
                    return version.number
            self._see_that_it_can_be(change or changed_file)
        if len(self._known) == SETTINGS_KEPT:
            forget(self._objective, self._in_training, self._known.pop().number)
        return self._next

    def add(self, number: int, partition: Partition) -> CapturedSettings:
        """Record the settings as they are now, with which a graph was captured, under a version number."""
        effects = partition.graph.code.effects or SideEffects()
        version = next((candidate for candidate in self._known if candidate.number == number), None)
        if version is not None:  # captured again for a batch of another form, which may have run other functions
            effects = replace(
                effects.merged_with(version.effects),
                functions_run=effects.functions_run | version.effects.functions_run,
                environment_keys=(*version.effects.environment_keys, *effects.environment_keys),
                files=(*version.effects.files, *effects.files),
            )
            self._known.remove(version)
        # Of this objective alone: another one's leaf reads anew what this graph has frozen.
        leaves = {node.module for node in partition.graph.nodes if node.op == "leaf"}
        settings = CapturedSettings(self._training.model, self._losses, effects, leaves, self._in_training)
        self._known.insert(0, _Version(number, settings, effects))
        self._next = max(self._next, number + 1)
        return settings

    def _see_that_it_can_be(self, change: str | None) -> None:
        if self._next == MANY_SETTINGS:
            warnings.warn(
                f"{change} is another one again: for each of its values the model is captured anew, which takes time; "
                "read from a registered buffer it would be part of the one that is there",
                stacklevel=5,
            )
        if not self._in_training or self._first is None:
            return
        # requires_grad is a setting like any other, for the optimizer holds what is frozen too. But servers have only
        # the weights that were trained at the start, and an asynchronous pipeline keeps versions of these.
        plan, held_names = self._training.plan, self._training.held[self._objective]
        changed = [name for name in self._first.changed_requires_grad() if name in held_names]
        if changed and (plan.is_asynchronous or plan.sync.has_servers):
            word = f"schedule={plan.schedule}" if plan.is_asynchronous else f"servers={plan.sync.server_count}"
            raise PolylaneError(
                f"{word}: {changed[0]} was frozen, or unfrozen, between steps, and what is trained is fixed there from "
                "the first step on: freeze it before the training is prepared, or leave this out of the plan"
            )
