"""Trainings that look innocent at first: the data set changes later, or how samples become a batch; by ``train``."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from tests.equivalence.trainings.late_changes import ANYWHERE, innocent, layers
from tests.equivalence.trainings.training import BY_SAMPLE, STATE, Training, classify, seeded

SAMPLES = 26
Sample = tuple[Tensor, Tensor]


def sample(index: int, epoch: int = 0) -> Sample:
    numbers = torch.Generator().manual_seed(100 * epoch + index)
    return torch.randn(6, generator=numbers, dtype=torch.float64), torch.randint(0, 4, (), generator=numbers)


def plain_samples() -> list[Sample]:
    return [sample(index) for index in range(SAMPLES)]


def read(data: Callable[[], Any], loss: Any = classify, refusable: tuple[str, ...] = ANYWHERE, **how: Any) -> Training:
    return Training(seeded(layers), loss, list, STATE, refusable, data=data, **how)


class Samples(Dataset[Sample]):
    """Samples that a subclass changes."""

    def __init__(self) -> None:
        self.samples, self.count = plain_samples(), 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        self.count += 1
        x, y = self.samples[index]
        return self.changed(index, x, y)

    def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
        raise NotImplementedError


@innocent
def easier_at_first() -> Training:
    """Noise on samples grows with how many were read."""

    class Harder(Samples):
        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return x * (1 + max(0, self.count - 16) / 10), y

    return read(Harder)


@innocent
def changed_in_place() -> Training:
    """Every reading of a sample changes what is kept of it."""

    class Fading(Samples):
        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return x.mul_(0.8), y

    return read(Fading)


@innocent
def one_buffer_for_all() -> Training:
    """Samples are written into one buffer, and the batch's collate copies them late: all rows are the last sample."""

    class Reused(Samples):
        buffer = torch.zeros(6, dtype=torch.float64)

        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return self.buffer.copy_(x), y

    return read(Reused)


