"""Published measurements: files of rows, what kind they are, and each as a training."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.published.gpipe import Experiment, experiment
from benchmarks.published.zero_bubble import MODELS, SCHEDULES, PipelineRun
from polylane.cost.operators.training_options import TrainingOptions
from polylane.errors import PolylaneError
from polylane.plan.recompute import Mode
from polylane.plan.sync import Shard

# Names of devices in the files, and presets.
DEVICES = {"A100": "a100-80g", "a100_80gb": "a100-80g", "a100_40gb": "a100-40g", "h100_80gb": "h100-80g"}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8", "fp32": "float32"}
SHARDING: dict[str, Shard] = {"zero3": "parameters", "zero2": "gradients"}
RECOMPUTE: dict[str, Mode] = {"full": "full", "none": "none"}
# What links hosts, where a file says it, or by the kind of file and device.
LINKS = {"": "infiniband-hdr-4x200", "800 Gb/s per node": "infiniband-hdr-4x200"}
FSDP_LINKS = {"a100-80g": "roce-200", "a100-40g": "roce-200", "h100-80g": "roce-400"}


@dataclass(frozen=True)
class Decoder:
    """The model of a row: one with fused attention and no dropout, or one that keeps its scores.

    Attributes:
        layers, hidden, ffn, heads, length, vocab: sizes.
        fused: whether attention is one operator.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    length: int
    vocab: int
    fused: bool


@dataclass(frozen=True)
class Row:
    """One measurement of a decoder.

    Attributes:
        kind: of its file.
        name: for reports.
        model: what was trained.
        device, link: presets.
        gpus, per_host: how many.
        data, tensor, pipeline: degrees.
        microbatch: samples of a replica at a time; None: not told.
        batch: samples of a step.
        method: how, with the dtype of everything but the products of blocks.
        products: the dtype of these.
        seconds: of a step, as measured.
        problem: what is equal for plans that compete; None: none do.
        shard: what replicas share out (ZeRO).
    """

    kind: str
    name: str
    model: Decoder
    device: str
    link: str
    gpus: int
    per_host: int
    data: int
    tensor: int
    pipeline: int
    microbatch: int | None
    batch: int
    method: TrainingOptions
    products: str
    seconds: float
    problem: Hashable
    shard: Shard = "none"


@dataclass(frozen=True)
class Speedup:
    """One measurement of AmoebaNet-D in a pipeline, relative to another one.

    Attributes:
        kind: of its file.
        name: for reports.
        run: what was trained, and how.
        speedup: as measured.
    """

    kind: str
    name: str
    run: Experiment
    speedup: float


@dataclass(frozen=True)
class Throughput:
    """One measurement of a GPT model in a pipeline.

    Attributes:
        kind: of its file.
        name: for reports.
        run: what was trained, and how.
        seconds: of a step, as measured.
        memory: bytes of the worker that has most, as measured.
        problem: what is equal for schedules that compete.
    """

    kind: str
    name: str
    run: PipelineRun
    seconds: float
    memory: float
    problem: Hashable


