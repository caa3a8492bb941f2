"""The rules' common form: a letter for every dimension; dimensions with the same letter are cut alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import ascii_letters

from polylane.placement.placement import PARTIAL, REPLICATE_PARTIAL_GRAD, Cuts, Placement, Shard
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy, TensorValue

# For every dimension of a tensor its letter; None for what is not cut.
Letters = Sequence[str | None]


def label_dimensions(value: TensorValue, uncut: Sequence[int] = ()) -> list[str | None]:
    """A letter for every dimension of a value but these, and but those in which there is nothing to cut."""
    return [None if n <= 1 or d in uncut else ascii_letters[d] for d, n in enumerate(value.shape)]


def no_labels(value: TensorValue) -> list[str | None]:
    """No letter for any dimension: a value that is whole on every rank."""
    return [None] * value.dim


def broadcast_labels(value: TensorValue, letters: Letters) -> list[str | None]:
    """The letters of a value that broadcasts to dimensions with these."""
    own = letters[len(letters) - value.dim :]
    return [None if n == 1 else letter for n, letter in zip(value.shape, own, strict=True)]


def broadcast_input_labels(call: OperatorCall, letters: Letters) -> list[list[str | None]]:
    """The letters of all inputs, broadcast to dimensions with these; one that only lends its type has none."""
    lender = call.arguments.get("other") if call.base in ("type_as", "to") else None
    return [
        no_labels(value)
        if value.dim > len(letters) or (value is lender and value.shape != call.outputs[0].shape)
        else broadcast_labels(value, letters)
        for value in call.inputs
    ]


def partial_sums(call: OperatorCall, *values: TensorValue | None) -> Iterator[Strategy]:
    """What is linear in these inputs together works on summands of them."""
    present = [v for v in values if v is not None]
    if all(v.dtype.is_floating_point or v.dtype.is_complex for v in (*present, *call.outputs)):
        yield call.strategy("summands", {v.index: PARTIAL for v in present}, PARTIAL)


def strategies_by_dimension(
    call: OperatorCall,
    inputs: Sequence[Letters],
    outputs: Sequence[Letters],
    *,
    names: Mapping[str, str] | None = None,
    summed: str = "",
    added: Sequence[int] = (),
    local: Callable[[RankCall], None] | None = None,
    skip: str = "",
) -> Iterator[Strategy]:
    """The strategies of an operator whose dimensions are independent of each other: shard one letter.

    Args:
        call: the operator.
        inputs: a letter for every dimension of every input; None for what cannot be split. Dimensions with the same
            letter are cut alike.
        outputs: the same for every output. An input without the letter is replicated, its gradient partial.
        names: letter -> the strategy's name; default "dim 1", the number in the first output.
        summed: letters over which the operator sums products: the outputs are then partial.
        added: numbers of the inputs that are added at last (a bias): where the outputs are partial, they are too.
        local: what must change in each rank's call.
        skip: letters that are not to be split.
    """
    places: dict[str, list[Place]] = {}
    for part, every in (("in", inputs), ("out", outputs)):
        for index, letters in enumerate(every):
            for dim, letter in enumerate(letters):
                if letter is not None and letter not in skip:
                    places.setdefault(letter, []).append((part, index, dim))
    for letter, where in places.items():
        if letter not in summed and not all(letter in letters for letters in outputs):
            continue
        for cuts in call.common_cuts(*where):
            given: list[Placement] = [_placement_of_label(letters, letter, cuts, PARTIAL) for letters in outputs]
            rest: Placement = REPLICATE_PARTIAL_GRAD
            placed = {
                i: _placement_of_label(letters, letter, cuts, PARTIAL if letter in summed and i in added else rest)
                for i, letters in enumerate(inputs)
            }
            at = list(outputs[0]).index(letter) if letter in outputs[0] else letter
            yield call.strategy((names or {}).get(letter, f"dim {at}"), placed, given, local=local)


def _placement_of_label(letters: Letters, letter: str, cuts: Cuts, otherwise: Placement) -> Placement:
    return Shard(list(letters).index(letter), cuts) if letter in letters else otherwise
