"""Laws of LARS and LAMB: a parameter in pieces, however it is cut and whoever holds them, moves as the whole does."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.optim import LAMB, LARS
from polylane.optim.trust import set_sum_over_holders
from polylane.runtime.parameters.optimizer import SumOverMesh
from tests.support import subsets
from tests.support.workers.thread_transport import LocalTransport, run_local

STEPS = 3
CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, dict[str, tuple[int, list[int], bool]]]:
    """How many workers there are, and of every parameter its elements, where it is cut, and whether all hold all of it.

    Pieces are flat and may be empty; a worker whose piece is empty does without the parameter.
    """
    workers = draw(st.integers(1, 4))
    found = {}
    for i in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 30))
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=workers - 1, max_size=workers - 1)))
        found[f"p{i}"] = size, [0, *cuts, size], draw(st.booleans())
    return workers, found


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {
        "lr": draw(st.sampled_from([0.5, 0.01])),
        "weight_decay": draw(st.sampled_from([0, 0.1])),
    }
    if draw(st.booleans()):
        return LAMB, options | {"bounds": draw(st.sampled_from([(0.0, 1.0), (0.0, float("inf"))]))}
    return LARS, options | {"nesterov": draw(st.booleans()), "trust": draw(st.sampled_from([0.001, 1.0]))}


def values(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(
    kind: Any,
    options: dict[str, Any],
    pieces: dict[str, tuple[int, slice]],
    seed: int,
    plain: set[str],
    sums: Any = None,
) -> dict[str, Tensor]:
    """Train pieces (of so many elements, which of them), of which some take plain steps."""
    number = {name: int(name[1:]) for name in pieces}
    own = {n: nn.Parameter(values(size, seed + number[n])[part].clone()) for n, (size, part) in pieces.items()}
    groups = [
        {"params": [p for n, p in own.items() if n not in plain]},
        {"params": [p for n, p in own.items() if n in plain], "adapt": False},
    ]
    optimizer = kind(groups, **options)
    if sums is not None:
        set_sum_over_holders(optimizer, sums(own))
    for step in range(1, STEPS + 1):
        for n, (size, part) in pieces.items():
            own[n].grad = values(size, seed + 100 * step + number[n])[part].clone()
        optimizer.step()
    return {n: p.detach() for n, p in own.items()}


@settings(max_examples=subsets.examples(60), deadline=None)
@given(layouts(), optimizers(), st.integers(0, 10_000), st.sets(st.sampled_from(["p0", "p1", "p2"])))
def test_pieces_move_as_the_whole_does(
    layout: tuple[int, dict[str, tuple[int, list[int], bool]]], optimizer: Any, seed: int, plain: set[str]
) -> None:
    (workers, cuts), (kind, options) = layout, optimizer
    whole = trained(kind, options, {n: (size, slice(0, size)) for n, (size, _, _) in cuts.items()}, seed, plain)

    def held(rank: int) -> dict[str, tuple[int, slice]]:
        parts = {n: slice(0, size) if alike else slice(*at[rank : rank + 2]) for n, (size, at, alike) in cuts.items()}
        kept = {n: (cuts[n][0], part) for n, part in parts.items() if part.stop > part.start}
        return kept if rank % 2 else dict(reversed(kept.items()))  # in an order of its own

    def worker(transport: LocalTransport) -> dict[str, Tensor]:
        def sums(own: dict[str, nn.Parameter]) -> SumOverMesh:
            counted = [n for n in own if transport.rank == 0 or not cuts[n][2]]
            return SumOverMesh(list(cuts), counted, own, CPU, lambda v: transport.all_reduce(v, range(workers)).wait())

        return trained(kind, options, held(transport.rank), seed, plain, sums)

    results = run_local(workers, worker)
    for name, (size, at, alike) in cuts.items():
        if alike:
            joined = [result[name] for result in results]
            assert all(torch.equal(a, b) for a, b in itertools.pairwise(joined))
        else:
            joined = [torch.cat([result.get(name, torch.zeros(0).double()) for result in results])]
            assert len(joined[0]) == size == at[-1]
        torch.testing.assert_close(joined[0], whole[name], rtol=1e-10, atol=1e-12)
