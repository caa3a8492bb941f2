"""What the costs of polylane predict for a published training: its modules captured, laid out, priced, and composed.

One block of a decoder is priced and counted as often as there are layers: those that have their like on both sides
are all alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.published import models
from benchmarks.published.closed_form import block_seconds, pipelined, scattered, sharded
from benchmarks.published.rows import Decoder, Row
from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cluster.spec import parse
from polylane.cost.cost_table import Clock, CostTable, OperatorWork, ShardedGraphCost
from polylane.cost.network import collectives as network
from polylane.cost.operators.roofline import Roofline
from polylane.cost.shard_traffic import ShardTrafficSeconds
from polylane.cost.stage_cost import Range
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph, Node
from polylane.sharding.layout import choose_layout

# Of the model that is captured: a block with its like on both sides.
LAYERS = 3
ITEM = 2  # bytes of an element in the passes: all rows are of 16 bits
# Bytes that Adam's step moves for each parameter: the float32 one is read and written, its gradient read and set to
# zero, both moments read and written, the 16-bit copy written; or all of them in 16 bits, without a copy.
ADAM = {True: 4 * 4 + 2 * 2 * 4 + 2, False: 4 * 2 + 2 * 2 * 2}
# What Megatron's fused softmax needs: a multiple of that many (samples x heads) on a rank.
FUSED_HEADS = 4
# Where a row does not say how many samples at a time and virtual stages: the fastest of these.
MICROBATCHES, CHUNKS = (1, 2, 4, 8), (1, 2)


@dataclass(frozen=True)
class Parts:
    """Nodes of a captured decoder: before the blocks, of one block with its like on both sides, behind them."""

    before: Range
    block: Range
    behind: Range


@dataclass(frozen=True)
class Prices:
    """Seconds of both passes of one microbatch on one rank.

    Attributes:
        before, block, behind: as in :class:`Parts`.
    """

    before: float
    block: float
    behind: float

    def stages(self, layers: int, pipeline: int, turn: float) -> list[float]:
        """Seconds of every stage with equal numbers of blocks, and a turn of the host for each pass."""
        each = layers / pipeline * self.block + 2 * turn
        stages = [each] * pipeline
        stages[0] += self.before
        stages[-1] += self.behind
        return stages


@dataclass
class EightBitProducts:
    """A clock with products of parameters in 8 bits, and all else as another clock has it."""

    plain: Roofline
    products: Roofline

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        """Seconds of both passes."""
        clock = self.products if work.operator.call.base == "linear" else self.plain
        return clock(work)

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        """Seconds of the host."""
        return self.plain.issued(work)


@cache
def captured(model: Decoder, steps: bool, layers: int = LAYERS) -> Graph:
    """A decoder on the meta device, with so many layers."""
    with torch.device("meta"):
        module = models.Decoder(
            model.vocab,
            model.length,
            model.hidden,
            model.ffn,
            model.heads,
            layers=layers,
            fused=model.fused,
            dropout=0.0 if model.fused else 0.1,
            steps=steps,
        )
    tokens = torch.zeros(2, model.length, dtype=torch.long, device="meta")
    return capture(module, models.loss, (tokens, tokens), trainable=[name for name, _ in module.named_parameters()])


def parts(graph: Graph) -> Parts:
    """Where the second block, all before the first and all behind the last begin and end."""

    def within(index: int) -> list[int]:
        path = f"blocks.{index}"
        return [i for i, n in enumerate(graph.nodes) if n.module == path or n.module.startswith(f"{path}.")]

    first, second = within(0), within(1)
    size = len(second)
    behind = first[0] + size
    while within((behind - first[0]) // size):
        behind += size
    return Parts((0, first[0]), (second[0], second[-1] + 1), (behind, len(graph.nodes)))


@cache
def sheet(model: Decoder, steps: bool, tensor: int, layers: int = LAYERS) -> ShardedGraphCost:
    """The decoder as Megatron divides it (Shoeybi et al., 2019): between products, every rank has all that is added."""
    graph = captured(model, steps, layers)
    shape = (graph.samples, model.length, model.hidden)
    pins = {node.name: "replicate" for node in graph.nodes if _stream(node, shape)}
    splits = {}
    if tensor > 1:
        splits = dict(choose_layout(graph, {"tensor": tensor}, graph.samples, pins={"tensor": pins}).splits)
    return ShardedGraphCost(graph, splits, graph.samples, item=ITEM)


def _stream(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether a node normalizes, drops or adds what the blocks hand on."""
    name = node.op.removeprefix("aten.").split(".")[0]
    return name in ("layer_norm", "dropout", "add") and node.shape == shape


