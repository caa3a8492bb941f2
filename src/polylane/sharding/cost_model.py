"""The cost model of the integer program: seconds and bytes of operators, redistributions and whole splits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from polylane.cost.network import alpha_beta as communicate
from polylane.cost.network.alpha_beta import RankSpeed
from polylane.cost.network.redistribution import largest_share, redistribute
from polylane.placement.operator_view import GraphInput, OperatorNode, OperatorView, TensorKey
from polylane.placement.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Placement, Replicate
from polylane.placement.rewrite import AxisSplit
from polylane.placement.strategy import Strategy, TensorValue

# An operator without arithmetic gives another view of the same memory. It is not quite free, so that of two splits with
# equal collectives the one that makes less data whole wins.
VIEWING = 0.01
# A backward pass computes two products for each one of the forward pass: gradients of the input and of the weight.
BACKWARD = 2


@dataclass(frozen=True)
class TensorUse:
    """One reader of a tensor: an input of an operator, or an output of the graph.

    Attributes:
        step: the operator that reads the tensor; None for an output of the graph.
        index: position among the operator's input tensors, or among the graph's outputs.
    """

    step: OperatorNode | None
    index: int

    @property
    def is_write(self) -> bool:
        """Whether the operator writes the tensor in place, so that a redistributed copy cannot take its place."""
        return self.step is not None and self.index in self.step.call.written_inputs


def value_bytes(value: TensorValue) -> int:
    """Return the bytes of a whole tensor."""
    return math.prod(value.shape) * value.dtype.itemsize


def _busiest_share(placements: tuple[Placement, ...]) -> float:
    # Shards are as long as the longest: the busiest rank decides how long the others wait.
    return math.prod(largest_share(p) for p in placements)


@dataclass(frozen=True)
class CostSetting:
    """The prices of one axis, and what they depend on: the graph, the axis's ranks and their speeds.

    Attributes:
        view: the graph's operators at one number of samples.
        degree: number of ranks along the axis in question.
        rates: operations, bytes and messages a second of every rank.
        other_axes: splits already chosen along other axes, by axis.
    """

    view: OperatorView
    degree: int
    rates: RankSpeed
    other_axes: Mapping[str, AxisSplit]

    @cached_property
    def values(self) -> Mapping[TensorKey, TensorValue]:
        """Every tensor of the graph, by key: graph inputs and results of operators."""
        results = {
            key: value
            for step in self.view.operators
            for key, value in zip(step.output_keys, step.call.outputs, strict=True)
        }
        return {**{key: source.value for key, source in self.view.sources.items()}, **results}

    @cached_property
    def uses(self) -> Mapping[TensorKey, tuple[TensorUse, ...]]:
        """The readers of every tensor, in the order of the graph."""
        readers: dict[TensorKey, list[TensorUse]] = {key: [] for key in self.values}
        for step in self.view.operators:
            for index, key in enumerate(step.input_keys):
                if key in readers:
                    readers[key].append(TensorUse(step, index))
        for index, key in enumerate(self.view.output_keys):
            if key in readers:
                readers[key].append(TensorUse(None, index))
        return {key: tuple(uses) for key, uses in readers.items()}

    def tensor_bytes(self, key: TensorKey) -> float:
        """Return the bytes of a tensor on the busiest rank of the other axes."""
        return value_bytes(self.values[key]) * _busiest_share(
            tuple(split.placement(key) for split in self.other_axes.values())
        )

    def redistribution_seconds(self, key: TensorKey, source: Placement, target: Placement) -> float:
        """Return the seconds of taking a tensor from one placement to another, and its gradient back."""
        if source == target:
            return 0.0
        total, size = 0.0, self.tensor_bytes(key)
        # One entry for the forward pass and one for the gradient; without a collective it is a local copy or slice.
        for collective, copied in redistribute(size, source, target, self.values[key].gradient):
            if collective:
                total += communicate.collective_seconds(collective, size, self.degree, self.rates)
            else:
                total += copied / self.rates.bytes
        return total

    def operator_seconds(self, step: OperatorNode, strategy: Strategy) -> float:
        """Return the seconds of an operator, forward and backward, by the roofline: arithmetic or memory traffic."""
        chosen = [split.strategies[step.name] for split in self.other_axes.values()]
        # ``step.flops`` was counted on the batch that the graph was captured with.
        flops = step.flops * (self.view.samples / self.view.graph.samples)
        flops *= strategy.share * math.prod(other_strategy.share for other_strategy in chosen)
        read = sum(
            value_bytes(v) * _busiest_share((strategy.inputs[i], *(s.inputs[i] for s in chosen)))
            for i, v in enumerate(step.call.inputs)
        )
        written = sum(
            value_bytes(v) * _busiest_share((strategy.outputs[i], *(s.outputs[i] for s in chosen)))
            for i, v in enumerate(step.call.outputs)
        )
        moved = read + written
        once = self.rates.roofline(flops, moved) if flops else VIEWING * (moved / self.rates.bytes)
        # Backward runs only if some output carries a gradient; the communication inside is priced for both directions.
        times = 1 + BACKWARD if any(v.gradient for v in step.call.outputs) else 1
        exchange_seconds = communicate.exchange_seconds(strategy.sent, strategy.messages, self.rates)
        return once * times + exchange_seconds

    def source_seconds(self, source: GraphInput, placement: Placement) -> float:
        """Return the seconds that the gradient of a graph input takes, which only parameters have."""
        # Partial gradients of a parameter are all-reduced once a step, in buckets that overlap with the backward pass:
        # without latency.
        if placement != REPLICATE_PARTIAL_GRAD or not source.value.gradient:
            return 0.0
        sent = communicate.bytes_per_rank("all_reduce", self.tensor_bytes(source.key), self.degree)
        return sent / self.rates.bandwidth

    def activation_bytes(self, step: OperatorNode, outputs: tuple[Placement, ...]) -> float:
        """Return the bytes of an operator's outputs that a backward pass may need, on the busiest rank."""
        return sum(
            self.tensor_bytes(key) * largest_share(placement)
            for key, value, placement in zip(step.output_keys, step.call.outputs, outputs, strict=True)
            if value.gradient
        )

    def parameter_bytes(self, source: GraphInput, placement: Placement) -> float:
        """Return the bytes of a parameter on the busiest rank; 0 for any other graph input."""
        return self.tensor_bytes(source.key) * largest_share(placement) if source.role[0] == "parameter" else 0.0

    def copied_bytes(self, key: TensorKey, source: Placement, target: Placement) -> float:
        """Return the bytes of the copy that a redistribution makes, on the busiest rank; saved for backward."""
        # Replicate and Replicate with a partial gradient share the same memory: nothing is copied.
        if source == target or (isinstance(source, Replicate) and isinstance(target, Replicate)):
            return 0.0
        return self.tensor_bytes(key) * largest_share(target)

    def is_parameter(self, key: TensorKey) -> bool:
        """Return whether a tensor is a parameter."""
        source = self.view.sources.get(key)
        return source is not None and source.role[0] == "parameter"


