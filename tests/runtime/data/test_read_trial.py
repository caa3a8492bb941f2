"""Workers read their own samples alone where that is what one process would read, and whole batches elsewhere."""

from __future__ import annotations

import itertools
import os
import random
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polylane.compile.sample_shares import compute_shares
from polylane.errors import PolylaneError
from polylane.runtime.data.loader import load_batches
from polylane.runtime.data.read_trial import ReadTrials, try_reads
from polylane.runtime.data.sample_order import sample_order

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), torch.arange(24)


class Plain:
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


class Counting(Plain):
    """Samples get harder with every one that was read."""

    read = 0

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return X[i] * (1 + self.read / 10), Y[i]


SEEN = itertools.count()


class GlobalCounter(Plain):
    def __getitem__(self, i: int) -> Any:
        return X[i] + next(SEEN), Y[i]


class OwnGenerator(Plain):
    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)

    def __getitem__(self, i: int) -> Any:
        return X[i] + float(self.draws.random()), Y[i]


class LateCounter(Plain):
    """Counts what it has read; that shows in the samples much later."""

    read = 0

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return X[i] * (1 + self.read // 10_000), Y[i]


class ChangesItsSamples(Plain):
    def __init__(self) -> None:
        self.x = X.clone()

    def __getitem__(self, i: int) -> Any:
        return self.x[i].mul_(1.5), Y[i]


class Centred(Plain):
    """Fetches a batch at once, and looks at all of it."""

    def __getitems__(self, indices: list[int]) -> Any:
        x = X[indices]
        return list(zip(x - x.mean(0), Y[indices], strict=True))


class Ranked(Plain):
    """Two samples of one batch depend on each other's order."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(X[i], Y[i] + place) for place, i in enumerate(indices)]


class NextOfFile(Plain):
    """Reads on in an open file, whatever it is asked for."""

    def __init__(self, folder: Path) -> None:
        (folder / "numbers").write_bytes(bytes(range(200)))
        self.file = os.open(folder / "numbers", os.O_RDONLY)

    def __getitem__(self, i: int) -> Any:
        return X[i] + os.read(self.file, 1)[0], Y[i]


class Cached(Plain):
    def __init__(self) -> None:
        self.known = dict[int, Any]()

    def __getitem__(self, i: int) -> Any:
        if i not in self.known:
            self.known[i] = X[i] * 2, Y[i]
        return self.known[i]


class Opened(Plain):
    file: Any = None

    def __getitem__(self, i: int) -> Any:
        self.file = self.file or object()
        return X[i], int(Y[i])


class Augmented(Plain):
    """Draws from the global generators, which are seeded for each sample."""

    def __getitem__(self, i: int) -> Any:
        return X[i] + torch.rand(()) + random.random() + float(np.random.rand()), Y[i]


class Raising(Plain):
    def __getitem__(self, i: int) -> Any:
        raise RuntimeError("not here")


def part_of(dataset: Any, collate: Any = None, replica: int = 1, **options: Any) -> Any:
    """The first batch, as a worker reads it that computes on half of it."""
    shares = lambda n: compute_shares(n, 1, 2, replica)  # noqa: E731
    return next(load_batches(dataset, 6, shares=shares, collate=collate, trials=ReadTrials(False), **options))


STATEFUL = [Counting, GlobalCounter, OwnGenerator, LateCounter, ChangesItsSamples]


@pytest.mark.parametrize("make", [*STATEFUL, Centred, Ranked, NextOfFile])
def test_whole_batches_as_one_process_reads_them(make: Any, tmp_path: Path) -> None:
    dataset, plain = (make(tmp_path) if make is NextOfFile else make() for _ in range(2))
    global SEEN
    SEEN = itertools.count()
    batch = part_of(dataset)
    order = sample_order(24, 0, 0)[:6]
    SEEN = itertools.count()
    samples = plain.__getitems__(order) if hasattr(plain, "__getitems__") else [plain[i] for i in order]
    assert batch.is_whole and batch.offsets is None
    for leaf, values in zip(batch.leaves, zip(*samples, strict=True), strict=True):
        assert torch.equal(leaf, torch.stack(values))


@pytest.mark.parametrize("make", [Plain, Cached, Opened, Augmented, lambda: torch.utils.data.TensorDataset(X, Y)])
def test_parts_that_are_those_of_the_whole(make: Any) -> None:
    batch = part_of(make())
    whole = next(load_batches(make(), 6, shares=lambda n: compute_shares(n, 1, 1, 0)))
    assert not batch.is_whole and len(batch.leaves[0]) == 3
    for part, leaf in zip(batch.leaves, whole.leaves, strict=True):
        assert torch.equal(part, leaf[3:])


def pad(samples: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.stack(
        [y for _, y in samples]
    )


def mix(samples: list[Any]) -> Any:
    x = torch.stack([x for x, _ in samples])
    return x + x.flip(0), torch.stack([y for _, y in samples])


def longest(samples: list[Any]) -> Any:
    return *torch.utils.data.default_collate(samples), max(int(y) for _, y in samples)


@pytest.mark.parametrize(
    ("collate", "samples", "whole"),
    [
        (pad, [(torch.ones(1 + i % 4), Y[i]) for i in range(24)], True),
        (pad, Plain(), False),
        (mix, Plain(), True),
        (longest, Plain(), True),
        (torch.utils.data.default_collate, Plain(), False),
    ],
)
def test_collate(collate: Any, samples: Any, whole: bool) -> None:
    assert part_of(samples, collate).is_whole is whole


def test_a_trial_leaves_files_where_others_have_them_meanwhile(tmp_path: Path) -> None:
    """A log that another thread writes, and files that threads read, go on from where they were when it ends."""
    (tmp_path / "numbers").write_bytes(bytes(range(200)))
    modes = {"log": os.O_WRONLY | os.O_CREAT, "numbers": os.O_RDONLY, "table": os.O_RDWR | os.O_CREAT}
    files = {name: os.open(tmp_path / name, mode) for name, mode in modes.items()}
    (begun, begin), (ended, end), signals = os.pipe(), os.pipe(), [b"."]

    def read() -> list[Any]:
        if signals:  # the first time, in another process: the thread here reads and writes now
            os.write(begin, signals.pop())
            os.read(ended, 1)
        os.lseek(files["numbers"], 0, os.SEEK_SET)
        return [torch.tensor(list(os.read(files["numbers"], 3)))]

    def work_meanwhile() -> None:
        os.read(begun, 1)
        os.write(files["log"], b"a line\n")
        os.write(files["table"], b"a row\n")
        os.read(files["numbers"], 10)
        os.write(end, b".")

    thread = threading.Thread(target=work_meanwhile)
    thread.start()
    assert not try_reads(read, None, [Plain()], None).reason
    thread.join()
    assert [os.lseek(file, 0, os.SEEK_CUR) for file in files.values()] == [7, 10, 6]
    for descriptor in (*files.values(), begun, begin, ended, end):
        os.close(descriptor)


def test_files_that_reading_writes_are_named(tmp_path: Path) -> None:
    """A file named by the process is another one in each worker, and in a trial."""

    class Filed(Plain):
        def __getitem__(self, i: int) -> Any:
            path = tmp_path / f"{os.getpid()}-{i}.npy"
            if not path.exists():
                np.save(path, X[i].numpy())
            return torch.from_numpy(np.load(path)), Y[i]

    def find(dataset: Any, tells: bool = True) -> None:
        ReadTrials(tells).find(dataset, lambda indices: [dataset[i] for i in indices], range(4), [0, 1], None)

    with pytest.warns(UserWarning, match=rf"writes files \({tmp_path}/\d+-0.npy\), which workers share"):
        find(Filed())
    with warnings.catch_warnings(action="error"):
        find(Filed(), tells=False)
        find(Plain())


def test_what_cannot_be_tried_is_read_whole() -> None:
    reads = try_reads(lambda: [Raising()[0]], None, [Raising()], None)
    assert "could not be read in another process" in reads.reason and not reads.keeps_state


@pytest.mark.parametrize("make", STATEFUL)
def test_state_is_not_in_checkpoints(make: Any) -> None:
    part_of(Plain(), skip=6, resumed=True)
    with pytest.raises(PolylaneError, match="cannot resume from a checkpoint, which has no state of the dataset"):
        part_of(make(), skip=6, resumed=True)


def test_each_dataset_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, tried, dataset = ReadTrials(False), list[int](), Plain()
    monkeypatch.setattr(os, "fork", lambda fork=os.fork: tried.append(1) or fork())
    for _ in range(3):
        trials.find(dataset, lambda indices: [dataset[i] for i in indices], [3, 1, 2], [0], None)
    trials.find([1, 2, 3], lambda indices: list(indices), [0, 1, 2], [0], None)
    assert len(tried) == 1


def test_a_reason_that_training_and_test_data_share_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    trials = ReadTrials()

    class Unlike(Plain):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("no sample can be read alone")

    for dataset in (Unlike(), Unlike()):
        trials.find(dataset, lambda indices, d=dataset: [d[i] for i in indices], [3, 1, 2], [0], None)  # type: ignore[misc]
    assert sum("every worker reads whole batches" in str(note.message) for note in recwarn.list) == 1


def test_streams_that_go_on_where_they_were() -> None:
    class Resuming:
        def __init__(self) -> None:
            self.left = iter(range(100))

        def __iter__(self) -> Iterator[int]:
            return self.left

    class Fresh:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(X)

    for stream, keeps in ((Resuming(), True), (Fresh(), False)):
        assert try_reads(lambda of=stream: list(itertools.islice(of, 4)), None, [stream], None).keeps_state is keeps