AnyRow = Row | Speedup | Throughput
Record = Mapping[str, str]
_Name = TypeVar("_Name", bound=str)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        columns: that rows of this kind need.
        row: what one of them says.
    """

    columns: tuple[str, ...]
    row: Callable[[Record], AnyRow]


def gpt_plan(r: Record) -> Row:
    """Megatron-DeepSpeed on one plan: gradients are summed in 16 bits, after the last backward pass."""
    data, tensor, pipeline, microbatch = (count(r, k) for k in ("data", "tensor", "pipeline", "microbatch"))
    layers, hidden, ffn, heads = (count(r, k) for k in ("layers", "hidden", "ffn", "heads"))
    length, vocab = (count(r, k) for k in ("seq_len", "vocab"))
    return Row(
        kind="gpt_plans",
        name=f"{r['model']} on {r['gpus']} by {r['global_batch']}: {data}x{tensor}x{pipeline}, {microbatch} at a time",
        model=Decoder(layers, hidden, ffn, heads, length, vocab, fused=False),
        device=named(DEVICES, r, "gpu"),
        link=named(LINKS, r, "inter_link"),
        gpus=count(r, "gpus"),
        per_host=count(r, "gpus_per_node"),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        microbatch=microbatch,
        batch=count(r, "global_batch"),
        method=TrainingOptions(
            dtype=named(DTYPES, r, "precision"), recompute=named(RECOMPUTE, r, "recompute"), overlap=False
        ),
        products=named(DTYPES, r, "precision"),
        seconds=figure(r, "step_seconds"),
        problem=(r["model"], r["gpus"], r["global_batch"]),
    )


def fsdp_mpt(r: Record) -> Row:
    """FSDP; the seconds follow from the flops per second."""
    layers, hidden, heads, length, vocab = (count(r, k) for k in ("layers", "hidden", "heads", "seq_len", "vocab"))
    batch, gpus, device = count(r, "global_batch"), count(r, "gpus"), named(DEVICES, r, "gpu")
    flops = 3 * (2 * count(r, "params") * length + layers * 4 * hidden * length**2)
    products = named(DTYPES, r, "compute_dtype")
    return Row(
        kind="fsdp_mpt",
        name=f"{r['model']} at {length} on {gpus} {r['gpu']} in {r['compute_dtype']}, {r['microbatch']} at a time",
        model=Decoder(layers, hidden, 4 * hidden, heads, length, vocab, fused=True),
        device=device,
        link=FSDP_LINKS[device],
        gpus=gpus,
        per_host=count(r, "gpus_per_node"),
        data=gpus,
        tensor=1,
        pipeline=1,
        microbatch=count(r, "microbatch"),
        batch=batch,
        method=TrainingOptions(
            dtype="bfloat16",
            masters=r["master_weights"] != "bf16",
            recompute=named(RECOMPUTE, r, "recompute"),
        ),
        shard=named(SHARDING, r, "sharding"),
        products=products,
        seconds=flops * batch / gpus / (figure(r, "model_tflops_per_gpu") * 1e12),
        problem=None,
    )


def megatron(r: Record) -> Row:
    """Megatron-LM; the seconds follow from the flops per second of the device (Narayanan et al., 2021, section 3.1)."""
    layers, hidden, heads, length, vocab = (count(r, k) for k in ("layers", "hidden", "heads", "seq_len", "vocab"))
    batch, gpus, dtype = count(r, "global_batch"), count(r, "gpus"), named(DTYPES, r, "compute_dtype")
    flops = 96 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    return Row(
        kind="megatron",
        name=f"{r['params_billion']} B on {gpus}: {r['data']}x{r['tensor']}x{r['pipeline']}",
        model=Decoder(layers, hidden, 4 * hidden, heads, length, vocab, fused=False),
        device=named(DEVICES, r, "gpu"),
        link="infiniband-hdr-200",
        gpus=gpus,
        per_host=count(r, "gpus_per_node"),
        data=count(r, "data"),
        tensor=count(r, "tensor"),
        pipeline=count(r, "pipeline"),
        microbatch=None,
        batch=batch,
        method=TrainingOptions(dtype=dtype, recompute=named(RECOMPUTE, r, "recompute"), overlap=False),
        products=dtype,
        seconds=flops / gpus / (figure(r, "hardware_tflops_per_gpu") * 1e12),
        problem=None,
    )


def gpipe(r: Record) -> Speedup:
    """torchgpipe; the GPipe paper's speed-up is of other devices, and only told."""
    run = experiment(count(r, "stages"), count(r, "microbatches"))
    other = f" (GPipe's on TPU: {r['gpipe_paper_speedup']}x)" if r.get("gpipe_paper_speedup") else ""
    return Speedup(
        kind="gpipe",
        name=f"stages {run.stages}, microbatches {run.microbatches}, batch {run.batch}{other}",
        run=run,
        speedup=figure(r, "torchgpipe_speedup"),
    )


