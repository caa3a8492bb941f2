"""Saving a checkpoint: which worker writes which rectangle, writing while training, and one outcome for all workers.

Only rank 0 reads the checkpoints' folder; every worker's writer adds one file to the new folder that rank 0 names:

    begin       rank 0 makes a folder | all agree on who writes what | each takes its snapshot, its writer writes
    advance     each reports | when all have written, rank 0 commits | each learns the outcome

Workers call both at the same steps. No worker raises before all know why: a full disk on one of them is an error on
all, and the unfinished folder is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polylane.checkpoint.manifest import ITEM_BYTES, Chunk, Manifest, SavedTensor
from polylane.checkpoint.read_tensors import DTYPE_NAMES
from polylane.checkpoint.store import CheckpointStore
from polylane.errors import PolylaneError, describe_disk_error
from polylane.runtime.checkpoint.snapshot import ShardToWrite, SnapshotWriter, WrittenShards
from polylane.runtime.plain_data.serialization import encode, serializable, to_json
from polylane.runtime.state.held_tensors import WorkerState

Gather = Callable[[Any], list[Any]]  # returns every process's plain value, by rank; a collective of all

# (dtype, shape, whether of complex numbers) of a tensor, as a manifest says it.
_Form = tuple[str, tuple[int, ...], bool]


class WritableRectangle(NamedTuple):
    """A rectangle that a worker could write, in plain values: those of other workers that hold it are equal.

    Attributes:
        name: global name of the tensor.
        shape: shape of the whole tensor.
        dtype: the element type, as safetensors names it.
        offsets: first index of the rectangle in each dimension.
        lengths: length of the rectangle in each dimension.
        is_complex: whether its elements are the parts of complex numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    is_complex: bool

    @property
    def bytes(self) -> int:
        """Size of the rectangle; of an element type that no file has, its number of elements."""
        return math.prod(self.lengths) * ITEM_BYTES.get(self.dtype, 1)