@dataclass(frozen=True)
class PricedMove:
    """A redistribution: a tensor that some readers need in another placement than it is made in.

    Attributes:
        key: key of the redistributed tensor.
        source, target: placements before and after.
        uses: the readers that need the target placement.
    """

    key: TensorKey
    source: Placement
    target: Placement
    uses: tuple[TensorUse, ...]


def needed_placement(split: AxisSplit, use: TensorUse) -> Placement:
    """Return the placement in which a reader needs a tensor; graph outputs are whole on every rank."""
    return REPLICATE if use.step is None else split.strategies[use.step.name].inputs[use.index]


def list_redistributions(setting: CostSetting, split: AxisSplit) -> Iterator[PricedMove]:
    """Yield every redistribution of a split: one per tensor and target placement, however many readers share it."""
    for key, uses in setting.uses.items():
        source = split.placement(key)
        targets: dict[Placement, list[TensorUse]] = {}
        for use in uses:
            targets.setdefault(needed_placement(split, use), []).append(use)
        for target, users in targets.items():
            if target != source:
                yield PricedMove(key, source, target, tuple(users))


@dataclass(frozen=True)
class LayoutPrediction:
    """What a split costs by the model.

    Attributes:
        seconds: duration of one forward and backward pass on the busiest rank.
        sent: bytes that every rank sends in one forward and backward pass.
        moves: number of redistributions of the forward pass.
        parameters: bytes of parameters and of their redistributed copies on the busiest rank.
        activations: bytes of outputs and redistributed copies that a backward pass may need, on the busiest rank.
    """

    seconds: float
    sent: float
    moves: int
    parameters: float
    activations: float


def predict_split(setting: CostSetting, split: AxisSplit) -> LayoutPrediction:
    """Return the predicted cost of a whole split: the prices of its redistributions, operators and graph inputs."""
    seconds, sent, moves, parameters, activations = 0.0, 0.0, 0, 0.0, 0.0
    for moving in list_redistributions(setting, split):
        moves += 1
        key, ends = moving.key, (moving.source, moving.target)
        seconds += setting.redistribution_seconds(key, *ends)
        size = setting.tensor_bytes(key)
        for collective, _ in redistribute(size, *ends, setting.values[key].gradient):
            sent += communicate.bytes_per_rank(collective, size, setting.degree) if collective else 0.0
        if setting.is_parameter(key):
            parameters += setting.copied_bytes(key, *ends)
        elif setting.values[key].gradient:
            activations += setting.copied_bytes(key, *ends)
    for step in setting.view.operators:
        strategy = split.strategies[step.name]
        seconds, sent = seconds + setting.operator_seconds(step, strategy), sent + strategy.sent
        activations += setting.activation_bytes(step, strategy.outputs)
    for key, source in setting.view.sources.items():
        placement = split.source_placements[key]
        source_seconds = setting.source_seconds(source, placement)
        seconds, sent = seconds + source_seconds, sent + source_seconds * setting.rates.bandwidth
        parameters += setting.parameter_bytes(source, placement)
    return LayoutPrediction(seconds, sent, moves, parameters, activations)
