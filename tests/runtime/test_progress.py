"""What a worker writes of where it is, as a watch reads it; and who of a script's workers are watched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from polylane.diagnosis.culprit import RankState, Wait
from polylane.diagnosis.judgement import RankRecord, judge
from polylane.diagnosis.page_layout import Phase, pack_wait
from polylane.errors import PeerLost, PolylaneError, WorkerHung
from polylane.runtime import progress_page
from polylane.runtime.job import Job
from polylane.runtime.progress import script_calls
from polylane.runtime.progress.page_reader import PageReader
from polylane.runtime.progress.script_watch import watch_script
from polylane.runtime.progress_page import USUAL_DECAY, ProgressMemory, ProgressWriter
from polylane.runtime.workers.world import World
from tests.support.workers.training import batch_of, mlp, workers

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), backend=None)


@pytest.fixture
def memory() -> ProgressMemory:
    return ProgressMemory.allocate()


def test_batches_are_loaded_in_a_phase_of_their_own_and_then_the_one_before_goes_on(memory: ProgressMemory) -> None:
    progress, reader, seen = ProgressWriter(memory, 0), PageReader(0, memory), list[Phase]()

    def load() -> Iterator[int]:
        seen.append(reader.record.phase)
        yield 1
        raise ValueError

    progress.enter(Phase.SCRIPT)
    batches = progress.loading(load())
    next(batches)
    seen.append(reader.record.phase)
    with pytest.raises(ValueError):
        next(batches)
    assert [*seen, reader.record.phase] == [Phase.LOADING, Phase.SCRIPT, Phase.SCRIPT]
    progress.serve()
    progress.enter(Phase.SCRIPT)
    assert reader.record.phase is Phase.SERVING


def test_what_is_loaded_for_a_test_is_a_part_of_the_test(memory: ProgressMemory) -> None:
    progress, reader, seen = ProgressWriter(memory, 0), PageReader(0, memory), list[Phase]()

    def load() -> Iterator[int]:
        seen.append(reader.record.phase)
        time.sleep(0.05)
        yield 1

    progress.enter(Phase.TRAINING)
    for phase in (Phase.EVALUATING, Phase.SAVING):
        before = progress.phase_seconds(phase), progress.phase_seconds(Phase.LOADING)
        with progress.during(phase), progress.during(Phase.COMPILING):
            list(progress.loading(load()))
        assert progress.phase_seconds(phase) - before[0] > 0.05
        assert progress.phase_seconds(Phase.LOADING) == before[1] and progress.phase_seconds(Phase.COMPILING) == 0
    assert seen == [Phase.LOADING] * 2  # who watches a hang sees what it does
    list(progress.loading(load()))
    assert progress.phase_seconds(Phase.LOADING) > 0.05


def test_who_waits_for_earlier_steps_of_others_is_in_a_step_and_does_not_compile() -> None:
    def train(job: Job) -> float:
        progress = ProgressWriter(ProgressMemory.allocate(), job.world.rank)
        job.worker.world = replace(job.world, progress=progress)
        job.worker._cache._progress = progress  # type: ignore[union-attr]
        progress.enter(Phase.TRAINING)
        for step in range(8):
            job.step(batch_of(8, step))
            time.sleep(0.1 * job.world.rank)
            if step == 2:
                before = progress.phase_seconds(Phase.COMPILING)
        return progress.phase_seconds(Phase.COMPILING) - before

    assert max(workers(train, mlp(6, 8, 4), "data=2")) < 0.15


def test_lines_of_two_jobs_of_a_script_are_two(memory: ProgressMemory) -> None:
    progress, reader = ProgressWriter(memory, 0), PageReader(0, memory)
    first, second = progress.add_line("0: 0, 1", (0, 1)), progress.add_line("0: 0, 1", (0, 1))
    assert first is not None and second is not None
    for line in (first, second, second):
        number = progress.begin_operation(line)
    progress.begin_wait(second, number)
    notes = reader.notes()
    assert notes is not None
    state = reader.state(notes)
    assert sorted(state.begun.values()) == [1, 2] and state.wait is not None
    assert state.begun[state.wait.line] == state.wait.number == 2


def test_who_loses_a_worker_that_was_hung_says_so_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, hung = PeerLost(1, "receiving from", "closed"), WorkerHung((1,), "rank 1 stands still", "the stack")
    monkeypatch.setattr(script_calls, "ANSWER_SECONDS", 0.05)
    for is_script in (False, True):
        memory = ProgressMemory.allocate()
        progress = ProgressWriter(memory, 0, is_script=is_script)
        assert progress.explain(lost) is lost
        PageReader(0, memory).tell(hung)
        explained = progress.explain(lost)
        assert str(explained) == str(hung if is_script else lost)


@pytest.mark.parametrize(
    ("on_hang", "hang_after", "said"),
    [
        ("restart", None, "on_hang: expected 'stop', 'wait' or None, not 'restart'"),
        ("stop", 0, "hang_after: expected a number of seconds above 0, not 0"),
        ("stop", "10", "hang_after: expected a number of seconds above 0, not '10'"),
        (None, float("nan"), "hang_after: expected a number of seconds above 0, not nan"),
    ],
)
def test_wrong_options_are_refused(on_hang: object, hang_after: object, said: str) -> None:
    with pytest.raises(PolylaneError, match=said):
        watch_script(ALONE, on_hang, hang_after)  # type: ignore[arg-type]


def test_a_single_worker_is_not_watched() -> None:
    assert watch_script(ALONE, "stop", None) is ALONE


def test_the_second_step_may_take_as_long_as_the_first(memory: ProgressMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose program ran for the first time, which takes longer; from the next step on that one counts alone."""
    progress, reader, moment = ProgressWriter(memory, 0), PageReader(0, memory), [1]
    monkeypatch.setattr(time, "monotonic_ns", lambda: moment[0])
    usual = []
    for step, (seconds, is_new) in enumerate([(30, True), (12, False), (2, False), (1, False)]):
        progress.begin_round(0, step, is_new)
        usual.append(reader.record.usual / 1e9)
        moment[0] += seconds * 10**9
    assert usual == [0, 30, 12, pytest.approx(12 * USUAL_DECAY)]


