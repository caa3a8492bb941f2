"""python -m benchmarks.speed.transport [--ranks 2 4]: shared memory against gloo, in turns in the same workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import make_parser
from polylane.runtime.transport.c10d import C10dTransport as OverGloo
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers

SIZES = (1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes
ROUND_SECONDS = 0.15  # a turn of one way at one size
FEWEST, MOST = 3, 100  # runs in a turn

Operation = Callable[[Transport, torch.Tensor], None]


@dataclass(frozen=True)
class Row:
    """Seconds of one operation at one size: of the slowest rank in each run, by gloo and by shared memory."""

    operation: str
    ranks: int
    size: int
    gloo: tuple[float, ...]
    shared: tuple[float, ...]


def all_reduce(transport: Transport, tensor: torch.Tensor) -> None:
    """A sum over all ranks, in place."""
    transport.all_reduce(tensor, range(transport.size)).wait()


def there_and_back(transport: Transport, tensor: torch.Tensor) -> None:
    """From each even rank to the next, and back."""
    peer = transport.rank ^ 1
    if transport.rank % 2 == 0:
        transport.send(tensor, peer).wait()
        transport.receive(tensor.shape, tensor.dtype, peer).wait()
    else:
        transport.send(transport.receive(tensor.shape, tensor.dtype, peer).wait(), peer).wait()


def both_ways(transport: Transport, tensor: torch.Tensor) -> None:
    """Each rank to its neighbour, at the same time."""
    peer = transport.rank ^ 1
    sending = transport.send(tensor, peer)
    transport.receive(tensor.shape, tensor.dtype, peer).wait()
    sending.wait()


def all_gather(transport: Transport, tensor: torch.Tensor) -> None:
    """The whole is as large as the size."""
    transport.all_gather(tensor[: tensor.numel() // transport.size], range(transport.size)).wait()


def reduce_scatter(transport: Transport, tensor: torch.Tensor) -> None:
    """The whole is as large as the size."""
    transport.reduce_scatter(tensor, range(transport.size)).wait()


def all_to_all(transport: Transport, tensor: torch.Tensor) -> None:
    """All pieces of a rank are as large as the size."""
    pieces = tensor.chunk(transport.size)
    transport.all_to_all(pieces, [piece.shape for piece in pieces], range(transport.size)).wait()


def broadcast(transport: Transport, tensor: torch.Tensor) -> None:
    """From rank 0 to all others, and an empty answer: else the source runs ahead."""
    transport.broadcast(tensor, 0, range(transport.size)).wait()
    transport.barrier()


OPERATIONS: dict[str, Operation] = {
    "all-reduce": all_reduce,
    "there and back": there_and_back,
    "both ways": both_ways,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "broadcast": broadcast,
}


def measured(context: WorkerContext, names: list[str], sizes: list[int], rounds: int) -> list[Row]:
    """What one worker sees: every operation at every size, the two ways in turns."""
    ranks = range(context.world.size)
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    shared: Transport = choose_transport(context.world)(context.world, pairs, [ranks])
    gloo: Transport = OverGloo(context.world, pairs, [ranks], tag=1, own_groups=True)
    rows = []
    for name in names:
        for size in sizes:
            tensor = torch.zeros(size // 4)
            seconds: dict[Transport, list[float]] = {gloo: [], shared: []}
            for number in range(rounds + 1):
                for way in (gloo, shared) if number % 2 else (shared, gloo):
                    runs = turn(way, shared, OPERATIONS[name], tensor)
                    seconds[way] += runs if number else []  # the first is to warm up
            everyone = [shared.all_gather_object(seconds[way]) for way in (gloo, shared)]
            slowest = [[max(run) for run in zip(*each, strict=True)] for each in everyone]
            rows.append(Row(name, len(ranks), size, tuple(slowest[0]), tuple(slowest[1])))
    shared.barrier()
    shared.close()
    gloo.close()
    return rows


def turn(way: Transport, control: Transport, operation: Operation, tensor: torch.Tensor) -> list[float]:
    """Seconds of some runs, as many as there is time for, the same number at all ranks."""
    control.barrier()
    start = time.perf_counter()
    operation(way, tensor)
    once = max(control.all_gather_object(time.perf_counter() - start))
    seconds = []
    for _ in range(int(min(max(ROUND_SECONDS / once, FEWEST), MOST))):
        start = time.perf_counter()
        operation(way, tensor)
        seconds.append(time.perf_counter() - start)
    return seconds


def table(rows: list[Row]) -> str:
    """Milliseconds, and how many times as fast shared memory is."""
    lines = [
        "| | ranks | KB | gloo median, ms | mean | shared median, ms | mean | median ratio | mean ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [f(way) * 1e3 for way in (row.gloo, row.shared) for f in (statistics.median, statistics.fmean)]
        ratios = [figures[0] / figures[2], figures[1] / figures[3]]
        told = " | ".join([*(f"{each:.3f}" for each in figures), *(f"{each:.1f}" for each in ratios)])
        lines.append(f"| {row.operation} | {row.ranks} | {row.size >> 10} | {told} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table for each number of ranks."""
    parser = make_parser("benchmarks.speed.transport", __doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="workers (default 2 and 4)")
    parser.add_argument("--operations", nargs="*", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="bytes")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each way has (default 5)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.sizes, options.rounds = [2], [SIZES[0]], 1
    torch.set_num_threads(1)  # before anything runs: the workers are forked
    for ranks in options.ranks:
        rows = fork_workers(
            lambda context: measured(context, options.operations, options.sizes, options.rounds), ranks
        )[0]
        print(f"\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