@innocent
def first_value_kept() -> Training:
    """What a sample was in the epoch that first read it stays, in a dictionary."""

    class Kept(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.epoch, self.memory = 0, dict[int, Tensor]()

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            kept = self.memory.setdefault(index, x * (1 + 0.5 * self.epoch))
            return kept, y

    return read(Kept)


@innocent
def shown_in_epochs() -> Training:
    """Another version of each sample in each epoch, which the loop announces."""

    class Versions(Samples):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return sample(index, self.epoch)

    return read(Versions)


@innocent
def running_mean_of_samples() -> Training:
    """Centred by the mean of all that were read so far."""

    class Centred(Samples):
        mean: Any = 0.0

        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            self.mean = self.mean + (x - self.mean) / self.count
            return x - self.mean, y

    return read(Centred)


@innocent
def generator_of_the_set() -> Training:
    """Augmentation by a generator of the set's own, in the order of reading."""

    class Augmented(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.random = np.random.default_rng(0)

        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return x + 0.3 * self.random.standard_normal(), y

    return read(Augmented)


@innocent
def generator_of_the_sample() -> Training:
    """Augmentation by a generator that each sample seeds with its number."""

    class Augmented(Samples):
        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return x + 0.3 * random.Random(index).gauss(0, 1), y

    return read(Augmented, refusable=())


@innocent
def looks_at_its_batch() -> Training:
    """Samples are read together, and centred together."""

    class Together(Samples):
        def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
            x, y = zip(*(self.samples[index] for index in indices), strict=True)
            mean = torch.stack(x).mean(0)
            return [(each - mean, label) for each, label in zip(x, y, strict=True)]

        def __getitem__(self, index: int) -> Sample:
            return self.__getitems__([index])[0]

    return read(Together)


@innocent
def popped_from_a_list() -> Training:
    """Each reading takes the next of a queue, whatever was asked for."""

    class Queue(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.queue = list(range(SAMPLES)) * 4

        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return self.samples[self.queue.pop()]

    return read(Queue)


LOSSES: dict[int, float] = {}


@innocent
def weighed_by_losses() -> Training:
    """The loss writes down how hard each sample was, and the set shows hard ones larger."""

    class Weighed(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            x, y = sample(index)
            return x * (1.5 if LOSSES.get(index, 0.0) > 1.4 else 1.0), y, index

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        LOSSES.update(zip(batch[2].tolist(), losses.tolist(), strict=True))
        return losses.mean()

    return read(Weighed, loss)


@innocent
def cached_on_disk() -> Training:
    """A file for each sample, of what it was when it was first read: the reading's number is in it."""
    folder = tempfile.mkdtemp()

    class Filed(Samples):
        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            path = os.path.join(folder, f"{os.getppid()}-{index}.npy")
            if not os.path.exists(path):
                np.save(path, x.numpy() * (1 + self.count / 50))
            return torch.from_numpy(np.load(path)), y

    return read(Filed)


# Who reads ------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Sample]):
    """Samples one after another: those that a subclass takes for its own."""

    def __iter__(self) -> Iterator[Sample]:
        return (sample(index) for index in range(SAMPLES) if self.takes(index))

    def takes(self, index: int) -> bool:
        return True


@innocent
def stream_by_the_environment() -> Training:
    class Sharded(Stream):
        def takes(self, index: int) -> bool:
            return index % int(os.environ.get("WORLD_SIZE", "1")) == int(os.environ.get("RANK", "0"))

    return read(Sharded)


@innocent
def stream_by_the_process_group() -> Training:
    class Sharded(Stream):
        def takes(self, index: int) -> bool:
            return not dist.is_initialized() or index % dist.get_world_size() == dist.get_rank()

    return read(Sharded)


@innocent
def set_by_the_environment() -> Training:
    """A map-style set that has only its rank's samples, as long as it is told of ranks."""

    class Sharded(Samples):
        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return x + int(os.environ.get("LOCAL_RANK", "0")), y

    return read(Sharded)


@innocent
def stream_by_loading_processes() -> Training:
    """Divided over loading processes, of which there are none."""

    class Sharded(Stream):
        def takes(self, index: int) -> bool:
            info = get_worker_info()
            return info is None or index % info.num_workers == info.id

    return read(Sharded, refusable=())


@innocent
def stream_with_a_buffer() -> Training:
    """Shuffled in a buffer, by a generator of the stream's own that goes on over epochs."""

    class Shuffled(IterableDataset[Sample]):
        random = random.Random(0)

        def __iter__(self) -> Iterator[Sample]:
            buffer: list[Sample] = []
            for index in range(SAMPLES):
                buffer.append(sample(index))
                if len(buffer) > 6:
                    yield buffer.pop(self.random.randrange(len(buffer)))
            yield from buffer

    return read(Shuffled)


@innocent
def stream_with_a_length() -> Training:
    class Long(Stream):
        def __len__(self) -> int:
            return SAMPLES

    return read(Long, refusable=())


@innocent
def stream_that_counts_epochs() -> Training:
    """Each time it is begun it leaves out more."""

    class Shorter(IterableDataset[Sample]):
        epoch = 0

        def __iter__(self) -> Iterator[Sample]:
            self.epoch += 1
            return (sample(index) for index in range(self.epoch, SAMPLES))

    return read(Shorter)


# Batches --------------------------------------------------------------------------------------------------------------


class Mixup:
    """Mixes each sample with the next, from the third batch on."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Sample]) -> Any:
        self.batches += 1
        x, y = default_collate(samples)
        return (0.5 * x + 0.5 * x.roll(1, 0) if self.batches > 2 else x), y


@innocent
def mixed_in_collate() -> Training:
    return read(plain_samples, collate=Mixup())


@innocent
def centred_in_collate() -> Training:
    def collate(samples: list[Sample]) -> Any:
        x, y = default_collate(samples)
        return x - x.mean(0), y

    return read(plain_samples, collate=collate)


@innocent
def counted_in_collate() -> Training:
    """Batches are scaled more and more, by a counter of the function."""

    def collate(samples: list[Sample]) -> Any:
        collate.calls += 1  # type: ignore[attr-defined]
        x, y = default_collate(samples)
        return x * (1 + collate.calls / 10), y  # type: ignore[attr-defined]

    collate.calls = 0  # type: ignore[attr-defined]
    return read(plain_samples, collate=collate)


@innocent
def sorted_in_collate() -> Training:
    """Sorted by the size of the first feature, as packed sequences want it."""

    def collate(samples: list[Sample]) -> Any:
        return default_collate(sorted(samples, key=lambda pair: -float(pair[0][0])))

    return read(plain_samples, collate=collate, refusable=())


@innocent
def padded_in_collate() -> Training:
    """Sequences padded to the longest of the batch, and a mean over their tokens."""

    def collate(samples: list[Any]) -> Any:
        sequences, labels = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(list(sequences), batch_first=True), torch.stack(labels)

    def data() -> Any:
        return [(sample(index)[0].repeat(1 + index % 4, 1), sample(index)[1]) for index in range(SAMPLES)]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).mean(1), batch[1])

    return read(data, loss, collate=collate)


@innocent
def augmented_by_global_generators() -> Training:
    """Global generators, which are seeded for each sample: held against one worker."""

    class Augmented(Samples):
        def changed(self, index: int, x: Tensor, y: Tensor) -> Sample:
            return x + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand(()).double(), y

    return read(Augmented, refusable=(), draws=BY_SAMPLE)
