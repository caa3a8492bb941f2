"""What a choice costs: seconds and bytes of every operator, of every move between placements, and of a whole split."""

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

# What computes nothing gives another view of the same memory; it is not quite free, so that of two splits with equal
# collectives the one that makes less whole wins.
VIEWING = 0.01
# A backward pass computes two products for each one of the forward pass.
BACKWARD = 2


@dataclass(frozen=True)
class TensorUse:
    """One reader of a tensor: an input of an operator, or what the graph gives (step None).

    Attributes:
        step: that reads.
        index: which of its inputs.
    """

    step: OperatorNode | None
    index: int

    @property
    def is_write(self) -> bool:
        """Whether the tensor itself is written, so that nothing may stand in for it."""
        return self.step is not None and self.index in self.step.call.written_inputs


@dataclass(frozen=True)
class CostSetting:
    """What prices depend on.

    Attributes:
        view: the graph.
        degree: ranks along the axis in question.
        rates: of every rank.
        other_axes: how the graph lies on other axes, by axis.
    """

    view: OperatorView
    degree: int
    rates: RankSpeed
    other_axes: Mapping[str, AxisSplit]

    @cached_property
    def values(self) -> Mapping[TensorKey, TensorValue]:
        """Every tensor of the graph."""
        made = {
            key: value
            for step in self.view.operators
            for key, value in zip(step.output_keys, step.call.outputs, strict=True)
        }
        return {**{key: source.value for key, source in self.view.sources.items()}, **made}

    @cached_property
    def uses(self) -> Mapping[TensorKey, tuple[TensorUse, ...]]:
        """Who reads every tensor."""
        found: dict[TensorKey, list[TensorUse]] = {key: [] for key in self.values}
        for step in self.view.operators:
            for index, key in enumerate(step.input_keys):
                if key in found:
                    found[key].append(TensorUse(step, index))
        for index, key in enumerate(self.view.output_keys):
            if key in found:
                found[key].append(TensorUse(None, index))
        return {key: tuple(uses) for key, uses in found.items()}

    def tensor_bytes(self, key: TensorKey) -> float:
        """Bytes of a tensor, with the splits of the other axes."""
        return value_bytes(self.values[key]) * _busiest_share(
            tuple(split.placement(key) for split in self.other_axes.values())
        )


@dataclass(frozen=True)
class Price:
    """Seconds, and the bytes that every rank sends meanwhile."""

    seconds: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.seconds + other.seconds, self.sent + other.sent)

    def __mul__(self, times: float) -> Price:
        return Price(self.seconds * times, self.sent * times)


FREE = Price()


def value_bytes(value: TensorValue) -> int:
    """Of a whole tensor."""
    return math.prod(value.shape) * value.dtype.itemsize


def _busiest_share(placements: tuple[Placement, ...]) -> float:
    return math.prod(largest_share(p) for p in placements)


def price_redistribution(setting: CostSetting, key: TensorKey, source: Placement, target: Placement) -> Price:
    """A tensor from one placement to another, and its gradient back."""
    total = FREE
    if source == target:
        return total
    size = setting.tensor_bytes(key)
    for collective, copied in redistribute(size, source, target, setting.values[key].gradient):
        if collective:
            taken = communicate.collective_seconds(collective, size, setting.degree, setting.rates)
            total += Price(taken, communicate.bytes_per_rank(collective, size, setting.degree))
        else:
            total += Price(copied / setting.rates.bytes)
    return total


def price_operator(setting: CostSetting, step: OperatorNode, strategy: Strategy) -> Price:
    """An operator, forward and backward, by the roofline: operations or bytes, whichever takes longer."""
    chosen = [split.strategies[step.name] for split in setting.other_axes.values()]
    flops = step.flops * (setting.view.samples / setting.view.graph.samples)
    flops *= strategy.share * math.prod(other.share for other in chosen)
    read = sum(
        value_bytes(v) * _busiest_share((strategy.inputs[i], *(s.inputs[i] for s in chosen)))
        for i, v in enumerate(step.call.inputs)
    )
    written = sum(
        value_bytes(v) * _busiest_share((strategy.outputs[i], *(s.outputs[i] for s in chosen)))
        for i, v in enumerate(step.call.outputs)
    )
    moved = read + written
    once = setting.rates.roofline(flops, moved) if flops else VIEWING * (moved / setting.rates.bytes)
    times = 1 + BACKWARD if any(v.gradient for v in step.call.outputs) else 1
    inside = communicate.exchange_seconds(strategy.sent, strategy.messages, setting.rates)
    return Price(once * times + inside, strategy.sent)


