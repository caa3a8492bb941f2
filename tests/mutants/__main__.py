"""Plant every mutant of the table, ask `verify` and the tests that guard it, and say which of them noticed.

`make mutants`; one of them: `make mutants ARGS="--only ID"`. Outcomes are kept in run/mutants.json, so that a table can
be made of several runs: `--markdown` writes what is there into docs/results/exactness-tables.md.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import pickle
import re
import shlex
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.mutants.forking import run, warm
from tests.mutants.planting import PACKAGE, Misfit, Mutant, mutated, plant
from tests.mutants.proofs import Outcome, answer
from tests.mutants.table import MUTANTS

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
KEPT, DOCS = ROOT / "run" / "mutants.json", ROOT / "docs" / "results" / "exactness-tables.md"
BEGIN, END = "<!-- mutants: written by make mutants -->\n", "<!-- mutants: end -->\n"
# A bar within a cell of the table, which readers of Markdown take differently behind a backslash.
BAR = "&#124;"
# What `verify` says at length, for a cell of the table.
SOURCE = re.compile(r" \([^()]*:\d+\)")
SHORTER = {
    r"every forward value(?: and gradient)? of (step \d+) agrees[;:] ": r"\1: ",
    r"the first gradient that differs, from the loss backwards, is that of ": "the gradient of ",
    r"every gradient agrees; ": "",
    r"what differs is an update, first that of ": "the update of ",
    r"what differs is ": "",
}
PROOF_SECONDS, TEST_SECONDS = 180, 300  # a bug may let everybody wait for ever
# Of the tests that `make test` runs, but with all examples of a law: a mutant is not to be missed by chance.
OPTIONS = [
    "-x",
    "-q",
    "-m",
    "not slow",
    "--hypothesis-profile",
    "default",
    "-p",
    "no:cacheprovider",
    "--timeout",
    "100",
]
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
        missed = [who for who, outcome in proofs.items() if outcome is not None and not outcome.notices(mutant.error)]
        nameless = [
            f"{who} names no operator"
            for who, outcome in proofs.items()
            if outcome is not None and outcome.verdict == "NOT equal" and not outcome.culprit
        ]
        return [*missed, *nameless, *([] if self.test else [f"tests ({mutant.tests})"])]


def ask(proofs: Sequence[str], path: Path) -> list[Outcome]:
    """What `verify` says to each of these questions ("gpt data=2")."""

    def work() -> int:
        answer(proofs)
        return 0

    code, output = run(work, path, PROOF_SECONDS * len(proofs)) if proofs else (0, "")
    found = [Outcome(**json.loads(line)) for line in output.splitlines() if line.startswith('{"verdict"')]
    if len(found) < len(proofs):
        last = (output.strip().splitlines() or [""])[-1]
        found.append(Outcome(HUNG if code is None else "refused", last[:300]))
        found += ask(proofs[len(found) :], path)
    return found


def failing_test(arguments: str, path: Path) -> str:
    """The first test that fails; "" where none does.

    Raises:
        Misfit: there is no such test.
    """

    def work() -> int:
        import pytest

        os.chdir(ROOT)
        return int(pytest.main([*OPTIONS, *shlex.split(arguments)]))

    code, output = run(work, path, TEST_SECONDS)
    if code == 0:
        return ""
    if code is None:
        return HUNG
    failed = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if code not in (1, 2) or not failed:
        raise Misfit(f"pytest {arguments}: exit code {code}: {output.strip()[-600:]}")
    return failed[0].split(" - ")[0]


def questions(mutant: Mutant, audited: bool = False) -> dict[str, str]:
    """What `verify` is asked, by model; or the audit of a training."""
    asked, how = {"gpt": mutant.gpt, "network": mutant.network}, " audited=yes" if audited else ""
    return {model: f"{model} {plan}{how}" for model, plan in asked.items() if plan}


def tried(mutant: Mutant) -> Result:
    """Plant one mutant and look who notices."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="polylane-mutant-") as folder:
        path = Path(folder)
        plant(mutant, path)
        asked = questions(mutant)
        outcomes = dict(zip(asked, ask(list(asked.values()), path) if asked else [], strict=True))
        try:
            test = failing_test(mutant.tests, path)
        except Misfit as error:
            print(f"{mutant.id}: {error}", file=sys.stderr)
            test = ""
    return Result(mutant.id, outcomes.get("gpt"), outcomes.get("network"), test, time.perf_counter() - start)


def tried_in_audits(mutant: Mutant) -> list[str]:
    """Plant one mutant, and say of each training by it what its audit found."""
    with tempfile.TemporaryDirectory(prefix="polylane-mutant-") as folder:
        plant(mutant, Path(folder))
        asked = questions(mutant, audited=True)
        outcomes = ask(list(asked.values()), Path(folder)) if asked else []
    return [
        f"{'caught' if outcome.notices(mutant.error) else 'MISSED'}: {mutant.id} ({question}): {outcome.verdict} "
        f"{outcome.worst:.1e} {outcome.culprit[:160]}"
        for question, outcome in zip(asked.values(), outcomes, strict=True)
    ]


