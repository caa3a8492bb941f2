"""python -m tests.support.nccl [--training NAME] [--workers N] PLAN ...: what would be launched over NCCL, judged.

Without plans, every family of benchmarks.gpu on 2 and 4 workers. Exits with 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

from benchmarks.gpu.families import EQUAL, OWN, TIMED
from polylane.plan.spec import parse
from tests.support.nccl.launch_laws import list_violations
from tests.support.nccl.recording import record_training

LAWS = ("order", "cycle", "crowd", "connect", "edge", "memory")
WIDE = ("data=8", "data=8,shard=parameters", "tensor=8", "pipeline=8,microbatches=8", "data=2,pipeline=2,tensor=2")


def main() -> int:
    """Record and judge each plan, and print a row for it."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.nccl", description=__doc__)
    parser.add_argument("plans", nargs="*", metavar="PLAN")
    parser.add_argument("--training", default="", help="a training of benchmarks.gpu.trainings")
    parser.add_argument("--brief", action="store_true", help="only the table, not each broken law")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plans = options.plans or [p for n in (2, 4) for p in (*EQUAL[n], *OWN[n], *TIMED[n])] + list(WIDE)
    print("| plan | to one device | communicators | launches a step |", " | ".join(LAWS), "|")
    print("|---|---:|---:|---:|" + "---:|" * len(LAWS))
    broken = 0
    for plan in plans:
        name = options.training or ("gpt, untied" if "pipedream" in plan else "gpt")
        recording = record_training(name, plan, parse(plan).processes)
        violations = list_violations(recording.launches)
        counts = Counter(violation.partition(":")[0] for violation in violations)
        steps = sum(launch.phase.startswith("step") for launch in recording.launches[0]) // 2
        row = " | ".join(str(counts[law] or "") for law in LAWS)
        print(
            f"| `{plan}` | {recording.difference:.0e} | {max(recording.communicators)} | {steps} | {row} |", flush=True
        )
        broken += bool(violations)
        if not options.brief:
            print(*(f"    {violation}\n" for violation in violations), sep="", end="", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