def price_source(setting: CostSetting, source: GraphInput, placement: Placement) -> Price:
    """A parameter's gradient that every rank has a summand of: summed once a step, in buckets, while others compute."""
    if placement != REPLICATE_PARTIAL_GRAD or not source.value.gradient:
        return FREE
    size = setting.tensor_bytes(source.key)
    taken = communicate.overlapped_seconds("all_reduce", size, setting.degree, setting.rates)
    return Price(taken, communicate.bytes_per_rank("all_reduce", size, setting.degree))


def activation_bytes(setting: CostSetting, step: OperatorNode, outputs: tuple[Placement, ...]) -> float:
    """Bytes of what an operator gives that a backward pass may need, on the busiest rank."""
    return sum(
        setting.tensor_bytes(key) * largest_share(placement)
        for key, value, placement in zip(step.output_keys, step.call.outputs, outputs, strict=True)
        if value.gradient
    )


def parameter_bytes(setting: CostSetting, source: GraphInput, placement: Placement) -> float:
    """Bytes of a parameter on the busiest rank; 0 for any other source."""
    return setting.tensor_bytes(source.key) * largest_share(placement) if source.role[0] == "parameter" else 0.0


def copied_bytes(setting: CostSetting, key: TensorKey, source: Placement, target: Placement) -> float:
    """Bytes of what a move makes, on the busiest rank: operators that need it so keep it for their backward pass."""
    if source == target or (isinstance(source, Replicate) and isinstance(target, Replicate)):
        return 0.0
    return setting.tensor_bytes(key) * largest_share(target)


def is_parameter(setting: CostSetting, key: TensorKey) -> bool:
    """Whether a tensor is a parameter."""
    source = setting.view.sources.get(key)
    return source is not None and source.role[0] == "parameter"


@dataclass(frozen=True)
class PricedMove:
    """A tensor that some readers need otherwise than it is made.

    Attributes:
        key: of the tensor.
        source, target: placements.
        uses: who needs it so.
    """

    key: TensorKey
    source: Placement
    target: Placement
    uses: tuple[TensorUse, ...]


def needed_placement(split: AxisSplit, use: TensorUse) -> Placement:
    """How a reader needs a tensor; results are whole on every rank."""
    return REPLICATE if use.step is None else split.strategies[use.step.name].inputs[use.index]


def list_redistributions(setting: CostSetting, split: AxisSplit) -> Iterator[PricedMove]:
    """Every move that a split asks for: of one tensor to one placement once, however many need it so."""
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
        seconds: of one forward and backward pass on the busiest rank.
        sent: bytes that every rank sends.
        moves: how many of them there are (forward).
        parameters: bytes of them on the busiest rank, and of what moves make of them.
        activations: bytes, on the busiest rank, of what operators and moves give and a backward pass may need.
    """

    seconds: float
    sent: float
    moves: int
    parameters: float
    activations: float


def predict_split(setting: CostSetting, split: AxisSplit) -> LayoutPrediction:
    """The price of a whole split."""
    total, moved, parameters, activations = FREE, 0, 0.0, 0.0
    for moving in list_redistributions(setting, split):
        key, ends = moving.key, (moving.source, moving.target)
        total, moved = total + price_redistribution(setting, key, *ends), moved + 1
        if is_parameter(setting, key):
            parameters += copied_bytes(setting, key, *ends)
        elif setting.values[key].gradient:
            activations += copied_bytes(setting, key, *ends)
    for step in setting.view.operators:
        total += price_operator(setting, step, split.strategies[step.name])
        activations += activation_bytes(setting, step, split.strategies[step.name].outputs)
    for key, source in setting.view.sources.items():
        total += price_source(setting, source, split.source_placements[key])
        parameters += parameter_bytes(setting, source, split.source_placements[key])
    return LayoutPrediction(total.seconds, total.sent, moved, parameters, activations)
