"""Plant every mutant of the table, ask `verify` and the tests that guard it, and say which of them noticed.

`make mutants`; one or several: `make mutants ARGS="--only ID --only ID"`. Outcomes are kept in run/mutants.json, so that
a table can be made of several runs: `--markdown` writes what is there into docs/exactness.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mutants.planting import PACKAGE, Misfit, Mutant, mutated, plant
from mutants.proofs import Outcome
from mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
KEPT, DOCS = ROOT / "run" / "mutants.json", ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- mutants: written by make mutants -->\n", "<!-- mutants: end -->\n"
PROOF_SECONDS, TEST_SECONDS = 180, 300  # a bug may let everybody wait for ever
HUNG = "hung"


@dataclass(frozen=True)
class Result:
    """Who noticed one mutant.

    Attributes:
        id: of the mutant.
        gpt, network: what `verify` said; None where it was not asked.
        test: the first test that failed, "hung", or "" where all passed.
        seconds: that it took.
    """

    id: str
    gpt: Outcome | None
    network: Outcome | None
    test: str
    seconds: float = 0.0

    def survived(self, mutant: Mutant) -> list[str]:
        """Who should have noticed, and did not."""
        proofs = {f"verify ({mutant.gpt}, gpt)": self.gpt, f"verify ({mutant.network}, network)": self.network}
        missed = [who for who, outcome in proofs.items() if outcome is not None and not outcome.caught]
        nameless = [
            f"{who} names no operator"
            for who, outcome in proofs.items()
            if outcome is not None and outcome.verdict == "NOT equal" and not outcome.culprit
        ]
        return [*missed, *nameless, *([] if self.test else [f"tests ({mutant.tests})"])]


def run(command: Sequence[str], path: Path, limit: float) -> tuple[int | None, str]:
    """A command with this package first on the import path: its exit code (None: it took too long) and its output."""
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the workers that it has forked
        return None, process.communicate()[0]
    return process.returncode, output


def ask(proofs: Sequence[str], path: Path) -> list[Outcome]:
    """What `verify` says to each of these questions ("gpt data=2")."""
    code, output = run([sys.executable, "-m", "mutants.proofs", *proofs], path, PROOF_SECONDS * len(proofs))
    found = [Outcome(**json.loads(line)) for line in output.splitlines() if line.startswith('{"verdict"')]
    if len(found) < len(proofs):
        last = (output.strip().splitlines() or [""])[-1]
        found.append(Outcome(HUNG if code is None else "refused", last[:300]))
        found += ask(proofs[len(found) :], path) if len(found) < len(proofs) else []
    return found


def failing_test(arguments: str, path: Path) -> str:
    """The first test that fails; "" where none does.

    Raises:
        Misfit: there is no such test.
    """
    words = [word.replace("+", " ") for word in arguments.split()]  # -k a+or+b
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *words]
    code, output = run(pytest, path, TEST_SECONDS)
    if code == 0:
        return ""
    if code is None:
        return HUNG
    failed = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code not in (1, 2) or not failed:
        raise Misfit(f"pytest {arguments}: exit code {code}: {output.strip()[-600:]}")
    return failed[0].split(" - ")[0]


def questions(mutant: Mutant) -> dict[str, str]:
    """What `verify` is asked, by model."""
    asked = {"gpt": mutant.gpt, "network": mutant.network}
    return {model: f"{model} {plan}" for model, plan in asked.items() if plan}


def tried(mutant: Mutant) -> Result:
    """Plant one mutant and look who notices.

    Raises:
        Misfit: it does not fit the code, or its tests are not there.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="polylane-mutant-") as folder:
        path = Path(folder)
        plant(mutant, path)
        asked = questions(mutant)
        outcomes = dict(zip(asked, ask(list(asked.values()), path) if asked else [], strict=True))
        test = failing_test(mutant.tests, path)
    return Result(mutant.id, outcomes.get("gpt"), outcomes.get("network"), test, time.perf_counter() - start)


def check_baseline(chosen: Sequence[Mutant], jobs: int) -> list[str]:
    """What fails although nothing is planted."""
    path = PACKAGE.parent
    proofs = sorted({question for mutant in chosen for question in questions(mutant).values()})
    tests = sorted({mutant.tests for mutant in chosen})
    with ThreadPoolExecutor(jobs) as pool:
        halves = [proofs[i::jobs] for i in range(jobs)]
        outcomes = [pool.submit(ask, half, path) for half in halves if half]
        failures = [pool.submit(failing_test, each, path) for each in tests]
        said = [
            pair for half, each in zip(halves, outcomes, strict=False) for pair in zip(half, each.result(), strict=True)
        ]
        wrong = [f"verify ({asked}): {outcome.verdict}: {outcome.culprit}" for asked, outcome in said if outcome.caught]
        return wrong + [failed for each in failures if (failed := each.result())]


