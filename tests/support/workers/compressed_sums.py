"""A small model whose gradients ranks that are threads sum by a codec, and the same sums worked out in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.program.program import GradientBucket
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor
from polylane.runtime.sync.compression.top_k import TopKCompressor
from tests.support.workers.thread_transport import LocalTransport, run_local

SAMPLES = 23
# Where each rank's rows end, by the number of ranks: uneven.
ENDS = {1: (23,), 2: (8, 23), 3: (3, 12, 23), 4: (3, 9, 16, 23)}

# In the order in which a backward pass finishes them.
TOGETHER = (
    ("head.bias", "head.weight"),
    ("second.weight",),
    ("second.bias", "first.bias", "first.weight"),
    ("conv.bias", "conv.weight"),
)

Tensors = dict[str, Tensor]


class Net(nn.Module):
    """A convolution and layers, one of them with a matrix too small to be worth compressing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.first = nn.Linear(36, 8)
        self.second = nn.Linear(8, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def net(dtype: torch.dtype = torch.float64) -> Net:
    """The same weights every time."""
    model, random = Net(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=random, dtype=torch.float64) * 0.4).to(dtype)
    return model


def backward(model: Net, step: int, rank: int, ranks: int) -> None:
    """A rank's share of the gradient of the mean loss over the batch of a step."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 1, 5, 5, generator=random, dtype=torch.float64)
    targets = torch.randint(0, 2, (SAMPLES,), generator=random)
    rows = slice((0, *ENDS[ranks])[rank], ENDS[ranks][rank])
    outputs = model(inputs[rows].to(model.head.weight.dtype))
    (F.cross_entropy(outputs, targets[rows], reduction="sum") / SAMPLES).backward()


def buckets(ranks: int, together: Sequence[tuple[str, ...]] = TOGETHER) -> tuple[GradientBucket, ...]:
    """Buckets that all ranks sum."""
    return tuple(GradientBucket(f"stage0.{i}", tuple(range(ranks)), names) for i, names in enumerate(together))


def descend(model: nn.Module) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.3 * parameter.grad


@dataclass
class Seen:
    """What one rank saw, step by step."""

    sums: list[Tensors] = field(default_factory=list)
    memories: list[Tensors] = field(default_factory=list)
    bytes: list[dict[str, int]] = field(default_factory=list)  # of each bucket, as the reducer says
    given: list[int] = field(default_factory=list)  # as the transport counted
    sent: list[int] = field(default_factory=list)  # of these, what left this rank


def trained(
    codec: Callable[[], GradientCompressor],
    ranks: int,
    steps: int,
    dtype: torch.dtype = torch.float64,
    wrap: Callable[[LocalTransport], Any] = lambda transport: transport,
) -> list[Seen]:
    """Train on so many ranks; what each of them saw."""

    def work(transport: LocalTransport) -> Seen:
        return train(codec(), net(dtype), range(steps), wrap(transport))

    return run_local(ranks, work)


def train(codec: GradientCompressor, model: Net, steps: Sequence[int], transport: Any) -> Seen:
    """One rank's steps."""
    seen, parameters = Seen(), dict(model.named_parameters())
    own = buckets(transport.size)
    reducer = AllReducer(own, parameters, (), transport, codec, range(transport.size))
    for step in steps:
        given, sent = transport.counters.given, transport.counters.sent
        model.zero_grad(set_to_none=True)
        reducer.begin_last_backward()
        backward(model, step, transport.rank, transport.size)
        reducer.launch_remaining()
        for bucket in own if transport.size > 1 else ():
            reducer.wait_bucket(bucket.name)
        seen.sums.append(copied({name: p.grad for name, p in parameters.items()}))
        seen.memories.append(copied(residuals_of(codec)))
        seen.bytes.append(dict(reducer.bucket_bytes))
        seen.given.append(transport.counters.given - given)
        seen.sent.append(transport.counters.sent - sent)
        descend(model)
    return seen


def residuals_of(codec: GradientCompressor) -> Tensors:
    """What a codec of this rank has left unsent so far, by parameter; nothing of one that sends everything."""
    return codec.error_feedback.residuals if isinstance(codec, TopKCompressor | PowerSGDCompressor) else {}


def by_hand(rule: Callable[[list[Tensors]], Tensors], ranks: int, steps: int) -> list[Tensors]:
    """Train in one process with a rule that makes the sum of all ranks' shares; the sums."""
    model, found = net(), list[Tensors]()
    for step in range(steps):
        shares = list[Tensors]()
        for rank in range(ranks):
            model.zero_grad(set_to_none=True)
            backward(model, step, rank, ranks)
            shares.append(copied({name: p.grad for name, p in model.named_parameters()}))
        found.append(rule(shares))
        for name, parameter in model.named_parameters():
            parameter.grad = found[-1][name]
        descend(model)
    return found


def copied(tensors: Any) -> Tensors:
    """Copies by name, that nothing in place reaches."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


KINDS: dict[str, Callable[[], GradientCompressor]] = {
    "plain": GradientCompressor,
    "bfloat16": lambda: HalfPrecisionCompressor(torch.bfloat16),
    "float16": lambda: HalfPrecisionCompressor(torch.float16),
    "powersgd": lambda: PowerSGDCompressor(2),
    "top_k": lambda: TopKCompressor(0.1),
}


def entries(fraction: float, elements: int) -> int:
    """How many of so many entries are a fraction of them, and at least one."""
    return ceil(Fraction(str(fraction)) * elements)


def assert_alike(runs: list[Seen]) -> None:
    """All ranks have the same bits."""
    for run in runs[1:]:
        for mine, others in zip(runs[0].sums, run.sums, strict=True):
            assert all(torch.equal(mine[name], others[name]) for name in mine)


def assert_close(found: list[Tensors], expected: list[Tensors]) -> None:
    """Sums are equal in float64, step by step."""
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def matrix_sums(codec: Callable[[], GradientCompressor], shares: list[list[Tensor]]) -> list[Seen]:
    """A matrix's sums over ranks, for shares[step][rank]."""

    def work(transport: LocalTransport) -> Seen:
        own, seen = codec(), Seen()
        parameter = nn.Parameter(torch.zeros_like(shares[0][0]))
        reducer = AllReducer(
            buckets(transport.size, [("w",)]), {"w": parameter}, (), transport, own, range(transport.size)
        )
        for step in shares:
            reducer.begin_last_backward()
            parameter.grad = step[transport.rank].clone()
            reducer.launch_remaining()
            reducer.wait_bucket("stage0.0")
            seen.sums.append({"w": parameter.grad.clone()})
            seen.memories.append(copied(residuals_of(own)))
        return seen

    return run_local(len(shares[0]), work)


def drawn(seed: int, *shape: int) -> Tensor:
    """Normally distributed numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
