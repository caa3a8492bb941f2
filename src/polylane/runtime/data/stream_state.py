"""Stream state: where an iterable dataset with ``state_dict`` and ``load_state_dict`` is, in checkpoints.

A dataset that says its state is given it again, and reads nothing twice; its random generators go on where they were.
Another one is read from its beginning, and what was trained on already is passed over.
"""

from __future__ import annotations

from typing import Any

import torch

from polylane.graph.python_state.random_generators import States
from polylane.runtime.data.seeded_draws import SeededStream
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.plain_values import from_plain, numpy_state, to_plain


def keeps_state(dataset: Any) -> bool:
    """Return whether an iterable dataset says where it is, and can be put there again."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


class StreamState:
    """The stream that some batches are read from, and the state that a checkpoint had of the one that was trained on.

    Args:
        loaded: the checkpoint's state, and the samples of the epoch that were trained on by then; None: no checkpoint.
    """

    def __init__(self, loaded: tuple[Any, int] | None = None) -> None:
        self._reads: tuple[Any, SeededStream, int] | None = None
        self._loaded = loaded

    def for_other_batches(self) -> StreamState:
        """Return what follows other batches: those of test data are read amid those that are trained on."""
        return StreamState(self._loaded)

    def add_to(self, worker_state: WorkerState, rank: int) -> WorkerState:
        """Add the state to what a worker saves: every worker reads all of a stream, and rank 0 speaks for them."""
        if rank == 0 and (state := self._collect()) is not None:
            worker_state.plain["stream"] = state
        return worker_state

    def _collect(self) -> Any:
        """Return the state behind the latest batch as plain values; None where the dataset does not say it.

        Raises:
            PolylaneError: the dataset's state is of a type that no file has.
        """
        if self._reads is None:  # nothing was trained on since the checkpoint
            return None if self._loaded is None else self._loaded[0]
        if not keeps_state(self._reads[0]):
            return None
        dataset, generators, epoch = self._reads
        with generators:
            state = to_plain(dataset.state_dict(), f"{type(dataset).__name__}.state_dict()")
        torchs, *other_states = generators.states
        return {"epoch": epoch, "dataset": state, "torch": bytes(torchs.numpy()), "others": _to_lists(other_states)}

    def open(self, dataset: Any, generators: SeededStream, epoch: int, skip: int) -> bool:
        """Follow a stream from now on; return whether it was put where it was, so that nothing is passed over.

        Args:
            dataset: the iterable dataset, of which nothing is read yet.
            generators: its random generators, which are put where they were as well.
            epoch: number of the epoch, from 0.
            skip: samples of the epoch that were trained on already.
        """
        self._reads = dataset, generators, epoch
        saved, at = self._loaded or (None, 0)
        if not skip or saved is None or (saved["epoch"], at) != (epoch, skip) or not keeps_state(dataset):
            return False
        dataset.load_state_dict(from_plain(saved["dataset"]))
        generators.states = _from_lists(saved["torch"], saved["others"])
        return True


def _to_lists(states: list[Any]) -> list[Any]:
    python, *numpy = states
    return [python, *((kind, keys.tolist(), *fields) for kind, keys, *fields in numpy)]


def _from_lists(torchs: bytes, other_states: list[Any]) -> States:
    python, *arrays = other_states
    torch_state = torch.frombuffer(bytearray(torchs), dtype=torch.uint8)
    if not arrays:
        return torch_state, python
    return torch_state, python, numpy_state(arrays[0])
