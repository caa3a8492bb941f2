"""Step outputs: what a step's computation returns besides its loss, put together over microbatches and workers.

The workers that compute the loss have the outputs of their samples, by microbatch. How these make up the value of the
whole batch is derived from the graph: elements of their samples along some dimension, a mean, a sum, or the same value
everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.placement.placement import Shard
from polylane.runtime.step_result import StepResult, StepState
from polylane.runtime.transport.protocol import Transport
from polylane.samples.batch_layout import BatchLayout
from polylane.samples.derivation import Derivation
from polylane.samples.interpretation.additivity import REPLICAS, WHOLE


class StepOutputs:
    """The outputs of one step, of which every worker can have the whole values.

    Args:
        graph: the captured computation, whose results behind the loss are the outputs.
        state: this worker's outputs by microbatch; none on workers that do not compute the loss.
        derive: returns how parts of a batch make up the graph's values; called where an output is gathered.
        is_whole: whether one worker computes the loss of the whole batch at once.
        transport: connects all workers of the plan.
        device: device of the whole values.

    Attributes:
        device: device of the whole values.
        is_whole: whether one worker computes the loss of the whole batch at once.
        parts: this worker's outputs by number, with the samples of the batch that they are of.
        form: what the outputs are, as the function says that asks for them; None: nobody says.
    """

    def __init__(
        self,
        graph: Graph,
        state: StepState,
        derive: Callable[[], Derivation],
        is_whole: bool,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._derive, self.is_whole = derive, is_whole
        self._transport, self.device = transport, device
        self.parts: list[tuple[SampleSlice, dict[int, Tensor]]] = [
            (state.sample_slices[i], dict(enumerate(outputs))) for i, outputs in state.outputs.items()
        ]
        self._samples, self.form = state.tables.samples, graph.output_form
        results: Any = graph.code.fx.output_node().args[0]
        self._nodes = results[graph.loss_parts :]

    def layout(self, index: int) -> BatchLayout:
        """Return how the parts of a batch make up an output, as far as it is proven."""
        name, derivation = self._find_name(index), self._derive()
        if name in derivation.shards:
            return BatchLayout.SHARDED_BY_SAMPLE
        return derivation.batch_layouts.get(name, BatchLayout.UNKNOWN)

    def find_sample_cut(self, index: int) -> SampleCut | None:
        """Return where an output has the elements of each sample; None: it has none, or it is not known where."""
        shard = self._derive().shards.get(self._find_name(index))
        return None if shard is None else SampleCut.of_shard(shard)

    def gather_parts(self, indices: Sequence[int]) -> list[tuple[SampleSlice, list[Tensor]]]:
        """Return outputs of all parts of the batch, in the order of its samples, on every worker's CPU; collective.

        Args:
            indices: numbers of the outputs.
        """
        rows = [(part.first, part.samples, [outputs[i].cpu() for i in indices]) for part, outputs in self.parts]
        gathered = self._transport.all_gather_object(rows) if self._transport.size > 1 else [rows]
        ordered = sorted((row for worker_rows in gathered for row in worker_rows), key=lambda row: int(row[0]))
        return [(SampleSlice(samples, start, self._samples), values) for start, samples, values in ordered]

    def gather(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the whole value of an output, the same on every worker; collective.

        Args:
            index: number of the output, from 0.
            shape: of the whole value.
            dtype: of the whole value.

        Raises:
            PolylaneError: it is not known how parts of the batch make up the value.
        """
        # Sums of bytes and of integers are exact; of each element but one summand is zero, or all are of one value.
        wire = torch.uint8 if dtype == torch.bool else dtype
        result = torch.zeros(tuple(shape), dtype=wire, device=self.device)
        cut = None if self.is_whole else self._find_whole_cut(index, shape)
        layout = BatchLayout.REPLICATED if self.is_whole else self.layout(index)
        if layout is BatchLayout.UNKNOWN or (layout is BatchLayout.SHARDED_BY_SAMPLE and cut is None):
            raise PolylaneError(
                f"how the parts of the batch make up {self._find_name(index)} is not known, so that its value is not "
                "known under this plan: compute it from values that have a row for each sample"
            )
        for part, outputs in self.parts:
            value = outputs[index].to(wire)
            if cut is not None:
                rows = cut.by_sample(result, self._samples).narrow(cut.dim + 1, part.first, part.samples)
                rows.copy_(cut.by_sample(value, part.samples))
            elif layout is BatchLayout.MEAN:
                result += value * (part.samples / self._samples)
            elif layout is BatchLayout.SUM or part.first == 0:
                result += value
        if self._transport.size > 1:
            result = self._transport.all_reduce(result, range(self._transport.size)).wait()
        return result.to(dtype)

    def _find_name(self, index: int) -> str:
        return str(self._nodes[index].meta.get("name"))

    def _find_whole_cut(self, index: int, shape: Sequence[int]) -> SampleCut | None:
        """Return along which dimension an output has its samples; None: it has none, or not in equal runs."""
        cut = self.find_sample_cut(index)
        return cut if cut is not None and shape[cut.dim] == cut.runs * self._samples * cut.width else None

    def select(self, index: int | None) -> StepOutputs:
        """Return the same with the memory of one output alone; None: of none."""
        selected = copy.copy(self)
        selected.parts = [(part, {} if index is None else {index: outputs[index]}) for part, outputs in self.parts]
        return selected


@dataclass(frozen=True)
class SampleCut:
    """Where a value has the elements of each sample: of (length, samples) viewed as one dimension, ``length`` runs.

    Attributes:
        dim: dimension along which the samples are.
        runs: how often all samples come one after another.
        width: positions that a sample has in each run.
    """

    dim: int
    runs: int
    width: int

    @classmethod
    def of_shard(cls, shard: Shard) -> SampleCut | None:
        """Return how a value is cut whose derived state is a shard; None if not in runs of one length."""
        length = shard.size // len(shard.cuts)
        if length == 0 or length % WHOLE:
            return None
        starts = range(0, shard.size, length)
        if shard.cuts != tuple((start, start + length // REPLICAS, start + length) for start in starts):
            return None
        return cls(shard.dim, len(shard.cuts), length // WHOLE)

    def by_sample(self, value: Tensor, samples: int) -> Tensor:
        """View a value of that many samples with dimension ``dim`` as (runs, samples, width)."""
        view: Tensor = value.unflatten(self.dim, (self.runs, samples, self.width))
        return view

    def take(self, value: Tensor, samples: int, start: int, count: int) -> Tensor:
        """Return ``count`` samples of a value of ``samples`` samples, from number ``start`` on."""
        return self.by_sample(value, samples).narrow(self.dim + 1, start, count).flatten(self.dim, self.dim + 2)

    def join(self, values: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        """Return the value of all samples from values of some samples each, in order."""
        views = [self.by_sample(value, count) for value, count in zip(values, samples, strict=True)]
        return torch.cat(views, self.dim + 1).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True)
class ComputedStep:
    """Forward and backward passes of a step whose update has not been made.

    Attributes:
        result: the step's loss, and when it was computed.
        outputs: what its computation returns besides the loss.
        gradients: what the step's backward passes have computed, by this worker's parameter or shard.
        trained_names: canonical names of the parameters that have gradients, on all workers.
    """

    result: StepResult
    outputs: StepOutputs
    gradients: dict[nn.Parameter, Tensor]
    trained_names: frozenset[str]