def side_by_side(works: Iterable[Callable[[], T]], jobs: int) -> Iterator[T]:
    """What each of these gives, in their order, so many at a time, each in a process of its own.

    Raises:
        Misfit: one of them has raised.
    """
    under_way = deque[tuple[int, str]]()

    def next_one() -> T:
        child, file = under_way.popleft()
        _, status = os.waitpid(child, 0)
        given = pickle.loads(Path(file).read_bytes()) if not status else Misfit(f"a process ended with {status}")
        os.unlink(file)
        if isinstance(given, Exception):
            raise given
        return given  # type: ignore[no-any-return]

    for work in works:
        if len(under_way) >= jobs:
            yield next_one()
        descriptor, file = tempfile.mkstemp(prefix="polylane-mutant-")
        os.close(descriptor)
        sys.stdout.flush()
        if not (child := os.fork()):
            given: object
            try:
                given = work()
            except Exception as error:
                given = Misfit(f"{type(error).__name__}: {error}")
            Path(file).write_bytes(pickle.dumps(given))
            os._exit(0)
        under_way.append((child, file))
    while under_way:
        yield next_one()


def check_baseline(chosen: Sequence[Mutant], jobs: int) -> list[str]:
    """What fails although nothing is planted."""
    path = PACKAGE.parent
    proofs = sorted({question for mutant in chosen for question in questions(mutant).values()})
    tests = sorted({mutant.tests for mutant in chosen})
    print(f"without any mutant: {len(proofs)} proofs, {len(tests)} runs of tests", flush=True)
    some = [proofs[i::jobs] for i in range(jobs)]
    said = zip(some, side_by_side([partial(ask, each, path) for each in some], jobs), strict=True)
    wrong = [
        f"verify ({asked}): {outcome.verdict}: {outcome.culprit}"
        for asks, outcomes in said
        for asked, outcome in zip(asks, outcomes, strict=True)
        if outcome.verdict != "equal"
    ]
    return wrong + [
        failed for failed in side_by_side([partial(failing_test, each, path) for each in tests], jobs) if failed
    ]


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
    said = SOURCE.sub("", outcome.culprit)
    for long, short in SHORTER.items():
        said = re.sub(long, short, said)
    said = said.replace("|", BAR).replace("`", "'")
    return said if outcome.verdict == "NOT equal" else f"{outcome.verdict}: {said}"


def format_code(text: str) -> str:
    """Return code for a cell of the table."""
    return f"<code>{html.escape(text).replace('|', BAR)}</code>" if "|" in text else f"`{text}`"


def written(results: dict[str, Result]) -> str:
    """The table of all mutants that have been tried."""
    lines = ["| mutant | what is wrong | plan → `verify` on the GPT | plan → `verify` on the network | failing test |"]
    lines.append("|---|---|---|---|---|")
    for mutant in MUTANTS:
        if (result := results.get(mutant.id)) is None:
            continue
        gpt, network = (
            f"{format_code(plan)} → {told(outcome)}" if plan else "–"
            for plan, outcome in ((mutant.gpt, result.gpt), (mutant.network, result.network))
        )
        wrong = mutant.wrong + (f" (For the tests alone: {mutant.unseen}.)" if mutant.unseen else "")
        test = format_code(result.test) if result.test else "**missed**"
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
    parser.add_argument("--audit", action="store_true", help="ask audits of trainings, and neither verify nor tests")
    parser.add_argument("--markdown", action="store_true", help="write the outcomes so far into the page on exactness")
    options = parser.parse_args()
    chosen = chosen_of(options.only)
    if wrong := fits(chosen):
        print(*wrong, sep="\n")
        return 1
    if options.list:
        for mutant in chosen:
            print(f"{mutant.id:36} {mutant.where:54} {mutant.wrong}")
        return 0
    if options.markdown:
        write_docs(kept())
        return 0
    if options.new:
        chosen = [mutant for mutant in chosen if mutant.id not in kept()]
    warm()
    if options.audit:
        missed = 0
        for lines in side_by_side([partial(tried_in_audits, each) for each in chosen], options.jobs):
            print(*lines, sep="\n", flush=True)
            missed += sum(line.startswith("MISSED") for line in lines)
        return 1 if missed else 0
    if not options.no_baseline and (wrong := check_baseline(chosen, options.jobs)):
        print("without any mutant:", *wrong, sep="\n")
        return 1
    survivors = 0
    for mutant, result in zip(
        chosen, side_by_side([partial(tried, each) for each in chosen], options.jobs), strict=True
    ):
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