@serializable
@dataclass(frozen=True)
class Position:
    """Where a training is in its data.

    Attributes:
        step: optimizer steps that were made.
        epoch: number of the epoch, from 0, that the next batch is in.
        samples: samples of that epoch that were trained on.

    Examples:
        >>> from polylane.runtime.checkpoint.save import Position
        >>> Position(step=500, epoch=2, samples=3200)  # as of job.position
        Position(step=500, epoch=2, samples=3200)
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


@serializable
@dataclass(frozen=True)
class _Report:
    """One worker's report on the checkpoint that is being written.

    Attributes:
        written: (file, size, seconds, chunks) once its file is on the disk.
        error: why it cannot be; "" for no reason.
        committed: of rank 0: the checkpoint's folder, once it is complete.
    """

    written: tuple[str, int, float, tuple[Any, ...]] | None = None
    error: str = ""
    committed: str = ""


@dataclass
class _UnderWay:
    """A checkpoint that is being written.

    Attributes:
        position: where the training was.
        tensors: form of every tensor that any worker holds, by name.
        plain: every worker's plain state, merged; on rank 0.
        facts: the remaining fields of the manifest.
        folder: the folder without a name yet that all write into.
        written: this worker's file, once it is on the disk.
        error: why it is not.
        committed: the checkpoint's folder; on rank 0.
    """

    position: Position
    tensors: Mapping[str, _Form]
    plain: Mapping[str, Any]
    facts: Mapping[str, Any]
    folder: Path
    written: WrittenShards | None = None
    error: str = ""
    committed: str = ""


class CheckpointSaver:
    """Writes checkpoints of one run; every worker has one, and calls the same methods at the same steps.

    Args:
        root: folder of the run's checkpoints.
        keep: number of newest complete ones that are kept; None: all.
        rank: rank of this process among all.
        gather: returns every process's plain value, by rank.

    Attributes:
        keep: number of newest complete ones that are kept; None: all.
        stall_seconds: time that checkpoints have cost this worker so far.
        newest: folder of the latest complete checkpoint that this run has written; None before.
    """

    def __init__(self, root: Path, keep: int | None, rank: int, gather: Gather) -> None:
        self._root, self.keep, self._rank, self._gather = root, keep, rank, gather
        self._writer = SnapshotWriter()
        self._under_way: _UnderWay | None = None
        # Of the latest distribution: what it was made for, this worker's rectangles, and all tensors.
        self._assignments: tuple[str, list[int], Mapping[str, _Form]] | None = None
        self.stall_seconds = 0.0
        self.newest: Path | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; the same on all workers."""
        return self._under_way is not None

    def begin(self, position: Position, collect: Callable[[], WorkerState], facts: Mapping[str, Any]) -> None:
        """Take the snapshot of a checkpoint; a collective of all processes, none of which is in a step.

        Args:
            position: where the training is.
            collect: returns what this worker adds.
            facts: of the manifest's fields ``plan`` and ``run``.

        Raises:
            PolylaneError: on all workers, if it cannot be begun on one of them.
        """
        started = time.perf_counter()
        assert self._under_way is None  # one at a time: the memory that is shared with the writer holds one snapshot
        folder, error = self._make_folder(position)
        # All are here now: no step is under way, and a server that others wait for has made all updates.
        folder, error = self._gather((folder, error))[0]
        state, refusal = WorkerState(), ""
        try:
            # Also where there is no folder: collecting empties a pipeline, on which later numbers depend.
            state = collect()
        except PolylaneError as refused:  # not raised here: the others wait in the next exchange, and get it there
            refusal = str(refused)
        _raise_first([error], "begun")
        error = refusal
        shards, rectangles = cut_shards(state)
        digest = hashlib.sha256(encode([tuple(rectangle) for rectangle in rectangles])).hexdigest()
        answers = self._gather((error, digest, state.plain if not error else {}))
        try:
            _raise_first([answer[0] for answer in answers], "begun")
        except PolylaneError:  # on all workers: no writer has begun, and the folder is empty
            self._drop(folder)
            raise
        indices, tensors = self._assign("".join(answer[1] for answer in answers), rectangles)
        plain: dict[str, Any] = {}
        # Rank 0 last: of what several workers say, its values count.
        for answer in reversed(answers):
            plain |= answer[2]
        self._under_way = _UnderWay(position, tensors, plain, facts, Path(folder))
        try:
            self._writer.start(folder, f"rank-{self._rank:05d}.safetensors", [shards[i] for i in indices])
        except PolylaneError as refused:  # reported at the next advance, to all
            self._under_way.error = str(refused)
        self.stall_seconds += time.perf_counter() - started

    def _make_folder(self, position: Position) -> tuple[str, str]:
        """Return on rank 0 the folder that is written into, or why there is none."""
        if self._rank:
            return "", ""
        try:
            return str(CheckpointStore(self._root).begin(position.step)), ""
        except OSError as refused:
            return "", f"{self._root} cannot be written: {describe_disk_error(refused)}"

    def _assign(self, digest: str, rectangles: Sequence[WritableRectangle]) -> tuple[list[int], Mapping[str, _Form]]:
        """Return which of its rectangles this worker writes, and all tensors; a collective where workers changed."""
        if self._assignments is None or self._assignments[0] != digest:
            tables = self._gather([tuple(rectangle) for rectangle in rectangles])
            rectangles_by_rank = [[WritableRectangle(*row) for row in table] for table in tables]
            tensors = {
                rectangle.name: (rectangle.dtype, rectangle.shape, rectangle.is_complex)
                for group in rectangles_by_rank
                for rectangle in group
            }
            self._assignments = digest, assign_rectangles(rectangles_by_rank)[self._rank], tensors
        return self._assignments[1:]

    def advance(self, extra: Any = None, wait: bool = False) -> list[Any]:
        """Report to each other; a collective of all processes.

        Args:
            extra: this process's plain value, for all others.
            wait: wait for this worker's file.

        Returns:
            Every process's ``extra``, by rank.

        Raises:
            PolylaneError: on all workers, if the checkpoint could not be written: where, and why.
        """
        started = time.perf_counter()
        answers = self._gather((self._report(wait), extra))
        reports = [answer[0] for answer in answers]
        if self._under_way is not None:
            self._act(reports)
            self.stall_seconds += time.perf_counter() - started
        return [answer[1] for answer in answers]

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; a collective of all processes.

        Raises:
            PolylaneError: for the reasons of :meth:`advance`.
        """
        while self.is_writing:
            self.advance(wait=True)

    def _report(self, wait: bool) -> _Report:
        checkpoint = self._under_way
        if checkpoint is None:
            return _Report()
        if self._writer.is_writing:
            try:
                checkpoint.written = self._writer.wait(None if wait else 0.0)
            except PolylaneError as refused:
                checkpoint.error = str(refused)
        elif self._writer.is_committing:
            try:
                checkpoint.committed = self._writer.wait_committed(None if wait else 0.0) or ""
            except PolylaneError as refused:
                checkpoint.error = str(refused)
        snapshot = checkpoint.written
        written = (
            None if snapshot is None else ((snapshot.file, snapshot.size, snapshot.seconds, tuple(snapshot.chunks)))
        )
        return _Report(written, checkpoint.error, checkpoint.committed)

    def _act(self, reports: Sequence[_Report]) -> None:
        checkpoint = self._under_way
        assert checkpoint is not None
        if any(report.error for report in reports):
            # Others may still be writing into the folder: they are waited for before it is removed. How that ends does
            # not matter any more: the checkpoint is given up.
            with contextlib.suppress(PolylaneError):
                if self._writer.is_writing:
                    self._writer.wait()
            self._gather(None)
            self._under_way = None
            self._drop(str(checkpoint.folder))
            _raise_first([report.error for report in reports], "written")
        if reports[0].committed:
            self.newest, self._under_way = Path(reports[0].committed), None
        elif self._rank == 0 and all(report.written for report in reports) and not self._writer.is_committing:
            try:
                store = CheckpointStore(self._root, self.keep)
                self._writer.start_commit(store, str(checkpoint.folder), self._make_manifest(checkpoint, reports))
            except PolylaneError as refused:
                checkpoint.error = str(refused)

    def _make_manifest(self, checkpoint: _UnderWay, reports: Sequence[_Report]) -> Manifest:
        chunks: dict[str, list[Chunk]] = {}
        files, write_seconds = {}, 0.0
        for report in reports:
            assert report.written is not None
            file, files[file], seconds, entries = report.written
            write_seconds = max(write_seconds, seconds)
            for name, chunk in entries:
                chunks.setdefault(name, []).append(Chunk.model_validate(chunk))
        tensors = {
            name: SavedTensor(
                dtype=dtype,  # type: ignore[arg-type]
                shape=shape,
                chunks=tuple(chunks.get(name, ())),
                is_complex=is_complex,
            )
            for name, (dtype, shape, is_complex) in sorted(checkpoint.tensors.items())
        }
        position, plain = checkpoint.position, dict(checkpoint.plain)
        return Manifest(
            step=position.step,
            epoch=position.epoch,
            samples=position.samples,
            versions={"torch": torch.__version__, "polylane": find_version()},
            weights=plain.pop("weights"),
            plain=to_json(plain),
            files=files,
            tensors=tensors,
            write_seconds=write_seconds,
            **checkpoint.facts,
        )

    def _drop(self, folder: str) -> None:
        if self._rank == 0 and folder:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End this worker's writer; a checkpoint that is being written stays unfinished."""
        self._writer.close()
        if self._under_way is not None:
            self._drop(str(self._under_way.folder))


