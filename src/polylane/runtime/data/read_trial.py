"""Read trial: may a worker read its own samples alone, or does what a dataset gives depend on what else is read?

A dataset may count what was read of it, look at the whole batch in ``__getitems__``, or a collate may mix samples. Its
first batch is read in a forked process, from which nothing comes back but the answer: there it is read whole, whole
again, and in part. Samples that are not the same, or state of the user's Python that still changes, show that all
workers must read whole batches, in the order in which one process would.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import select
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten
from polylane.graph.python_state.state import PythonName, find_python_names
from polylane.graph.python_state.state_snapshots import StateDigests, snapshot_names
from polylane.runtime.data.sample_errors import find_difference

# A batch takes milliseconds to read, or seconds; what takes longer hangs in the fork (a lock that a thread held there),
# or is too slow to be read three times. Then whole batches are read, which is right for any dataset.
TRIAL_SECONDS = 60

_LARGE = 1 << 20  # bytes of an array that is not digested: samples that it changes are compared themselves


# Positions in a batch, and a function that reads their samples alone.
InPart = tuple[Sequence[int], Callable[[], list[Any]]]


@dataclass(frozen=True)
class Reads:
    """How a dataset may be read.

    Attributes:
        reason: why whole batches must be read, as a part of a sentence; empty: each worker may read its own samples.
        keeps_state: whether what is read depends on what was read before.
        written: a file that reading writes; "" for none.
    """

    reason: str = ""
    keeps_state: bool = False
    written: str = ""

    def refuse_to_resume(self) -> None:
        """Refuse to resume from a checkpoint, which does not have the state of the dataset.

        Raises:
            PolylaneError: the dataset keeps state.
        """
        if self.keeps_state:
            raise PolylaneError(
                f"training cannot resume from a checkpoint, which has no state of the dataset: {self.reason}; let "
                "its samples depend on their index and on set_epoch(epoch) alone"
            )


class ReadTrials:
    """The trials of one worker, each made once for a dataset.

    Args:
        tells: whether this worker says why whole batches are read; one of all does.
    """

    def __init__(self, tells: bool = True) -> None:
        self._tells, self._known = tells, list[tuple[Any, Any, Reads]]()
        self._told = set[str]()  # reasons, which training and test data share for the most part

    def find(
        self,
        dataset: Any,
        read: Callable[[Sequence[int]], list[Any]],
        batch: Sequence[int],
        positions: Sequence[int],
        collate: Any,
    ) -> Reads:
        """Return how a dataset may be read, by a trial on its first batch.

        Args:
            dataset: the user's map-style dataset, by which the trial is remembered.
            read: returns the samples of some indices.
            batch: indices of the batch.
            positions: positions in the batch of the samples that this worker would read.
            collate: the user's function from samples to a batch; None: torch's.
        """
        for known_dataset, of, reads in self._known:
            if known_dataset is dataset and of is collate:
                return reads
        if type(dataset) in (list, tuple) and collate is None:
            return Reads()
        in_part = positions, lambda: read([batch[i] for i in positions])
        reads = try_reads(lambda: read(batch), in_part, [dataset], collate)
        self._known = [*self._known[-3:], (dataset, collate, reads)]
        if reads.reason and self._tells and len(positions) < len(batch) and reads.reason not in self._told:
            self._told.add(reads.reason)
            warnings.warn(f"every worker reads whole batches, for {reads.reason}", stacklevel=4)
        if reads.written and self._tells and reads.written not in self._told:
            self._told.add(reads.written)
            warnings.warn(
                f"reading the dataset writes files ({reads.written}), which workers share and a trial of the first "
                "batch leaves behind: let what is in them depend on the sample alone, and not on who reads it when",
                stacklevel=4,
            )
        return reads


def try_reads(read: Callable[[], list[Any]], in_part: InPart | None, datasets: Sequence[Any], collate: Any) -> Reads:
    """Read a batch whole twice, then some of its samples, in a forked process; return what that shows.

    Args:
        read: returns the samples of a batch.
        in_part: positions in the batch, and a function that returns their samples and reads no others; None: that is
            not asked for.
        datasets: what is read, whose Python state is watched.
        collate: the user's function from samples to a batch; None: torch's.
    """
    reports, report = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child starts none
        child = os.fork()
    if child == 0:
        _run_child(lambda: _compare_reads(read, in_part, datasets, collate), report)
    os.close(report)
    answer = b""
    if select.select([reports], [], [], TRIAL_SECONDS)[0]:
        answer = os.read(reports, 4096)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reports)
    if not answer:
        return Reads("its first batch could not be read in another process, to see that samples may be read alone")
    answer_line, _, written = answer.decode(errors="replace").partition("\n")
    kind, _, reason = answer_line.partition(" ")
    return Reads(reason, kind == "state", written)


def _reopen_files() -> None:
    """Open all files that this process may read anew, where they are: their positions are its parent's, too.

    Raises:
        OSError: a file cannot be opened a second time.
    """
    names = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()
    for descriptor in map(int, names):
        try:
            flags, status = fcntl.fcntl(descriptor, fcntl.F_GETFL), os.fstat(descriptor)
        except OSError:  # that of the list of names itself
            continue
        # A pipe has no position; to a file that is only written the parent may be writing at this moment.
        if not stat.S_ISREG(status.st_mode) or flags & os.O_ACCMODE == os.O_WRONLY:
            continue
        opened = os.open(f"/proc/self/fd/{descriptor}", flags & (os.O_ACCMODE | os.O_APPEND))
        os.lseek(opened, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(opened, descriptor, os.get_inheritable(descriptor))
        os.close(opened)


def _run_child(compare: Callable[[], str], report: int) -> None:
    """Run a comparison in the forked process, report its answer, and end; what the dataset prints is not seen."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(TRIAL_SECONDS)  # also where the parent has died
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        _reopen_files()
        torch.set_num_threads(1)  # the pool of threads is the parent's
        opened = _watch_writes()
        comparison = " ".join(compare().splitlines())
        written = (path for path in opened if os.path.isfile(path) and "__pycache__" not in path)
        os.write(report, f"{comparison}\n{next(written, '')}".encode(errors="replace")[:4096])
    finally:
        os._exit(0)  # whatever was raised: no answer is one


