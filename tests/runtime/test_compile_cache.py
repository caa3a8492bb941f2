"""What is compiled belongs to one cache: a step on a batch of a known form looks it up and runs it.

The measure of the first law: distinct source files of polylane that have a call event (``sys.setprofile``) during one
``Job.step`` of one worker, on a batch of a known form and size. The files of ``runtime/transport`` (how bytes travel is
no part of what a step decides) are counted for a worker alone and left out where workers talk. Before there was a
cache a step touched 34 files: the law is half of that, and two for what every step has come to do since: it looks for
hooks on gradients, which users may register at any time (gradient_hooks.py), and blames what an optimizer raises on it
(optimizer.py).
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import pytest
from torch import Tensor, nn

import polylane
from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.compile.sample_shares import Batch
from polylane.graph.capture.open_dimensions import NotOpened, Opening
from polylane.program.program import Program
from polylane.runtime.compile_cache import FORMS_KEPT, CompileCache
from polylane.runtime.data.batch_forms import MANY_FORMS
from polylane.runtime.job import Job
from polylane.runtime.program_binder import CacheKey
from polylane.runtime.state.settings_versions import Purpose
from polylane.runtime.step_result import StepResult
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd, workers

PACKAGE = str(Path(polylane.__file__).parent)
MOST_FILES = 18 + 2  # one of them is the page on which a worker says where it is
# Files that look in every step at what was given, read or called, and compute nothing of it.
CHECKS = {
    "compile/optimizer_sequence.py",  # one optimizer or several
    "graph/batch_checks.py",  # one number of samples in all tensors
    "graph/python_state/captured_settings.py",  # what a script has changed of the model
    "graph/python_state/watched_values.py",
    "graph/sample_lists.py",  # lists with an entry for each sample
    "runtime/data/batch_checks.py",  # all workers have read the same
    "runtime/data/read_digest.py",
    "runtime/sync/required_gradients.py",  # what was frozen or unfrozen
    "runtime/progress/script_calls.py",  # all ranks make the same call
    "runtime/stale_weights.py",  # what a script wrote into weights
    "runtime/state/settings_versions.py",  # what a script has changed of the model, and when
    "runtime/telemetry/observed_steps.py",  # whether this step is measured
    "runtime/telemetry/noise_meter.py",
    "runtime/telemetry/telemetry.py",
}
TRANSPORT = str(Path(PACKAGE, "runtime", "transport"))


def files_called(run: Callable[[], Any], left_out: str) -> set[str]:
    """The source files that a call goes into, without those of a folder."""
    found = set[str]()

    def see(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not name.startswith(left_out):
            found.add(name.removeprefix(PACKAGE + "/"))

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that needs no counts of the whole batch, which a worker would exchange before its first pass."""
    return model(batch[0]).square().mean()


def warm_step(job: Job) -> set[str]:
    """The files of one step on a batch of a form and size that came before."""
    batch = batch_of(8)
    for _ in range(2):
        job.step(batch)
    results = list[StepResult]()
    for _ in range(20):  # one of a few is observed: that is measured by itself, see benchmarks/overhead/observing.py
        left_out = TRANSPORT if job.world.size > 1 else "nothing"
        found = files_called(lambda: results.append(job.step(batch)), left_out)
        if not results[-1].facts:
            break
    return found


@pytest.mark.parametrize("plan", ["microbatches=1", "pipeline=2,microbatches=2"])
def test_a_step_on_a_known_form_calls_into_few_files(plan: str) -> None:
    for rank, found in enumerate(workers(warm_step, mlp(6, 8, 8, 4), plan, loss=square)):
        found -= CHECKS
        assert len(found) <= MOST_FILES, f"rank {rank}: {len(found)} files: {chr(32).join(sorted(found))}"


@pytest.mark.parametrize("plan", ["tensor=2,microbatches=2", "[data=2 | 1]"])
def test_a_step_on_a_known_form_compiles_nothing(plan: str) -> None:
    compiling = (
        "cost/",
        "graph/capture",
        "graph/partition",
        "placement/rewrite",
        "planner/",
        "program/",
        "samples/der",
    )
    for found in workers(warm_step, mlp(6, 8, 8, 4), plan, loss=square):
        assert not [name for name in found if name.startswith(compiling)]


