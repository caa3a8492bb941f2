"""Measure a machine with a GPU: equality, memory, spans and speed, each beside the CPU's figures.

python -m benchmarks.gpu                      on the GPUs of this machine (make gpu installs and runs it)
python -m benchmarks.gpu --device cpu --quick  the same measurements, small, on the CPU
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.gpu import families, prediction, report, resuming, teams
from benchmarks.gpu.setting import Row, Setting
from benchmarks.harness import make_parser

ALONE = tuple(teams.ALONE)


def main(words: list[str] | None = None) -> int:
    """Measure, print and write; return the exit status."""
    parser = make_parser("benchmarks.gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="devices of the workers")
    parser.add_argument("--only", nargs="*", choices=report.SUBJECTS, help="subjects; default: all")
    parser.add_argument("--run", type=Path, default=Path("run/gpu"), help="folder of report.json and report.md")
    given = parser.parse_args(words)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            "make gpu: torch sees no CUDA device here; `python -m benchmarks.gpu --device cpu --quick` runs the same "
            "measurements on the CPU",
            file=sys.stderr,
        )
        return 2
    setting = Setting(given.device, given.quick)
    given.run.mkdir(parents=True, exist_ok=True)
    machine = teams.describe_machine(setting)
    rows = _measure(setting, given.only or list(report.SUBJECTS), given.run)
    report.show(rows, machine)
    report.write(rows, machine, given.run)
    failed = [f"{row.subject}: {row.name}" for row in rows if row.holds is False]
    print(f"{given.run}/report.json and report.md are written")
    print("Everything holds." if not failed else f"Not so: {'; '.join(failed)}")
    return 1 if failed else 0


def _measure(setting: Setting, subjects: list[str], folder: Path) -> list[Row]:
    rows: list[Row] = []
    host = Setting("cpu", setting.quick)
    for subject in [subject for subject in ALONE if subject in subjects]:
        print(f"{subject} …", flush=True)
        own = teams.measure_alone(setting, [subject])
        rows += own
        # What is not compared inside the worker stands beside the CPU's.
        if setting.device != "cpu" and subject in ("spans", "memory", "speed"):
            rows += [
                Row(row.subject, f"{row.name} (CPU, small model)", row.figures)
                for row in teams.measure_alone(host, [subject])
            ]
    if "families" in subjects:
        for workers in (2, 4):
            print(f"plans for {workers} workers …", flush=True)
            found = teams.measure_families(setting, workers)
            beside = teams.measure_families(host, workers) if setting.device != "cpu" else {}
            rows += families.rows_of(workers, families.plans_of(workers, setting.quick), found, beside)
    if "prediction" in subjects:
        print("prediction …", flush=True)
        steps = [row.figures["ms a step"] / 1e3 for row in rows if row.subject == "speed" and row.name == "polylane"]
        with teams.environment_of(setting) as environment:
            rows += prediction.measure(setting, folder, steps[0] if steps else None, environment)
    if "resuming" in subjects:
        print("resuming …", flush=True)
        with teams.environment_of(setting) as environment, teams.environment_of(host) as without:
            rows += resuming.measure(setting, folder, environment, without)
    return rows


if __name__ == "__main__":
    sys.exit(main())