def _watch_writes() -> dict[str, None]:
    """Return a dict to which the paths are added that this process opens to write, until it ends."""
    written = dict[str, None]()

    def note_opening(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or arguments[0].startswith(("/dev/", "/proc/")):
            return
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            written[arguments[0]] = None

    sys.addaudithook(note_opening)
    return written


def _compare_reads(read: Callable[[], list[Any]], in_part: InPart | None, datasets: Sequence[Any], collate: Any) -> str:
    """Return "alone", or "state" or "batch" with the reason why samples may not be read alone."""
    samples = read()
    batch = None if collate is None else collate(samples)
    kept_batch = None if collate is None else _clone(batch)
    # What changes at the first read only (a file that is opened, a cache) is none of the dataset's state.
    old_state = _state_of(datasets, collate)
    copies = [_clone(sample) for sample in samples]
    second_samples = read()
    made_again = None if collate is None else collate(second_samples)
    new_state = _state_of(datasets, collate)
    if changed := [
        label for key, (label, digest) in old_state.items() if new_state.get(key, (label, digest))[1] != digest
    ]:
        return f"state reading the dataset changes {changed[0]}"
    if not _are_alike(copies, second_samples):
        return "state the dataset gives other samples when they are read again"
    if not _are_alike([kept_batch], [made_again]):
        return "state collate makes another batch of the same samples"
    if in_part is None:
        return "alone"
    if collate is not None and any(find_difference(samples[0], sample, "") for sample in samples[1:]):
        return "batch samples differ in size, and collate makes one batch of all of them"
    positions, part = in_part[0], in_part[1]()
    if not _are_alike([copies[i] for i in positions], part):
        return "batch the dataset gives other samples where fewer are read with them"
    if collate is not None and not _are_rows(batch, collate(part), positions, len(samples)):
        return "batch collate gives samples otherwise where fewer are collated with them"
    return "alone"


def keep_state(datasets: Sequence[Any], collate: Any) -> Callable[[], None]:
    """Record the state of the user's Python that reading may change; return a function that restores it.

    Args:
        datasets: what is going to be read.
        collate: the user's function from samples to a batch; None: torch's.
    """
    names, large = _names_of(datasets, collate)
    return snapshot_names(names, large)


def _state_of(datasets: Sequence[Any], collate: Any) -> dict[tuple[int, str], tuple[str, Any]]:
    """Return labels and digests of what the user's Python can reach from reading, by owner and name."""
    names, large = _names_of(datasets, collate)
    digests = StateDigests(large)
    return {name.key: (name.label, digests.of(name.get())) for name in names}


def _names_of(datasets: Sequence[Any], collate: Any) -> tuple[list[PythonName], set[int]]:
    """Return the names that reading can reach, and the ids of large arrays among their values."""
    # Commands wrap the user's function, to blame it for what it raises.
    roots, todo = [collate and inspect.unwrap(collate)], list(datasets)
    while todo:  # of a library's class that wraps it too
        dataset = todo.pop()
        roots += [getattr(dataset, name, None) for name in ("__getitem__", "__getitems__", "__iter__")]
        roots.append(dataset)
        inner = getattr(dataset, "datasets", ())
        todo += [dataset.dataset] if hasattr(dataset, "dataset") else []
        todo += inner if isinstance(inner, list | tuple) else []
        roots += [getattr(dataset, name, None) for name in ("transform", "target_transform", "transforms")]
    names = find_python_names([], [root for root in roots if root is not None])
    values = [name.get() for name in names]
    return names, {id(v) for v in values if isinstance(getattr(v, "nbytes", None), int) and v.nbytes > _LARGE}


def _clone(sample: Any) -> Any:
    """Return a sample with tensors of its own: the dataset may write into those that it has given."""
    leaves, rebuild = flatten(sample)
    return rebuild([leaf.clone() if isinstance(leaf, Tensor) else _copy_array(leaf) for leaf in leaves])


def _copy_array(leaf: Any) -> Any:
    return leaf.copy() if type(leaf).__name__ == "ndarray" else leaf


def _are_alike(samples: Sequence[Any], other_samples: Sequence[Any]) -> bool:
    flats = [[leaf for sample in group for leaf in flatten(sample)[0]] for group in (samples, other_samples)]
    return len(flats[0]) == len(flats[1]) and all(map(_is_equal, *flats))


def _are_rows(batch: Any, part: Any, positions: Sequence[int], samples: int) -> bool:
    """Return whether a batch of some samples has their rows of the batch of all of them, and nothing else."""
    flats = flatten(batch)[0], flatten(part)[0]
    return len(flats[0]) == len(flats[1]) and all(
        isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,) and _is_equal(leaf[list(positions)], part_leaf)
        for leaf, part_leaf in zip(*flats, strict=True)
    )


def _is_equal(leaf: Any, twin: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(twin, Tensor):
        is_alike = leaf.dtype == twin.dtype and leaf.shape == twin.shape
        return is_alike and bool(torch.equal(leaf, twin) or torch.allclose(leaf, twin, 0.0, 0.0, equal_nan=True))
    if type(leaf).__name__ == "ndarray":
        return type(leaf) is type(twin) and leaf.dtype == twin.dtype and leaf.tobytes() == twin.tobytes()
    return leaf is twin or (type(leaf) is type(twin) and bool(leaf == twin or (leaf != leaf and twin != twin)))
