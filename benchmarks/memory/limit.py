"""python -m benchmarks.memory.limit: a model that does not fit into a worker's memory trains by the plan that is found.

Every process may take so many bytes of address space (``ulimit -v``). One device is told that memory ran out; then
`polylane plan --memory` finds a plan for two workers, which train under the same limit; and `polylane verify` compares
that plan with one device in float64, without the limit.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import make_parser
from polylane.cluster.figures import format_size

RECIPE = "examples/gpt.py"
WORKERS = 2


@dataclass(frozen=True)
class Case:
    """A training, and what memory there is for it.

    Attributes:
        settings: keyword arguments of the recipe.
        batch: samples of a step.
        memory: what ``polylane plan --memory`` is told.
        limit: bytes of address space that a process may take, Python and torch themselves included.
    """

    settings: tuple[str, ...]
    batch: int
    memory: str
    limit: int

    @property
    def training(self) -> list[str]:
        """The recipe and its options, as every command takes them."""
        return [RECIPE, "--batch", str(self.batch), *(word for each in self.settings for word in ("--set", each))]


FULL = Case(("layers=8", "hidden=512", "heads=8", "files=2"), 32, "600MB", round(2.3 * 2**30))
QUICK = Case(("layers=2", "hidden=32", "seq_len=16", "files=1"), 8, "600MB", 4 << 30)


def run(arguments: Sequence[str], limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run polylane's command line, each of its processes under a limit of address space if one is given."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "polylane", *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=restrict,
        # Every thread takes address space of its own.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed, if it succeeded."""
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args[2:])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def measure(case: Case, folder: Path, steps: int) -> Iterator[str]:
    """Try one device, find a plan, train by it and verify it; yield a line for each."""
    train, plan = ["train", *case.training, "--steps", str(steps)], str(folder / "plan.yaml")
    yield f"Each process may take {format_size(case.limit)} of address space.\n"
    alone = run([*train, "--run", str(folder / "one"), "--plan", "data=1"], case.limit)
    yield f"* one device: {describe(alone)}"
    search = ["plan", *case.training, "--cluster", f"{WORKERS}:cpu", "--memory", case.memory, "-o", plan, "--json"]
    found = json.loads(check(run(search)))
    yield f"* `polylane plan --memory {case.memory}`: {name_of(found)}"
    planned = run([*train, "--run", str(folder / "plan"), "--plan", plan], case.limit)
    yield f"* by this plan: {describe(planned)}"
    proof = json.loads(check(run(["verify", *case.training, "--plan", plan, "--steps", "1", "--json"])))
    yield f"* to one device in float64, without the limit: {largest_error(proof):.1e} at most"


def describe(done: subprocess.CompletedProcess[str]) -> str:
    """Say how a training ended: by its last line where it failed."""
    if not done.returncode:
        return "trains"
    said = done.stderr.strip().splitlines()
    return f"exit code {done.returncode}, {said[-1] if said else 'without a word'}"


def name_of(found: Any) -> str:
    """Return the best plan of a search in one line."""
    return str(found["plans"][0]["plan"])


def largest_error(proof: Any) -> float:
    """Return the largest relative difference of a verification: of losses, gradients, weights, optimizer states."""
    kinds = ("gradient", "value", "memory")
    return max(float(proof["loss_error"]), *(float(each[kind]) for each in proof["deviations"] for kind in kinds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each command."""
    options = make_parser("benchmarks.memory.limit", __doc__).parse_args(arguments)
    with TemporaryDirectory() as folder:
        for line in measure(QUICK if options.quick else FULL, Path(folder), 1 if options.quick else 2):
            print(line, flush=True)


if __name__ == "__main__":
    main()
