"""``make fuzz``: inputs by the thousand, and what is wrong with how they ended.

``python -m tests.fuzzing --inputs 1000 --seed 1``; one of them again: ``--only 1/517``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

from tests.fuzzing.inputs import make_input
from tests.fuzzing.isolation import MEGABYTES, SECONDS, FuzzInput, FuzzOutcome, run_here, run_inputs
from tests.fuzzing.warm_start import warm_up


@dataclass(frozen=True)
class Summary:
    """All inputs of a run together.

    Attributes:
        outcomes: how each of them ended.
        seconds: wall-clock time of all.
    """

    outcomes: list[FuzzOutcome]
    seconds: float

    def lines(self) -> list[str]:
        """Return the summary as lines for people."""
        codes = Counter("none" if one.code is None else str(one.code) for one in self.outcomes)
        slow = max(self.outcomes, key=lambda one: one.seconds)
        large = max(self.outcomes, key=lambda one: one.megabytes)
        wrong = [one for one in self.outcomes if one.wrong]
        return [
            *(f"WRONG {one.name}: {one.wrong} | {one.said}" for one in wrong),
            f"{len(self.outcomes):,} inputs in {self.seconds:.0f} s: exit codes {dict(sorted(codes.items()))}, "
            f"{len(wrong)} wrong",
            f"slowest {slow.seconds:.1f} s of {SECONDS:.0f} ({slow.name}); most memory {large.megabytes:.0f} MB of "
            f"{MEGABYTES:.0f} ({large.name})",
        ]


def main(words: list[str] | None = None) -> int:
    """Run the inputs that are asked for; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="other seeds are other inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--only", metavar="SEED/NUMBER", help="this one, with all that it prints")
    given = parser.parse_args(words)
    run = warm_up()
    if given.only:
        seed, _, number = given.only.partition("/")
        one = make_input(int(seed), int(number))
        print(" ".join(map(repr, one.arguments)))
        for name, content in one.files.items():
            print(f"--- {name}\n{(content or b'')[:3000].decode(errors='backslashreplace')}")
        outcome = run_here(one, run)
        print(outcome)
        return bool(outcome.wrong)
    inputs = [make_input(given.seed, number) for number in range(given.first, given.first + given.inputs)]
    summary = fuzz(inputs, run)
    print("\n".join(summary.lines()))
    return any(one.wrong for one in summary.outcomes)


def fuzz(inputs: list[FuzzInput], run: object) -> Summary:
    """Run inputs, and tell on stderr how far it is."""
    began, outcomes = time.monotonic(), list[FuzzOutcome]()
    for outcome in run_inputs(inputs, run):
        outcomes.append(outcome)
        if outcome.wrong:
            print(f"{outcome.name}: {outcome.wrong}", file=sys.stderr, flush=True)
    return Summary(outcomes, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
