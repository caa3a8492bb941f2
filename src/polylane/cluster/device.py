"""Device: what computes, how fast, and how much of that is left for operators that are small or misshapen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

from polylane.cluster.link import Natural, Positive, Share
from polylane.errors import PolylaneError

_Count = Annotated[int, pydantic.Field(strict=True, gt=0)]

# What dense matmuls reach of the peak where nothing was measured: what an A100 does, 271 of 312 TFLOP/s.
ACHIEVED = 0.87


class Device(pydantic.BaseModel):
    """One device, or one worker of a CPU host.

    A matmul is cut into tiles, of which every compute unit works on one at a time;
    :mod:`polylane.cost.operators.roofline` says
    what follows from the figures. The defaults are of a device without any of these losses.

    Attributes:
        kind: its name, for reports.
        type: whose kernels run: "cpu" or "cuda"; it decides what operators keep for their backward pass.
        memory: bytes.
        flops: peak floating-point operations per second of dense matmuls, by dtype ("float32", "bfloat16", ...).
        achieved: the most that was measured of them, likewise; 0.87 of the peak where nothing was.
        bandwidth: of its own memory, bytes per second.
        overhead: seconds that one operator costs at least, since it must start and end.
        price: per hour; 0 where it is not known.
        speed: 0.8 for a straggler that needs 1 / 0.8 of the time for everything.
        sustained: what is left of ``achieved`` in a long run, where power and heat lower the clock.
        streaming: what operators that compute little reach of ``bandwidth``.
        units: compute units that work side by side (streaming multiprocessors of a GPU).
        tiles: sizes (rows, columns) of the parts of a result that one unit computes at a time, largest first.
        edge: how much dearer small tiles are, which read more for each result: the reads of one more operation in
            1 / ``edge`` that the largest tile's edges cost.
        depth: terms of a sum after which half of the time a tile takes is its start.
        waves: 1 where the last tiles keep everybody waiting though they fill only some units; 0 where none is lost.
        aligned: bytes to which the rows of a matrix must be aligned for the full rate.
        misaligned: exponent of the loss where they are aligned to fewer bytes: (bytes / ``aligned``) ** ``misaligned``.
        attention: what a fused attention kernel reaches of a matmul's sustained rate, over long sequences; causal ones
            count half.
        attention_length: positions of a sequence at which it reaches half of that.
        dispatch: seconds of the host that it takes to issue one operator, forward or backward; it runs ahead while the
            device computes, so that a block takes as long as the slower of the two.
        turn: seconds of the host from one pass of a microbatch to the next, beyond its operators.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    kind: str = "device"
    type: Literal["cpu", "cuda"] = "cuda"
    memory: _Count
    flops: dict[str, Positive]
    achieved: dict[str, Positive] = {}
    bandwidth: Positive
    overhead: Natural = 0.0
    price: Natural = 0.0
    speed: Positive = 1.0
    sustained: Share = 1.0
    streaming: Share = 1.0
    units: _Count = 1
    tiles: tuple[tuple[_Count, _Count], ...] = ((1, 1),)
    edge: Natural = 0.0
    depth: Natural = 0.0
    waves: Annotated[float, pydantic.Field(ge=0, le=1, strict=True)] = 0.0
    aligned: _Count = 1
    misaligned: Natural = 0.0
    attention: Share = 0.5
    attention_length: Natural = 0.0
    dispatch: Natural = 0.0
    turn: Natural = 0.0

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Device:
        if not self.flops:
            raise ValueError("flops must name at least one dtype, such as float32")
        if not self.tiles:
            raise ValueError("tiles must name at least one size, such as [128, 128]")
        for dtype, rate in self.achieved.items():
            if rate > self.flops.get(dtype, math.inf):
                raise ValueError(f"achieved.{dtype} must be at most flops.{dtype}, {self.flops[dtype]:g}, not {rate:g}")
        missing = {dtype: peak * ACHIEVED for dtype, peak in self.flops.items() if dtype not in self.achieved}
        if missing:  # a frozen model: what is derived is filled in once, here
            object.__setattr__(self, "achieved", {**self.achieved, **missing})
        return self

    def rate(self, dtype: str) -> float:
        """Operations per second that matmuls of a dtype sustain, at best.

        Raises:
            PolylaneError: the device does not say how fast it is with that dtype.
        """
        return self._rate_of(self.achieved, dtype) * self.sustained * self.speed

    def peak(self, dtype: str) -> float:
        """Peak operations per second, as :meth:`rate`; what utilization is a share of."""
        return self._rate_of(self.flops, dtype)

    @property
    def stream(self) -> float:
        """Bytes per second that operators which compute little move."""
        return self.bandwidth * self.streaming * self.speed

    def _rate_of(self, rates: Mapping[str, float], dtype: str) -> float:
        if dtype not in rates:
            raise PolylaneError(f"device {self.kind}: flops.{dtype} is missing, known are {', '.join(rates)}")
        return rates[dtype]