def zero_bubble(r: Record) -> Throughput:
    """Schedules of one model; the seconds follow from the samples per device and second."""
    model, schedule = named({name: name for name in MODELS}, r, "model"), named(SCHEDULES, r, "schedule")
    run = PipelineRun(MODELS[model], count(r, "stages"), count(r, "microbatches"), schedule)
    return Throughput(
        kind="zero_bubble",
        name=f"{model} on {run.stages}, {run.microbatches} microbatches: {r['schedule']} as {schedule}",
        run=run,
        seconds=run.batch / run.stages / figure(r, "samples_per_gpu_per_second"),
        memory=figure(r, "memory_gb") * 1e9,
        problem=(model, run.stages, run.microbatches),
    )


_SIZES = ("layers", "hidden", "heads", "seq_len", "vocab", "gpu", "gpus", "gpus_per_node", "global_batch", "recompute")
_DEGREES = ("data", "tensor", "pipeline")
KINDS = {
    "gpt_plans": Kind(
        (*_SIZES, *_DEGREES, "model", "ffn", "inter_link", "precision", "microbatch", "step_seconds"), gpt_plan
    ),
    "fsdp_mpt": Kind(
        (
            *_SIZES,
            *("model", "params", "compute_dtype", "master_weights", "sharding", "microbatch", "model_tflops_per_gpu"),
        ),
        fsdp_mpt,
    ),
    "megatron": Kind(
        (*_SIZES, *_DEGREES, "params_billion", "compute_dtype", "hardware_tflops_per_gpu"),
        megatron,
    ),
    "gpipe": Kind(("stages", "microbatches", "torchgpipe_speedup"), gpipe),
    "zero_bubble": Kind(
        ("model", "stages", "microbatches", "schedule", "samples_per_gpu_per_second", "memory_gb"), zero_bubble
    ),
}


def named(known: Mapping[str, _Name], r: Record, column: str) -> _Name:
    """What a name in a column stands for.

    Raises:
        PolylaneError: nobody knows it.
    """
    if r[column] not in known:
        raise PolylaneError(f"{column} {r[column]!r} is not known, known are {', '.join(filter(None, known))}")
    return known[r[column]]


def count(r: Record, column: str) -> int:
    """A whole number of a column.

    Raises:
        PolylaneError: it is none, or below 1.
    """
    value = r[column] or ""
    if not value.isascii() or not value.isdecimal() or int(value) < 1:
        raise PolylaneError(f"{column} must be a whole number from 1, not {value!r}")
    return int(value)


def figure(r: Record, column: str) -> float:
    """A number of a column.

    Raises:
        PolylaneError: it is none, or not above 0.
    """
    try:
        value = float(r[column])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise PolylaneError(f"{column} must be a number above 0, not {r[column]!r}")
    return value


def kind_of(columns: Collection[str]) -> str:
    """The kind of file that has such columns.

    Raises:
        PolylaneError: some are missing; those of the kind that lacks the smallest share are named.
    """
    missing = {name: [c for c in kind.columns if c not in columns] for name, kind in KINDS.items()}
    closest = min(missing, key=lambda name: len(missing[name]) / len(KINDS[name].columns))
    if missing[closest]:
        raise PolylaneError(f"columns {', '.join(missing[closest])} are missing for a file of the kind {closest}")
    return closest


def read(path: Path) -> list[AnyRow]:
    """The rows of a file.

    Raises:
        PolylaneError: it cannot be read, columns are missing, or a value is not what its column needs; it names both.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            kind = KINDS[kind_of(list(reader.fieldnames or ()))]
            return [_row(kind, record, line) for line, record in enumerate(reader, 2)]
    except OSError as error:
        raise PolylaneError(f"{path}: {error.strerror}") from error
    except PolylaneError as error:
        raise PolylaneError(f"{path}: {error}") from None


def _row(kind: Kind, record: Record, line: int) -> AnyRow:
    try:
        return kind.row(record)
    except PolylaneError as error:
        raise PolylaneError(f"line {line}: {error}") from None
