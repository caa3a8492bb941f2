"""python -m benchmarks.planner.scale: how long planning takes as devices and blocks grow, on one core."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import make_parser

RECIPE = Path(__file__).parents[2] / "examples" / "gpt.py"


@dataclass(frozen=True)
class Model:
    """A decoder of sequences of 2,048 tokens."""

    name: str
    layers: int
    hidden: int
    heads: int
    batch: int


GPT3 = Model("GPT-3 175 B", 96, 12288, 96, 1536)
TRILLION = Model("1 T", 128, 25600, 160, 3072)
HALF, TWICE = (Model(f"{n} layers of GPT-3", n, 12288, 96, 1536) for n in (48, 192))
# Hosts of eight devices each.
CASES = (
    *((GPT3, hosts, "a100-80g") for hosts in (8, 32, 128, 512, 2048)),
    *((each, 128, "a100-80g") for each in (HALF, TWICE)),
    (TRILLION, 2048, "h100-80g"),
)
QUICK = (Model("2 layers of GPT-3", 2, 12288, 96, 16), 1, "a100-80g")


def planned(model: Model, hosts: int, device: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds of a whole ``polylane plan``, of which computing, and its best plan."""
    sizes = {"hidden": model.hidden, "layers": model.layers, "heads": model.heads, "seq_len": 2048, "vocab": 51200}
    settings = [part for name, value in {**sizes, "dropout": 0}.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "polylane", "plan", str(RECIPE), "--cluster", f"{hosts}x8:{device}", "--json"]
    command += ["--batch", str(model.batch), "--dtype", "bfloat16", "--recompute", "full", *settings]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return (
        took,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        json.loads(done.stdout)["plans"][0],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan every case and print the table."""
    options = make_parser("benchmarks.planner.scale", __doc__).parse_args(arguments)
    print("| model | devices | planned in | of it computing | best plan | its step |\n|---|---|---|---|---|---|")
    for model, hosts, device in [QUICK] if options.quick else CASES:
        took, own, best = planned(model, hosts, device)
        cells = (
            f"{8 * hosts:,} {device}",
            f"{took:.1f} s",
            f"{own:.1f} s",
            best["plan"],
            f"{best['step_seconds']:.3g} s",
        )
        print(f"| {model.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
