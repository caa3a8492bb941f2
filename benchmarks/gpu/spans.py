"""Spans: the timeline of a step by the device's own clock, beside the time of the step by the host's."""

from __future__ import annotations

import itertools
import time

import torch

import polylane
from benchmarks.gpu import gpt
from benchmarks.gpu.setting import Row, Setting, synchronize


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Time steps of four microbatches, each waited for; runs in one worker."""
    small = setting.quick or device.type == "cpu"
    figures = {**gpt.SMALL, "hidden": 128} if small else {**gpt.LARGE, "layers": 8}
    torch.manual_seed(0)
    batch = gpt.tokens(8, figures["length"], figures["vocabulary"])
    plan = "data=1,microbatches=4" + ("" if small else ",precision=bfloat16")
    job = polylane.parallelize(gpt.model(**figures), gpt.loss, gpt.optimizer, example=batch, plan=plan)
    batch = tuple(tensor.to(device) for tensor in batch)
    seconds = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        job.step(batch)
        launched = time.perf_counter() - start
        synchronize(device)
        seconds.append((time.perf_counter() - start, launched))
    timeline = job.timeline(1)
    job.close()
    whole, launched = seconds[-1]
    share = timeline.makespan() / whole
    lane = timeline.lanes()[0]
    ordered = all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(lane))
    return [
        Row("spans", "a step by the host's clock, waited for", {"seconds": whole}),
        Row("spans", "until the host has launched it", {"seconds": launched}),
        Row("spans", "from the first span to the last", {"seconds": timeline.makespan(), "share": share}, share < 1.05),
        Row("spans", "computing, of that", {"seconds": timeline.busy()[0]}),
        Row("spans", "no span begins before the one before it ends", {"spans": len(lane)}, ordered),
    ]
