"""Forms of the batches so far: which of their sizes vary, which are to be left open, and the notes for the user."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polylane.compile.compiled_graph import CompiledGraph
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError
from polylane.graph.batch import clone_leaves, leaf_names, sample_count, take_first_samples, to_device
from polylane.graph.capture.open_dimensions import NotOpened, Opening
from polylane.graph.open_sizes import FEWEST
from polylane.graph.readings.batch_readings import Reading

SAMPLES_KEPT = 4  # samples of a form that are kept, for checks of a graph with open sizes
SAMPLED_FORMS = 4  # forms of a family of which samples are kept, the latest ones
ATTEMPTS = 4  # captures with open sizes that may fail, of one graph and family, before no more is tried
MANY_FORMS = 8  # forms captured one by one after which the user gets a note

Signature = tuple[Any, ...]


def without_sizes(signature: Signature) -> Signature:
    """Return what batches of one family have in common: a signature with dimensions in place of their sizes."""
    return tuple(
        (dtype, len(shape), bool(shape) and shape[0] == "samples")
        if isinstance(shape, tuple)
        else (dtype, shape)  # a constant, equal in all of a family
        for dtype, shape in signature
    )


@dataclass
class _Family:
    """Batches that differ in sizes alone.

    Attributes:
        varying: dimensions whose sizes have differed, as (leaf, dimension).
        samples: flat leaves of a few samples of the latest forms, by signature.
        failed: by what was captured, the number of captures with open sizes that failed; ATTEMPTS: no more are tried.
    """

    varying: set[tuple[int, int]] = field(default_factory=set)
    samples: OrderedDict[Signature, list[Any]] = field(default_factory=OrderedDict)
    failed: Counter[Hashable] = field(default_factory=Counter)

    def add(self, signature: Signature, batch: Batch) -> None:
        """Record a form, with copies of a few of its samples: a view would keep all of the batch."""
        for known_signature in self.samples:
            self.varying |= differing_dims(signature, known_signature)
        few = take_few(batch)
        self.samples[signature] = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in few]
        if len(self.samples) > SAMPLED_FORMS:
            self.samples.popitem(last=False)


def take_few(batch: Batch) -> list[Any]:
    """Return the leaves of a few samples, from which a graph can be captured that holds for any number of them.

    Of all samples, where a leaf is not divided with them.
    """
    if batch.has_common_tensors:
        return list(batch.leaves)
    return take_first_samples(batch.leaves, SAMPLES_KEPT, batch.sampled)


def capture_of_few(batch: Batch, capture: Callable[[list[Any]], CompiledGraph]) -> CompiledGraph:
    """Capture a graph from a few samples of a batch, or from all where a few by themselves do not make a batch.

    Labels padded to the longest sample of all do not fit a few that are shorter.

    Args:
        batch: a batch of a new form.
        capture: captures a graph from the leaves of an example.
    """
    few = take_few(batch)
    try:
        return capture(few)
    except PolylaneError as error:
        if isinstance(error, NotOpened) or sample_count(few) == sample_count(batch.leaves):
            raise
    return capture(clone_leaves(batch.leaves))


def differing_dims(signature: Signature, other_signature: Signature) -> set[tuple[int, int]]:
    """Return the dimensions in whose sizes two signatures of one family differ, as (leaf, dimension)."""
    pairs = enumerate(zip(signature, other_signature, strict=True))
    shapes = [(i, a[1], b[1]) for i, (a, b) in pairs if isinstance(a[1], tuple)]
    return {(i, dim) for i, a, b in shapes for dim, (m, n) in enumerate(zip(a, b, strict=True)) if m != n}


class BatchForms:
    """All forms of batches that have come to one worker.

    Args:
        structure: how the example batch is nested.
        signature: sizes and dtypes of the example.
        example: its tensors; their sizes are what the first capture fixed.
    """

    def __init__(self, structure: Any, signature: Signature, example: Batch) -> None:
        self._families: dict[Hashable, _Family] = {}
        self._example = structure, signature
        self._single: list[tuple[Any, Signature]] = []  # forms that were captured one by one
        self._seconds, self._reason, self._answered = 0.0, "", 0
        self.record(structure, signature, example)

    def record(self, structure: Any, signature: Signature, batch: Batch) -> None:
        """Record a form that has come, if it is new."""
        family = self._family(structure, signature)
        if signature not in family.samples:
            family.add(signature, batch)

    def _family(self, structure: Any, signature: Signature) -> _Family:
        return self._families.setdefault((structure, without_sizes(signature)), _Family())

    def find_opening(self, subject: Hashable, structure: Any, signature: Signature, batch: Batch) -> Opening | None:
        """Return what a capture for a batch is to leave open: all sizes that have varied; None: it has no use.

        Args:
            subject: what is captured (the objective, the mode, the version of the settings).
            structure, signature: the batch's form, which is recorded.
            batch: its tensors, on the worker's device, which the new capture looks at first.
        """
        family = self._family(structure, signature)
        dims = frozenset(family.varying)
        sizes = [batch.leaves[leaf].shape[dim] for leaf, dim in dims]
        if not dims or min(sizes) < FEWEST or family.failed[subject] >= ATTEMPTS:
            return None
        device = next(leaf.device for leaf in batch.leaves if isinstance(leaf, Tensor))
        examples = tuple(to_device(leaves, device) for of, leaves in family.samples.items() if of != signature)
        return Opening(dims, examples)

    def fail(self, subject: Hashable, structure: Any, signature: Signature, error: NotOpened) -> None:
        """Record that a capture with open sizes failed: for good, or until batches of further sizes have come."""
        self._family(structure, signature).failed[subject] += ATTEMPTS if error.is_final else 1
        self._reason = str(error)

    def count_single(self, structure: Any, signature: Signature, seconds: float) -> None:
        """Count a form that was captured by itself, and tell the user once if there are many.

        Args:
            structure: how the batch is nested.
            signature: sizes and dtypes of its leaves.
            seconds: time that its capture took.
        """
        form = structure, signature
        if form == self._example or form in self._single or len(self._single) == MANY_FORMS:
            return
        self._single.append(form)
        self._seconds += seconds
        if len(self._single) == MANY_FORMS:
            why = f" ({self._reason})" if self._reason else ""
            warnings.warn(
                f"{MANY_FORMS} forms of batches were captured one by one, each in {self._seconds / MANY_FORMS:.1f} s "
                f"and with memory of its own: {self._describe_variation()}, and one graph does not hold for all of "
                f"them{why}; pad batches to a few sizes, or put samples of one size into one batch",
                stacklevel=6,
            )

    def count_answers(self, readings: Sequence[Reading], seconds: float) -> None:
        """Count a graph that was captured for other answers of a batch, and tell the user once if there are many.

        Args:
            readings: what the loss asks of the batch.
            seconds: time that the capture took.
        """
        self._answered += 1
        if self._answered == MANY_FORMS:
            lines = _join([*dict.fromkeys(reading.source for reading in readings)])
            why = f"what the loss asks of the values of a batch ({lines}) has other answers from batch to batch"
            remedy = "give it a size that does not depend on the values, or pad to a few"
            if all(reading.is_drawn for reading in readings):
                why = f"the numbers that are drawn to decide which way it goes ({lines}) differ from step to step"
                remedy = "leave out fewer layers, or none (layerdrop=0)"
            warnings.warn(
                f"{MANY_FORMS} graphs were captured one by one, the last in {seconds:.1f} s, for {why}: {remedy}",
                stacklevel=6,
            )

    def _describe_variation(self) -> str:
        """Say what varies from batch to batch, as a part of a sentence."""
        forms = [self._example, *self._single]
        structures = {repr(structure) for structure, _ in forms}
        if len(structures) > 1:
            return "the nesting of the batch varies"
        names, signatures = leaf_names(forms[0][0]), [signature for _, signature in forms]
        varying = list[str]()
        for name, leaf_forms in zip(names, zip(*signatures, strict=True), strict=True):
            shapes = [shape for _, shape in leaf_forms]
            if any(dtype == "carried" for dtype, _ in leaf_forms):
                continue  # its value counts for nothing
            if len({dtype for dtype, _ in leaf_forms}) > 1:
                varying.append(f"the dtype of {name}")
            elif not isinstance(shapes[0], tuple):
                varying += [f"the value of {name}, which is no tensor"] if len(set(shapes)) > 1 else []
            elif len({len(shape) for shape in shapes}) > 1:
                varying.append(f"the number of dimensions of {name}")
            else:
                columns = zip(*shapes, strict=True)
                varying += [f"{name}.shape[{dim}]" for dim, sizes in enumerate(columns) if len(set(sizes)) > 1]
        return f"{_join(varying)} var{'y' if len(varying) > 1 else 'ies'} from batch to batch"


def _join(words: Sequence[str], max_words: int = 4) -> str:
    """Return words as a list in a sentence, the first few of them."""
    shown = [*words[:max_words], *(["others"] if len(words) > max_words else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
