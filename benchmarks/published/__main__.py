"""python -m benchmarks.published: predicted beside measured, for published trainings."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.published import choices as published_choices
from benchmarks.published import rows, zero_bubble
from benchmarks.published.costs import predicted
from benchmarks.published.gpipe import speedup
from benchmarks.published.scores import Case, mean, mean_error, percentile, problems, rank_correlation, regret
from polylane.errors import PolylaneError

WORST = 10


def files(given: Sequence[Path], folder: Path | None) -> list[Path]:
    """The files that were asked for; of a folder, those that are of a known kind.

    Raises:
        PolylaneError: nothing was asked for, or there is nothing.
    """
    if given:
        return [folder / path if folder is not None and not path.exists() else path for path in given]
    if folder is None:
        raise PolylaneError("say what to compare with: files, or a folder of them as --folder FOLDER")
    if not folder.is_dir():
        raise PolylaneError(f"{folder} is no folder")
    found = [path for path in sorted(folder.glob("*.csv")) if _known(path)]
    if not found:
        raise PolylaneError(f"{folder} has no file of a known kind, which are {', '.join(rows.KINDS)}")
    return found


def _known(path: Path) -> bool:
    try:
        rows.read(path)
    except PolylaneError:
        return False
    return True


def compared(found: Sequence[rows.AnyRow]) -> list[Case]:
    """Every row beside its prediction."""
    told = slowdowns(found)
    return [_case(row, told) for row in found]


def _case(row: rows.AnyRow, told: Mapping[zero_bubble.Gpt, float]) -> Case:
    if isinstance(row, rows.Speedup):
        return Case(row.name, row.speedup, speedup(row.run), unit="x")
    if isinstance(row, rows.Throughput):
        expected = zero_bubble.prediction(row.run).seconds * told.get(row.run.model, 1.0)
        return Case(row.name, row.seconds, expected, row.problem, told=row.run.schedule == zero_bubble.TOLD)
    return Case(row.name, row.seconds, predicted(row), row.problem)


def slowdowns(found: Sequence[rows.AnyRow]) -> dict[zero_bubble.Gpt, float]:
    """By model, measured over predicted seconds of its rows of 1F1B: how fast the devices were with its products."""
    ratios: dict[zero_bubble.Gpt, list[float]] = {}
    for row in found:
        if isinstance(row, rows.Throughput) and row.run.schedule == zero_bubble.TOLD:
            ratios.setdefault(row.run.model, []).append(row.seconds / zero_bubble.prediction(row.run).seconds)
    return {model: mean(each) for model, each in ratios.items()}


def memories(found: Sequence[rows.AnyRow]) -> list[Case]:
    """Memory of rows that say it, beside its prediction, in GB."""
    told = [row for row in found if isinstance(row, rows.Throughput)]
    return [Case(row.name, row.memory / 1e9, zero_bubble.memory(row.run) / 1e9, unit="GB") for row in told]


def summary(cases: Sequence[Case]) -> str:
    """Errors, and where plans compete, how well the predictions choose."""
    own = [case for case in cases if not case.told]
    text = f"{len(own)} rows, error {mean_error(own):.1%}, mean {mean([c.error for c in own]):+.1%}"
    each = problems(cases)
    if not each:
        return text
    lost = [regret(one) for one in each]
    order = [rank_correlation([c.measured for c in one], [c.predicted for c in one]) for one in each]
    return (
        f"{text}; {len(each)} problems, regret {mean(lost):.2%} (p95 {percentile(lost, 0.95):.1%}), "
        f"rank correlation {mean(order):.3f}"
    )


def worst(cases: Sequence[Case]) -> list[str]:
    """Lines of the rows with the largest errors."""
    ordered = sorted((case for case in cases if not case.told), key=lambda case: -abs(case.error))[:WORST]
    return [
        f"  {c.error:+7.1%}  measured {c.measured:9.3f} {c.unit}  predicted {c.predicted:9.3f} {c.unit}  {c.name}"
        for c in ordered
    ]


def run(paths: Sequence[Path]) -> None:
    """Print the comparison, per kind of file where there are several, and in total."""
    kinds: dict[str, list[Case]] = {}
    for path in paths:
        started, found = time.perf_counter(), rows.read(path)
        cases = compared(found)
        print(f"{path.name}: {summary(cases)}; {time.perf_counter() - started:.0f} s")
        print("\n".join(worst(cases)), flush=True)
        if held := memories(found):
            print(f"{path.name}, memory: {summary(held)}")
            print("\n".join(worst(held)), flush=True)
        for row, case in zip(found, cases, strict=True):
            kinds.setdefault(row.kind, []).append(case)
    if len(paths) > 1:
        for kind, cases in kinds.items():
            print(f"all {kind}: {summary(cases)}")
        print(f"in total: {mean_error([case for cases in kinds.values() for case in cases]):.1%} error")


def choose(paths: Sequence[Path]) -> None:
    """Print what would have been chosen for the rows of files that leave a choice.

    Raises:
        PolylaneError: no row does.
    """
    chosen = [(path, found) for path in paths if any(map(published_choices.can_choose, found := rows.read(path)))]
    if not chosen:
        raise PolylaneError("--choose needs rows of sharded replicas with all products in one dtype; there are none")
    for path, found in chosen:
        print(path.name)
        for line in published_choices.report(found):
            print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="with the columns of a known kind")
    parser.add_argument("--folder", type=Path, help="where the files are; without FILE, all that are of a known kind")
    parser.add_argument(
        "--choose",
        action="store_true",
        help="of sharded replicas, choose recomputation and microbatch for each row instead of being told (minutes)",
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        found = files(given.files, given.folder)
        if given.choose:
            choose(found)
        else:
            run(found)
    except PolylaneError as error:
        print(f"benchmarks.published: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