def training(plan: str = "microbatches=2") -> CompiledTraining:
    return compile_training(mlp(6, 4), build_objectives(classify, sgd, None), batch_of(8), plan, evaluation=True)


def test_a_compiled_training_is_frozen() -> None:
    """Forms, sizes and modes come and go: what was compiled ahead is what it was, and nothing in it can be written."""

    def work(job: Job) -> bool:
        before = dict(vars(job._role._prepared))
        for samples in (8, 5, 3):
            job.step(batch_of(samples))
            job.evaluate(batch_of(samples))
        job.step([*batch_of(8)])
        assert len(job._role._cache) == 3  # both modes of the pair, and the list
        return all(before[name] is value for name, value in vars(job._role._prepared).items())

    assert workers(work, mlp(6, 4), "pipeline=1,microbatches=2") == [True]
    made = training()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.in_float64 = True  # type: ignore[misc]
    assert all(isinstance(each, MappingProxyType) for each in (made.objectives, made.graphs, made.evaluations))


class Counting:
    """A compiler that says for each thing that it makes what that is, and what it has captured."""

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph, self.captured, self.bound = graph, list[int](), list[tuple[int, bool]]()
        self.tried = list[Opening]()

    def capture(self, purpose: Purpose, batch: Any, which: str, opening: Any, draws: Any) -> CompiledGraph:
        if opening is not None:
            self.tried.append(opening)
            raise NotOpened("its sizes are fixed")
        self.captured.append(batch[0].shape[1])
        return self.graph

    def lower(self, key: CacheKey, graph: CompiledGraph, replica_local: bool) -> tuple[Program, ...]:
        return ()

    def bind(self, key: CacheKey, graph: Any, programs: Any, microbatches: int, replica_local: bool) -> str:
        self.bound.append((microbatches, replica_local))
        return f"{key.purpose.objective} of {key.signature[0][1][1]}"

    def fit_to_samples(self, bound: str, samples: int, open_sizes: tuple[int, ...]) -> str:
        assert open_sizes == ()
        return f"{samples} samples, {bound}"


def counting() -> tuple[CompileCache, Counting]:
    made = training()
    compiler = Counting(made.graphs["loss"])
    return CompileCache(made, compiler, batch_of(8), lambda setting, file: file), compiler


def of_width(features: int, samples: int = 8) -> Batch:
    return Batch.whole(batch_of(samples, features=features))


def test_each_form_is_captured_once_and_each_size_bound_from_it() -> None:
    cache, compiler = counting()
    cache.bind_ahead([False])
    for features, samples in [(6, 8), (6, 4), (7, 8), (6, 8), (7, 3), (7, 8)]:
        assert cache.compiled_for("loss", of_width(features, samples)) == f"{samples} samples, loss of {features}"
    assert compiler.captured == [7] and compiler.bound == [(2, False)] * 2
    cache.compiled_for("loss", of_width(7), replica_local=True)
    cache.compiled_for("loss", of_width(6), training=False)
    assert compiler.captured == [7] and compiler.bound[2:] == [(2, True), (2, False)]


def test_forms_that_were_not_used_for_long_make_room() -> None:
    cache, compiler = counting()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for features in range(7, 7 + FORMS_KEPT):
            cache.compiled_for("loss", of_width(features))
            assert len(told) == (features >= 6 + MANY_FORMS)
        cache.compiled_for("loss", of_width(7))  # used last: the next one to go is that of 8
        cache.compiled_for("loss", of_width(100))
    assert len(cache) == FORMS_KEPT + 2  # beside both modes of the example's
    assert str(told[0].message).startswith(f"{MANY_FORMS} forms of batches were captured one by one")
    assert "batch[0].shape[1] varies from batch to batch" in str(told[0].message)
    (tried,) = compiler.tried  # sizes that a graph fixes are not tried again
    assert tried.dims == {(0, 1)}
    compiler.captured.clear()
    for features in (6, 7, 100, 8):
        cache.compiled_for("loss", of_width(features))
    assert compiler.captured == [8] and len(cache) == FORMS_KEPT + 2