class DeviceWork:
    """An operation that a device has been given."""

    def __init__(self) -> None:
        self.is_ended = False

    def is_completed(self) -> bool:
        return self.is_ended


def test_what_a_device_waits_for_is_what_its_worker_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL the host goes on, and stands still where it reads a loss: who is late in its loader is not hung yet."""
    monkeypatch.setattr(progress_page, "BEAT_SECONDS", 0.01)
    ranks, readers, works = (0, 1, 2), list[PageReader](), list[DeviceWork]()
    for rank in ranks:
        memory = ProgressMemory.allocate()
        progress, work = ProgressWriter(memory, rank), DeviceWork()
        line = progress.add_line("0: 0, 1, 2", ranks)
        assert line is not None
        for number in (1, 2) if rank != 1 else (1,):
            word = pack_wait(line, progress.begin_operation(line))
            # The first sum has ended everywhere, the second one waits for rank 1.
            progress.follow_device(word, work if number == 2 else ended())
        progress.enter(Phase.LOADING if rank == 1 else Phase.TRAINING)
        readers.append(PageReader(rank, memory))
        works.append(work)

    def states() -> list[RankState]:
        time.sleep(0.2)
        return [reader.state(notes) for reader in readers if (notes := reader.notes()) is not None]

    waits = [state.wait for state in states()]
    assert waits == [Wait("0: 0, 1, 2", 2, ranks), None, Wait("0: 0, 1, 2", 2, ranks)]
    records = [
        RankRecord(rank, state, phase=reader.record.phase, stalled=12.0, bound=570.0 if rank == 1 else 9.0)
        for rank, (state, reader) in enumerate(zip(states(), readers, strict=True))
    ]
    judgement = judge(records)
    assert judgement.finding.culprits == (1,) and not judgement.is_hang
    for work in works:
        work.is_ended = True
    assert not any(state.wait for state in states())


def ended() -> DeviceWork:
    work = DeviceWork()
    work.is_ended = True
    return work
