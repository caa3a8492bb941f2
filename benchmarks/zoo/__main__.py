"""Proves the models of the zoo, each in a process of its own, and writes docs/results/models.md.

``python -m benchmarks.zoo --only GPT-2 --plans tensor=2`` a part of it: what else was measured stays on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import make_parser
from benchmarks.zoo import page
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.families import FAMILIES, all_entries
from benchmarks.zoo.prove import EQUAL, FAILED, PLANS, REFUSED

PATIENCE = 300  # seconds for a model's capture and for each of its plans, before it counts as a hang


def prove_in_process(
    entry: Entry, plans: Sequence[str], steps: int, patience: float = PATIENCE
) -> list[dict[str, Any]]:
    """What is found of an entry in a process of its own; a hang or a death counts as FAILED on the plan it was at."""
    command = [sys.executable, "-m", "benchmarks.zoo.prove", entry.name, str(steps), *plans]
    # In a session of its own: its workers end with it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    began = time.monotonic()
    try:
        printed, said = child.communicate(timeout=patience * (1 + len(plans)))
        ended = f"ended with {child.returncode}: {(said.strip() or 'nothing said').splitlines()[-1]}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        printed, _ = child.communicate()
        ended = "hangs"
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if len(found) == 1 + len(plans):
        return found
    seconds = round(time.monotonic() - began, 1)
    if not found:
        found.append(
            {"name": entry.name, "how": FAILED, "told": ended, "parameters": 0, "nodes": 0, "seconds": seconds}
        )
        return found
    plan = plans[len(found) - 1]
    found.append({"name": entry.name, "plan": plan, "verdict": FAILED, "told": ended, "seconds": seconds})
    # What comes after the one that hangs is found in a process of its own.
    left = plans[len(found) - 1 :]
    return found + (prove_in_process(entry, left, steps, patience)[1:] if left else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print a line for each pair, write the page; 1 if anything is neither equal nor refused."""
    parser = make_parser("benchmarks.zoo", __doc__)
    entries = all_entries()
    parser.add_argument(
        "--family", nargs="+", metavar="FAMILY", choices=[f.name for f in FAMILIES], help="all models of"
    )
    parser.add_argument("--only", nargs="+", metavar="MODEL", choices=list(entries), help="these models")
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=list(PLANS))
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the model's entry says")
    parser.add_argument("--page", action="store_true", help="only write the page, from what was measured before")
    options = parser.parse_args(arguments)
    chosen = _choose_entries(options, entries)
    if options.quick:
        chosen, options.plans, options.steps = chosen[:1], options.plans[:1], 1
    counts: dict[str, int] = {}
    for entry in [] if options.page else chosen:
        found = prove_in_process(entry, options.plans, options.steps)
        for line in found:
            verdict = line.get("verdict", line.get("how"))
            where = f"{entry.name:28} {line.get('plan', 'capture'):28}"
            print(f"{where} {verdict:10} {line['seconds']:6.1f} s  {line['told']}", flush=True)
            if "plan" in line:
                counts[verdict] = counts.get(verdict, 0) + 1
        if not options.quick:
            page.save_found(entry.family, entry.name, found)
    if not options.quick:
        page.write_page()
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(any(verdict not in (EQUAL, REFUSED) for verdict in counts))


def _choose_entries(options: argparse.Namespace, entries: dict[str, Entry]) -> list[Entry]:
    return [
        entry
        for entry in entries.values()
        if (not options.family or entry.family in options.family) and (not options.only or entry.name in options.only)
    ]


if __name__ == "__main__":
    sys.exit(main())
