"""Checkpoints of a job: saved by all workers together, and loaded, with the position in the data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump
from polylane.runtime.checkpoint.call_arguments import check_keep, parse_folder
from polylane.runtime.checkpoint.load import LoadedCheckpoint, load_checkpoint
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.data.stream_state import StreamState
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World


class JobCheckpoints:
    """What a :class:`polylane.Job` saves of itself, and resumes from."""

    plan: Plan
    world: World
    settle_audit: Callable[[], None]
    _role: Any
    _rank: int
    _position: Position
    _stream: StreamState
    _choices: Mapping[str, Any]
    _savers: dict[Path, CheckpointSaver]

    @property
    def position(self) -> Position:
        """Number of completed steps, and the position in the data after the batch of the last step.

        Examples:
            >>> job.position
            Position(step=41, epoch=9, samples=64)
        """
        return self._position

    @collective("job.save_checkpoint")
    def save_checkpoint(self, folder: str | Path, *, keep: int | None = None, wait: bool = True) -> None:
        """Save a checkpoint, from which any plan of the same model can resume; collective.

        The checkpoint is a folder such as ``step-00000500`` inside ``folder``; it is complete once its manifest exists.

        Args:
            folder: folder for the checkpoints of this run.
            keep: number of checkpoints to keep; older ones are deleted. Default: all.
            wait: wait until it is complete. Otherwise it is complete before the next one, or after ``close``.

        Raises:
            PolylaneError: on every worker, if it cannot be written; earlier checkpoints are kept.

        Examples:
            >>> job.save_checkpoint("checkpoints", keep=3)
        """
        saver = self.open_saver(parse_folder("save_checkpoint", folder), keep)
        saver.finish()
        self.begin_checkpoint(saver)
        if wait:
            saver.finish()

    def begin_checkpoint(self, saver: CheckpointSaver, run: Mapping[str, Any] | None = None) -> None:
        """Take the snapshot of a checkpoint, which is then written in the background; collective.

        Args:
            saver: saver of :meth:`open_saver` that is not writing another checkpoint.
            run: facts about the run, which :meth:`load_checkpoint` returns.

        Raises:
            PolylaneError: on every worker, if it cannot be started.
        """
        self.settle_audit()
        facts, role = {"plan": dump(self.plan), "run": {**self._choices, **(run or {})}}, self._role
        saver.begin(self._position, lambda: self._stream.add_to(role.collect_state(), self._rank), facts)

    def open_saver(self, folder: Path, keep: int | None) -> CheckpointSaver:
        """Return the saver of a folder of checkpoints, which keeps ``keep`` of them; the job closes it."""
        saver = self._savers.setdefault(folder, CheckpointSaver(folder, keep, self._rank, self._role.exchange))
        saver.keep = check_keep(keep)
        return saver

    @collective("job.load_checkpoint")
    def load_checkpoint(self, path: str | Path, *, warn: Callable[[str], None] = warnings.warn) -> LoadedCheckpoint:
        """Resume from a checkpoint, whichever plan wrote it; collective, before the first step.

        Args:
            path: a checkpoint folder, or a folder of checkpoints, whose newest complete one is loaded.
            warn: called on rank 0 if other parameters are trained than in the checkpoint, or clipping differs.

        Returns:
            What was loaded. ``job.batches(..., start=job.position)`` resumes the data.

        Raises:
            PolylaneError: on every worker, if there is none, or it is damaged or of another model.

        Examples:
            >>> other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
            >>> sgd = torch.optim.SGD(other.parameters(), lr=0.5)
            >>> with polylane.parallelize(other, loss, sgd, example=example, plan="data=2", alone=True) as resumed:
            ...     loaded = resumed.load_checkpoint("checkpoints")
            ...     for batch in resumed.batches(dataset, batch_size=16, epochs=11, start=resumed.position):
            ...         result = resumed.step(batch)
            >>> loaded.folder.name, result.step
            ('step-00000041', 44)
        """
        folder = parse_folder("load_checkpoint", path)
        loaded = load_checkpoint(folder, self._rank, self._role.exchange, self._role.restore_state)
        loaded.tell_changes(self._choices, self._rank, warn)
        self._position = loaded.position
        self._stream = StreamState((loaded.plain.get("stream"), loaded.position.samples))
        return loaded
