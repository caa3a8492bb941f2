"""``python -m benchmarks.scripts EXAMPLES [ACCELERATE]``: training scripts of others, plain and prepared.

EXAMPLES is a checkout of pytorch/examples, ACCELERATE one of huggingface/accelerate; nothing is fetched. Each script
gets at most four lines, a tiny data set made in place, and runs in float64 as it is and under each plan; what it prints
and saves is compared.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import make_parser
from benchmarks.scripts import stand_ins, text
from benchmarks.scripts.entries import ENTRIES
from benchmarks.scripts.entry import Entry
from benchmarks.scripts.run import NUDGED, PLAIN, Outcome, run_script
from polylane.graph.rounding_noise import MARGIN

PLANS = ("data=1", "data=2", "pipeline=2", "data=2,pipeline=2", "tensor=2", "data=2,shard=parameters")
EQUAL, REFUSED, DIFFERENT, ERROR = "equal", "refused", "DIFFERENT", "ERROR"
TOLERANCE = 1e-9
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|\binf\b|\bnan\b)")
# What torch.load takes of arrays: a data set of one of the scripts is one.
_NUMPY_ARRAYS: list[Any] = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.Float64DType]


def list_differences(got: Any, expected: Any) -> list[float]:
    """Return the largest difference of numbers in each text and tensor of what holds them; infinite where they part."""
    if isinstance(expected, Tensor):
        if not isinstance(got, Tensor) or got.shape != expected.shape:
            return [math.inf]
        return list_differences(got.double().flatten().tolist(), expected.double().flatten().tolist())
    if isinstance(expected, str):
        numbers, expected_numbers = (_NUMBER.findall(value) for value in (got, expected))
        if _NUMBER.sub("#", got) != _NUMBER.sub("#", expected):
            return [math.inf]
        return list_differences([float(n) for n in numbers], [float(n) for n in expected_numbers])
    if isinstance(expected, dict):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            return [math.inf]
        return [difference for key in expected for difference in list_differences(got[key], expected[key])]
    if isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            return [math.inf]
        if expected and all(isinstance(value, float) for value in expected):
            difference = np.abs(np.subtract(got, expected)) / np.maximum(1, np.abs(expected))
            return [math.inf if np.isnan(difference).any() else float(difference.max())]
        return [difference for pair in zip(got, expected, strict=True) for difference in list_differences(*pair)]
    return [abs(got - expected) / max(1, abs(expected))] if isinstance(expected, (int, float)) else [0.0]


def judge(outcomes: Sequence[Outcome], expected: Outcome, nudge: Callable[[], Outcome]) -> dict[str, Any]:
    """Return the verdict on a run, and what was told.

    A difference is rounding where the plain script, with weights that were moved by one unit in the last place at
    first, has one of a hundredth or more there: a bias before a normalization has no gradient but rounding, and an
    optimizer that divides by its size enlarges it.
    """
    if told := next((outcome.error for outcome in outcomes if outcome.error and not outcome.refusal), ""):
        return {"verdict": ERROR, "told": told}
    if told := next((outcome.refusal for outcome in outcomes if outcome.refusal), ""):
        return {"verdict": REFUSED, "told": told}
    runs = [list_differences([outcome.printed], [expected.printed]) for outcome in outcomes]
    runs.append(list_differences(outcomes[0].saved, expected.saved))
    worst = max(max(run, default=0.0) for run in runs)
    if worst <= TOLERANCE:
        return {"verdict": EQUAL, "told": f"{worst:.1g}"}
    nudged = nudge()
    noises = [list_differences([nudged.printed], [expected.printed])] * len(outcomes)
    noises.append(list_differences(nudged.saved, expected.saved))
    beyond = [
        difference
        for run, noise in zip(runs, noises, strict=True)
        for difference, floor in zip_longest(run, noise, fillvalue=0.0)
        if difference > max(TOLERANCE, MARGIN * floor)
    ]
    if beyond:
        return {"verdict": DIFFERENT, "told": f"{max(beyond):.1g}"}
    return {"verdict": EQUAL, "told": f"{worst:.1g}, as rounding is enlarged by the script itself"}


def run_entry(entry: Entry, checkout: Path, plans: Sequence[str], patience: float) -> list[dict[str, Any]]:
    """Run a script plainly and under plans; return a row for each plan."""
    rows = list[dict[str, Any]]()
    plain = run_script(entry, checkout, PLAIN, patience)[0]
    if plain.error:
        print(f"{entry.name:40} {PLAIN:24} {ERROR:10} {plain.error}", flush=True)
        return [{"name": entry.name, "plan": PLAIN, "verdict": ERROR, "told": plain.error}]
    expected = run_script(entry, checkout, "data=1", patience)[0] if entry.draws else plain
    if entry.draws and (expected.error or expected.refusal):
        expected = plain
    for plan in plans:
        began = time.monotonic()
        outcomes = run_script(entry, checkout, plan, patience)
        verdict = judge(outcomes, expected, lambda: run_script(entry, checkout, NUDGED, patience)[0])
        row = {"name": entry.name, "plan": plan, **verdict}
        rows.append({**row, "seconds": round(time.monotonic() - began, 1)})
        print(
            f"{entry.name:40} {plan:24} {row['verdict']:10} {rows[-1]['seconds']:6} s  {row['told'][:2000]}", flush=True
        )
    return rows


def warm_up() -> None:
    """Import what captures import, before workers are forked."""
    torch.export.export(nn.Linear(2, 2), (torch.zeros(2, 2),))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts, print a line for each plan, write JSON; 1 if anything is neither equal nor refused."""
    parser = make_parser("benchmarks.scripts", __doc__)
    parser.add_argument("examples", type=Path, help="folder of a checkout of pytorch/examples")
    parser.add_argument("accelerate", type=Path, nargs="?", help="folder of a checkout of huggingface/accelerate")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="scripts whose names contain one of these"
    )
    parser.add_argument("--plans", nargs="*", default=PLANS, metavar="PLAN", help="(default: all)")
    parser.add_argument("--patience", type=float, default=1200, help="seconds for each run before it counts as a hang")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text.install_transformers()
    stand_ins.install()
    torch.set_default_dtype(torch.float64)
    torch.serialization.add_safe_globals(_NUMPY_ARRAYS)
    warm_up()
    rows = list[dict[str, Any]]()
    for entry in ENTRIES:
        checkout = getattr(options, entry.checkout)
        if checkout is None or (options.only and not any(name in entry.name for name in options.only)):
            continue
        rows += run_entry(entry, checkout, options.plans, options.patience)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["verdict"] in (DIFFERENT, ERROR) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
