"""Rules by dimension labels (as in einsum): dimensions with the same label are sharded together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_letters

from polylane.placement.placement import PARTIAL, REPLICATE_PARTIAL_GRAD, Cuts, Placement, Shard
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy, TensorValue

# A label for every dimension of a tensor; None for a dimension that is not sharded.
DimLabels = Sequence[str | None]


def label_dimensions(value: TensorValue, uncut: Sequence[int] = ()) -> list[str | None]:
    """Return a label for every dimension of a value, but None for those ``uncut`` and those of size 1 or less."""
    return [None if n <= 1 or d in uncut else ascii_letters[d] for d, n in enumerate(value.shape)]


def no_labels(value: TensorValue) -> list[str | None]:
    """Return no label for any dimension: a value that is whole on every rank."""
    return [None] * value.dim


def label_inputs(call: OperatorCall, labels: Mapping[int, DimLabels]) -> list[DimLabels]:
    """Return the labels of all inputs from those given by index; all others have none."""
    return [labels.get(value.index, no_labels(value)) for value in call.inputs]


def broadcast_labels(value: TensorValue, dim_labels: DimLabels) -> list[str | None]:
    """Return the labels of a value that broadcasts to dimensions with labels ``dim_labels``."""
    labels = dim_labels[len(dim_labels) - value.dim :]
    return [None if n == 1 else letter for n, letter in zip(value.shape, labels, strict=True)]


def broadcast_input_labels(call: OperatorCall, dim_labels: DimLabels) -> list[list[str | None]]:
    """Return the labels of all inputs, broadcast to ``dim_labels``; an input that only gives its dtype has none."""
    lender = call.arguments.get("other") if call.base in ("type_as", "to") else None
    return [
        no_labels(value)
        if value.dim > len(dim_labels) or (value is lender and value.shape != call.outputs[0].shape)
        else broadcast_labels(value, dim_labels)
        for value in call.inputs
    ]


def partial_sums(call: OperatorCall, *values: TensorValue | None) -> Iterator[Strategy]:
    """Yield the strategy on partial sums, for an operator that is linear in ``values`` taken together."""
    present = [v for v in values if v is not None]
    if all(v.dtype.is_floating_point or v.dtype.is_complex for v in (*present, *call.outputs)):
        yield call.strategy("summands", {v.index: PARTIAL for v in present}, PARTIAL)


def strategies_by_dimension(
    call: OperatorCall,
    inputs: Sequence[DimLabels],
    outputs: Sequence[DimLabels],
    *,
    names: Mapping[str, str] | None = None,
    summed: str = "",
    added: Sequence[int] = (),
    local: Callable[[RankCall], None] | None = None,
    skip: str = "",
) -> Iterator[Strategy]:
    """Yield the strategies of an operator whose dimensions are independent of each other: each shards one label.

    Args:
        call: the operator with concrete shapes.
        inputs: a label for every dimension of every input; None for what cannot be sharded. Dimensions with the same
            label are cut alike.
        outputs: a label for every dimension of every output. An input without the label is replicated, its gradient
            partial.
        names: the strategy's name for a label; default "dim 1", the number in the first output.
        summed: labels over which the operator sums products: the outputs are then partial.
        added: indices of inputs that are added at last (a bias): where the outputs are partial, they are too.
        local: changes each rank's call; None if the operator runs unchanged on parts.
        skip: labels that are not to be sharded.
    """
    places: dict[str, list[Place]] = {}
    for part, labels in (("in", inputs), ("out", outputs)):
        for index, dim_labels in enumerate(labels):
            for dim, letter in enumerate(dim_labels):
                if letter is not None and letter not in skip:
                    places.setdefault(letter, []).append((part, index, dim))
    for letter, letter_places in places.items():
        # A label that is missing in the output must be summed over; otherwise ranks would have different whole results.
        if letter not in summed and not all(letter in dim_labels for dim_labels in outputs):
            continue
        for cuts in call.common_cuts(*letter_places):
            targets: list[Placement] = [
                _placement_of_label(dim_labels, letter, cuts, PARTIAL) for dim_labels in outputs
            ]
            # An input without the label feeds only this rank's part: its gradient is a partial sum.
            default: Placement = REPLICATE_PARTIAL_GRAD
            placed = {
                i: _placement_of_label(
                    dim_labels, letter, cuts, PARTIAL if letter in summed and i in added else default
                )
                for i, dim_labels in enumerate(inputs)
            }
            at = list(outputs[0]).index(letter) if letter in outputs[0] else letter
            yield call.strategy((names or {}).get(letter, f"dim {at}"), placed, targets, local=local)


def _placement_of_label(dim_labels: DimLabels, letter: str, cuts: Cuts, otherwise: Placement) -> Placement:
    return Shard(list(dim_labels).index(letter), cuts) if letter in dim_labels else otherwise