def kept() -> dict[str, Result]:
    """The outcomes of earlier runs."""
    if not KEPT.is_file():
        return {}
    read = json.loads(KEPT.read_text())
    models = ("gpt", "network")
    return {
        name: Result(**{**each, **{model: Outcome(**each[model]) if each[model] else None for model in models}})
        for name, each in read.items()
    }


def keep(results: Iterable[Result]) -> None:
    """Remember outcomes, beside those of mutants that were not tried now."""
    KEPT.parent.mkdir(exist_ok=True)
    every = kept() | {result.id: result for result in results}
    KEPT.write_text(json.dumps({name: asdict(every[name]) for name in sorted(every)}, indent=1))


def told(outcome: Outcome | None) -> str:
    """An outcome in a cell of the table."""
    if outcome is None:
        return "–"
    if outcome.verdict == "equal":
        return "**missed**"
    said = outcome.culprit.replace("|", "\\|").replace(str(ROOT) + "/", "").replace("`", "'")
    return f"{outcome.verdict}: {said}" if said else outcome.verdict


def written(results: dict[str, Result]) -> str:
    """The table of all mutants that have been tried."""
    lines = ["| mutant | what is wrong | plan → `verify` on the GPT | plan → `verify` on the network | failing test |"]
    lines.append("|---|---|---|---|---|")
    for mutant in MUTANTS:
        if (result := results.get(mutant.id)) is None:
            continue
        gpt, network = (
            f"`{plan}` → {told(outcome)}" if plan else "–"
            for plan, outcome in ((mutant.gpt, result.gpt), (mutant.network, result.network))
        )
        wrong = mutant.wrong + (f" (No number of a step changes: {mutant.unseen}.)" if mutant.unseen else "")
        test = f"`{result.test}`" if result.test else "**missed**"
        lines.append(f"| `{mutant.id}` | {wrong} | {gpt} | {network} | {test} |")
    return "\n".join(lines) + "\n"


def write_docs(results: dict[str, Result]) -> None:
    """Put the table between its marks."""
    text = DOCS.read_text()
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{DOCS}: there are no marks {BEGIN.strip()} and {END.strip()}")
    DOCS.write_text(before + BEGIN + written(results) + END + after)


def chosen_of(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.id: mutant for mutant in MUTANTS}
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"there is no mutant {', '.join(unknown)}: see --list")
    return [known[name] for name in names] if names else list(MUTANTS)


def fits(mutants: Sequence[Mutant]) -> list[str]:
    """Which mutants do not fit the code, or the table's own rules."""
    wrong = list[str]()
    for mutant in mutants:
        try:
            module = PACKAGE / (mutant.where.partition(":")[0].replace(".", "/") + ".py")
            mutated(mutant, module.read_text())
        except (Misfit, OSError) as error:
            wrong.append(str(error))
        if not (mutant.gpt or mutant.network or mutant.unseen):
            wrong.append(f"{mutant.id}: no proof is asked, and nothing says why")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="try this one; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the mutants, and see that they fit the code")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="mutants at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not first see that all is well without them")
    parser.add_argument("--new", action="store_true", help="try only those of which run/mutants.json knows nothing")
    parser.add_argument("--markdown", action="store_true", help="write the outcomes so far into docs/exactness.md")
    options = parser.parse_args()
    chosen = chosen_of(options.only)
    if wrong := fits(chosen):
        print(*wrong, sep="\n")
        return 1
    if options.list:
        for mutant in chosen:
            print(f"{mutant.id:32} {mutant.where:52} {mutant.wrong}")
        return 0
    if options.markdown:
        write_docs(kept())
        return 0
    if options.new:
        chosen = [mutant for mutant in chosen if mutant.id not in kept()]
    if not options.no_baseline and (wrong := check_baseline(chosen, options.jobs)):
        print("without any mutant:", *wrong, sep="\n")
        return 1
    survivors = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, result in zip(chosen, pool.map(tried, chosen), strict=True):
            keep([replace(result, seconds=round(result.seconds, 1))])
            missed = result.survived(mutant)
            survivors += bool(missed)
            print(f"{'SURVIVED' if missed else 'caught'}: {mutant.id} ({result.seconds:.0f} s)")
            for name, outcome in (("gpt", result.gpt), ("network", result.network)):
                if outcome is not None:
                    print(f"    {name}: {outcome.verdict} {outcome.worst:.1e} {outcome.culprit}")
            print(f"    test: {result.test}", *(f"\n    MISSED BY {each}" for each in missed), flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were noticed by all who should have")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
