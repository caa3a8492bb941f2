"""Device: speed and memory of a GPU or CPU worker, with the losses of operators that are small or misshapen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

from polylane.cluster.link import Natural, Positive, Share, Units
from polylane.errors import PolylaneError
from polylane.yaml_file import Count, StrictMapping

# Share of the peak that dense matmuls reach where nothing was measured: that of an A100, 271 of 312 TFLOP/s.
ACHIEVED = 0.87
MOST_EXPONENT = 8  # of a loss: more would be nothing of the rate


class Device(StrictMapping):
    """One device, or one worker of a CPU host.

    A matmul is cut into tiles, of which every compute unit works on one at a time; the module
    :mod:`polylane.cost.operators.roofline` computes times from these figures. The defaults are those of a device
    without any losses.

    Attributes:
        kind: name of the device, for reports.
        type: "cpu" or "cuda", whose kernels run; it decides what operators save for their backward pass.
        memory: memory of the device, in bytes.
        flops: peak floating-point operations per second of dense matmuls, by dtype ("float32", "bfloat16", ...).
        achieved: highest measured rate of dense matmuls, by dtype; 0.87 of the peak where nothing was measured.
        bandwidth: bandwidth of the device's own memory, in bytes per second.
        overhead: seconds that one operator costs at least, for its start and end.
        price: price per hour; 0 where it is not known.
        speed: speed factor; 0.8 for a straggler that needs 1 / 0.8 of the time for everything.
        sustained: share of ``achieved`` that is left in a long run, where power and heat lower the clock.
        streaming: share of ``bandwidth`` that memory-bound operators reach.
        units: compute units that work in parallel (streaming multiprocessors of a GPU).
        tiles: sizes (rows, columns) of the parts of a result that one unit computes at a time, largest first.
        edge: how much dearer small tiles are, which read more for each result: the reads of one more operation in
            1 / ``edge`` that the largest tile's edges cost.
        depth: terms of a sum after which half of the time a tile takes is its start.
        waves: share of wave quantization: 1 where the last tiles take a whole wave though they fill only some units; 0
            where nothing is lost.
        aligned: bytes to which the rows of a matrix must be aligned for the full rate.
        misaligned: exponent of the loss where they are aligned to fewer bytes: (bytes / ``aligned``) ** ``misaligned``.
        attention: share of a matmul's sustained rate that a fused attention kernel reaches over long sequences; causal
            ones count half.
        attention_length: positions of a sequence at which it reaches half of that.
        dispatch: host seconds to launch one operator, forward or backward; the host runs ahead while the device
            computes, so that a block takes as long as the slower of the two.
        turn: host seconds from one pass of a microbatch to the next, beyond its operators.
        codecs: bytes of float32 gradients per second that a codec compresses and decompresses, by its name
            ("bfloat16", "float16", "powersgd", "top_k"), where it was measured.
    """

    kind: str = "device"
    type: Literal["cpu", "cuda"] = "cuda"
    memory: Annotated[Count, pydantic.Field(le=2**62)]
    flops: dict[str, Positive]
    achieved: dict[str, Positive] = pydantic.Field(default={})
    bandwidth: Positive
    overhead: Natural = 0.0
    price: Natural = 0.0
    speed: Positive = 1.0
    sustained: Share = 1.0
    streaming: Share = 1.0
    units: Units = 1
    tiles: tuple[tuple[Units, Units], ...] = ((1, 1),)
    edge: Natural = 0.0
    depth: Natural = 0.0
    waves: Annotated[float, pydantic.Field(ge=0, le=1, strict=True)] = 0.0
    aligned: Units = 1
    misaligned: Annotated[Natural, pydantic.Field(le=MOST_EXPONENT)] = 0.0
    attention: Share = 0.5
    attention_length: Natural = 0.0
    dispatch: Natural = 0.0
    turn: Natural = 0.0
    codecs: dict[str, Positive] = pydantic.Field(default={})

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
        """Return the operations per second that large matmuls of a dtype sustain.

        Raises:
            PolylaneError: the device has no figure for that dtype.
        """
        return self._rate_of(self.achieved, dtype) * self.sustained * self.speed

    def peak(self, dtype: str) -> float:
        """Return the peak operations per second of a dtype, the reference of MFU; raises as :meth:`rate`."""
        return self._rate_of(self.flops, dtype)

    @property
    def stream(self) -> float:
        """Bytes per second that memory-bound operators reach."""
        return self.bandwidth * self.streaming * self.speed

    def _rate_of(self, rates: Mapping[str, float], dtype: str) -> float:
        if dtype not in rates:
            raise PolylaneError(f"device {self.kind}: flops.{dtype} is missing, known are {', '.join(rates)}")
        return rates[dtype]