def _raise_first(errors: Sequence[str], outcome: str) -> None:
    for rank, error in enumerate(errors):
        if error:
            raise PolylaneError(f"the checkpoint was not {outcome}: rank {rank}: {error}")


def cut_shards(state: WorkerState) -> tuple[list[ShardToWrite], list[WritableRectangle]]:
    """Return the rectangles that a worker could write, sorted by name, and their plain descriptions for the others."""
    shards = [
        ShardToWrite(held_tensor, piece)
        for held_tensor in sorted((tensor.as_real() for tensor in state.tensors), key=lambda tensor: tensor.name)
        for piece in held_tensor.region.pieces
    ]
    return shards, [
        WritableRectangle(
            shard.held.name,
            shard.held.region.shape,
            DTYPE_NAMES.get(shard.held.local.dtype, str(shard.held.local.dtype)),
            shard.piece.rectangle.offsets,
            shard.piece.rectangle.shape,
            shard.held.is_complex,
        )
        for shard in shards
    ]


def assign_rectangles(rectangles_by_rank: Sequence[Sequence[WritableRectangle]]) -> list[list[int]]:
    """Return which of its rectangles each worker writes: each is written once, and writers have about equal bytes.

    Args:
        rectangles_by_rank: by rank, the rectangles that a worker could write.

    Returns:
        By rank, indices into its rectangles, ascending.
    """
    holders: dict[WritableRectangle, list[tuple[int, int]]] = {}
    for rank, rectangles in enumerate(rectangles_by_rank):
        for index, rectangle in enumerate(rectangles):
            holders.setdefault(rectangle, []).append((rank, index))
    loads, chosen = [0] * len(rectangles_by_rank), [list[int]() for _ in rectangles_by_rank]
    # The largest first, each to the worker with the fewest bytes so far.
    for rectangle in sorted(holders, key=lambda rectangle: (-rectangle.bytes, rectangle)):
        rank, index = min(holders[rectangle], key=lambda holder: loads[holder[0]])
        loads[rank] += rectangle.bytes
        chosen[rank].append(index)
    return [sorted(indices) for indices in chosen]


def find_version() -> str:
    """Return polylane's version as it was installed, or "not installed" for a source tree that is on the path."""
    try:
        return version("polylane")
    except PackageNotFoundError:  # run from a source tree, as by PYTHONPATH
        return "not installed"
