"""Open sizes: a graph is used for no batch that export did not capture it for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.open_dimensions import NotOpened, Opening, bind_sizes, sizes_to_try
from polylane.graph.graph import Graph
from polylane.graph.open_sizes import OpenSizes


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).square().mean()


class Even(nn.Module):
    """Halves of a sequence, from 4 to 12 places, beside a mask of the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(3, 3), nn.Parameter(torch.ones(12, 3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.shape[1] % 2 or x.shape[1] < 4:
            return self.layer(x).sum(1)
        first, second = (self.layer(x) * mask[:, :, None] + self.places[: x.shape[1]]).chunk(2, 1)
        return first * second


def even_batch(length: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, 3), torch.ones(samples, length)


@pytest.fixture(scope="module")
def even() -> Graph:
    opening = Opening(frozenset({(0, 1), (1, 1)}), (flatten(even_batch(8))[0],))
    return capture(Even(), loss, even_batch(6), opening=opening)


def open_sizes(graph: Graph) -> OpenSizes:
    assert graph.code.open is not None
    return graph.code.open


def test_guards_are_those_of_the_code(even: Graph) -> None:
    """Parity, the least length and the length of the table: all that the code asked of a length, and nothing else."""
    found = {length: open_sizes(even).find(even_batch(length)) for length in range(1, 20)}
    assert {length for length, sizes in found.items() if sizes is not None} == {4, 6, 8, 10, 12}
    assert all(sizes is None or set(sizes) == {length} for length, sizes in found.items())


def test_other_sizes_than_the_open_ones_are_those_of_the_example(even: Graph) -> None:
    x, mask = even_batch(8)
    assert open_sizes(even).find((x, mask)) is not None
    assert open_sizes(even).find((x[:2], mask[:2])) is not None  # any number of samples
    assert open_sizes(even).find((x[..., :2], mask)) is None
    assert open_sizes(even).find((x, mask[:, :6])) is None  # lengths that the code takes for equal
    assert open_sizes(even).find((x[..., None], mask)) is None


def test_a_graph_is_seen_at_the_sizes_that_are_asked_for(even: Graph) -> None:
    wide = bind_sizes(even, [12] * len(open_sizes(even).places))
    shapes = {
        n.name: tuple(n.meta["val"].shape)[1:] for n in wide.code.fx.nodes if n.meta.get("role", "")[:1] == ("input",)
    }
    assert set(shapes.values()) == {(12, 3), (12,)} and wide.code.nominal_sizes[0] == 12
    assert even.code.nominal_sizes[0] == 6  # which is as it was
    tried = sizes_to_try(open_sizes(even), [even.code.nominal_sizes])
    assert {6, 4, 12} <= {sizes[0] for sizes in tried} and all(open_sizes(even).admit(sizes) for sizes in tried)


class Unrolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum((x[:, place] * place for place in range(x.shape[1])), start=x[:, 0])


class Scaled(nn.Module):
    """Multiplies by a number that Python made of the length, in a way that export does not see."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) * float(str(x.shape[1]))


@pytest.mark.parametrize("model", [Unrolled(), Scaled()])
def test_what_fixes_a_size_is_not_opened(model: nn.Module) -> None:
    opening = Opening(frozenset({(0, 1)}), ([torch.randn(4, 7, 2)],))
    with pytest.raises(NotOpened):
        capture(nn.Sequential(nn.Linear(2, 2), model), loss, (torch.randn(4, 5, 2),), opening=opening)


def test_a_size_that_no_other_batch_confirms_is_not_opened() -> None:
    opening = Opening(frozenset({(0, 1), (1, 1)}), (flatten(even_batch(5))[0],))
    with pytest.raises(NotOpened, match="depends on these sizes") as refused:
        capture(Even(), loss, even_batch(6), opening=opening)
    assert not refused.value.is_final