@cache
def cluster(device: str, gpus: int, per_host: int, link: str) -> Cluster:
    """Hosts that are filled; one host may have devices that do nothing."""
    return parse(f"{math.ceil(gpus / per_host)}x{per_host}:{device},hosts={link}")


def prices(row: Row, microbatch: int) -> Prices:
    """Of the parts of a row's model."""
    model, found = replace(row.model, layers=0), cluster(row.device, row.gpus, row.per_host, row.link)
    steps = not model.fused and microbatch * model.heads // row.tensor % FUSED_HEADS != 0
    own = sheet(model, steps, row.tensor)
    device = found.device(0)
    where = parts(own.graph)
    rest = priced(own, found, row.tensor, microbatch, clock_of(device, row.method.dtype, row.method.dtype))
    blocks = rest
    if row.products != row.method.dtype:
        blocks = priced(own, found, row.tensor, microbatch, clock_of(device, row.method.dtype, row.products))
    recompute = row.method.recompute
    return Prices(
        block_seconds(rest, where.before),
        block_seconds(blocks, where.block, recompute),
        block_seconds(rest, where.behind),
    )


def clock_of(device: Device, dtype: str, products: str) -> Clock:
    """Of passes with products of parameters in another dtype, where they are."""
    plain = Roofline(device, dtype, ITEM)
    return plain if products == dtype else EightBitProducts(plain, Roofline(device, products, ITEM))


def priced(own: ShardedGraphCost, found: Cluster, tensor: int, samples: int, clock: Clock) -> CostTable:
    """What every node takes on a rank, with tensor ranks that are neighbours."""

    def exchange(collective: str, size: float) -> float:
        if collective == "message":
            return network.message_seconds(found, size, 0, 1)
        return network.collective_seconds(found, collective, size, range(tensor), None)

    return own.table(samples, clock, {"tensor": exchange})


def elements(model: Decoder, tensor: int) -> tuple[float, float]:
    """Parameters of a rank: of a block, and of all that is not in blocks."""
    own = sheet(replace(model, layers=0), False, tensor)
    counts = {name: math.prod(own.busiest_shape(f"parameter:{name}")) for name in own.graph.parameters}
    block = sum(count for name, count in counts.items() if name.startswith("blocks.1."))
    return block, sum(count for name, count in counts.items() if not name.startswith("blocks."))


def predicted(row: Row) -> float:
    """Seconds of a step."""
    if row.shard != "none":
        return _sharded(row)
    samples = row.batch // row.data
    if row.microbatch is not None:
        return _pipelined(row, row.microbatch, 1)
    chunks = [v for v in CHUNKS if v == 1 or (row.pipeline > 1 and row.model.layers % (v * row.pipeline) == 0)]
    return min(_pipelined(row, b, v) for b in MICROBATCHES if samples % b == 0 for v in chunks)


def _pipelined(row: Row, microbatch: int, chunks: int) -> float:
    """Stages one behind the other, then gradients are summed, then the optimizer's step."""
    found = cluster(row.device, row.gpus, row.per_host, row.link)
    stages = prices(row, microbatch).stages(row.model.layers, row.pipeline, found.device(0).turn)
    message = _message(row, found, microbatch) if row.pipeline > 1 else 0.0
    passes = pipelined(stages, math.ceil(row.batch / (row.data * microbatch)), message, chunks)
    block, rest = elements(row.model, row.tensor)
    held = block * row.model.layers / row.pipeline + rest
    group = range(0, row.data * row.tensor, row.tensor)
    reduced = network.collective_seconds(found, "all_reduce", held * ITEM, group, None)
    return passes + reduced + _update(held, row, found.device(0))


def _message(row: Row, found: Cluster, microbatch: int) -> float:
    """Seconds of what goes from stage to stage while all devices of a host send."""
    size = float(microbatch * row.model.length * row.model.hidden * ITEM)
    return scattered(found, size, range(row.tensor), row.data * row.tensor, min(row.gpus, row.per_host))


def _update(count: float, row: Row, device: Device) -> float:
    return count * ADAM[row.method.masters] / device.stream


def _sharded(row: Row) -> float:
    """Replicas that hold a part of everything."""
    found = cluster(row.device, row.gpus, row.per_host, row.link)
    assert row.microbatch is not None
    compute = sum(prices(row, row.microbatch).stages(row.model.layers, 1, found.device(0).turn))
    block, rest = elements(row.model, row.tensor)
    pieces = [block] * row.model.layers + [rest]
    gathers = 2 if row.shard == "parameters" else 1
    blocks = [count * ITEM for count in pieces]
    traffic = ShardTrafficSeconds.of(found, blocks, gathers * blocks, range(row.gpus))
    rounds = math.ceil(row.batch / (row.gpus * row.microbatch))
    return sharded(compute, traffic, rounds) + _update(sum(pieces) / row.gpus, row, found.device(0))
