"""python -m benchmarks.published.flight_recordings FOLDER: polylane's walk over NCCL recordings of others' hangs.

A subfolder is a case: PyTorch's recorder wrote a file ``_dump_<rank>`` for each rank when the job hung, and
``fault_injection.log`` says at which ranks a fault was injected. The recordings are read into the records of
polylane.diagnosis.culprit, and the ranks that its walk names are held against those of the log.

    in a recording                                       in a rank's record
    operation n of a group                               number n on the group's line
    k-th message from a to b that has not ended          number k on the line "a to b"; the recorder counts the messages
                                                         of a group at each rank by itself, so that only these compare
    first operation that has not ended                   the rank waits for it
    ... but that another member has completed            the rank does not wait: its own device does not go on
    no operation that has not ended                      the rank does not wait
"""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import make_parser
from polylane.diagnosis.culprit import RankState, Wait, find_culprits

MOST_BYTES = 1 << 28  # of a recording: the recorder's buffer has thousands of operations, of a kilobyte each
_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
_INJECTED = re.compile(r"^Rank (\d+), fault_type: (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Operation:
    """One operation of a rank on a line.

    Attributes:
        line: name of the line, the same at all its members.
        number: number of the operation on the line, from 1.
        ranks: all members of the line.
        has_ended: whether the rank's device has completed it.
    """

    line: str
    number: int
    ranks: tuple[int, ...]
    has_ended: bool


@dataclass(frozen=True)
class Case:
    """One recorded hang.

    Attributes:
        name: name of its folder.
        fault: kind of the fault that was injected, as the log names it.
        injected: ranks at which it was injected, ascending.
        named: ranks that the walk names, ascending.
    """

    name: str
    fault: str
    injected: tuple[int, ...]
    named: tuple[int, ...]


class PlainUnpickler(pickle.Unpickler):
    """Reads lists, tuples, dicts, texts, numbers and None, and refuses whatever would import a name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would call {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside of it")


def load_plain(path: Path) -> Any:
    """Return the plain values of a pickle.

    Raises:
        ValueError: the file is too long, is no pickle, or has more than plain values in it.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: this is longer than {MOST_BYTES >> 20} MiB")
    with path.open("rb") as file:
        try:
            return PlainUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: this is no pickle of plain values: {error}") from None


def read_recording(recording: Mapping[str, Any]) -> list[Operation]:
    """Return the operations of one rank's recording, in the order in which the rank launched them.

    Operations of the recorder that are neither collectives nor messages (``coalesced``) have no line, and are left out.
    """
    groups = {name: tuple(json.loads(group["ranks"])) for name, group in recording["pg_config"].items()}
    messages: Counter[str] = Counter()
    operations = []
    for entry in sorted(recording["entries"], key=lambda entry: int(entry["record_id"])):
        name, has_ended = entry["process_group"][0], entry["state"] == "completed"
        if not entry["is_p2p"]:
            operations.append(Operation(f"group {name}", entry["collective_seq_id"], groups[name], has_ended))
        elif (found := _MESSAGE.search(entry["profiling_name"])) and not has_ended:
            own, other = (groups[name][int(place)] for place in found.groups()[1:])
            line = f"{own} to {other}" if found[1] == "send" else f"{other} to {own}"
            messages[line] += 1
            operations.append(Operation(f"messages of group {name}, {line}", messages[line], (own, other), False))
    return operations


def build_states(recordings: Mapping[int, Sequence[Operation]]) -> dict[int, RankState]:
    """Return the record of every rank for the walk.

    Args:
        recordings: by rank, its operations in the order in which it launched them.
    """
    begun: dict[int, dict[str, int]] = {rank: {} for rank in recordings}
    pending: dict[int, dict[str, int]] = {rank: {} for rank in recordings}  # the first number that has not ended
    for rank, operations in recordings.items():
        for each in operations:
            begun[rank][each.line] = max(each.number, begun[rank].get(each.line, 0))
            if not each.has_ended:
                pending[rank].setdefault(each.line, each.number)

    def has_completed(rank: int, operation: Operation) -> bool:
        line, number = operation.line, operation.number
        return begun[rank].get(line, 0) >= number and not pending[rank].get(line, number + 1) <= number

    states = {}
    for rank, operations in recordings.items():
        first = next((each for each in operations if not each.has_ended), None)
        others = [] if first is None else [other for other in first.ranks if other != rank and other in recordings]
        if first is None or any(has_completed(other, first) for other in others):
            states[rank] = RankState(begun=begun[rank])
        else:
            states[rank] = RankState(Wait(first.line, first.number, first.ranks), begun[rank])
    return states


def judge_case(folder: Path) -> Case:
    """Return what was injected in a case, and whom the walk names.

    Raises:
        ValueError: a file of the folder is not what its name says.
    """
    injected = _INJECTED.findall((folder / "fault_injection.log").read_text())
    if not injected:
        raise ValueError(f"{folder / 'fault_injection.log'}: this names no rank")
    recordings = {}
    for path in folder.glob("_dump_*"):
        try:
            recordings[int(path.name.removeprefix("_dump_"))] = read_recording(load_plain(path))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: this is no flight recording: {type(error).__name__}: {error}") from None
    faults = ", ".join(sorted({fault for _, fault in injected}))
    ranks = tuple(sorted(int(rank) for rank, _ in injected))
    return Case(folder.name, faults, ranks, find_culprits(build_states(recordings)).culprits)


def format_table(cases: Sequence[Case]) -> str:
    """Return the table of all cases, and a line with the sums."""
    lines = ["| case | fault | injected ranks | named ranks | right |", "|---|---|---|---|---|"]
    for case in cases:
        injected, named = (", ".join(map(str, ranks)) or "none" for ranks in (case.injected, case.named))
        right = "yes" if case.injected == case.named else "no"
        lines.append(f"| {case.name} | {case.fault} | {injected} | {named} | {right} |")
    guilty = sum(len(case.injected) for case in cases)
    found = sum(len({*case.injected} & {*case.named}) for case in cases)
    innocent = sum(len({*case.named} - {*case.injected}) for case in cases)
    return "\n".join([*lines, "", f"named: {found} of {guilty} ranks with a fault, and {innocent} without one"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge every case of a folder and print the table."""
    parser = make_parser("benchmarks.published.flight_recordings", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of cases, a subfolder each")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"there is no folder {options.folder}")
    cases = sorted(path.parent for path in options.folder.glob("*/fault_injection.log"))
    if not cases:
        parser.error(f"{options.folder} has no subfolder with a fault_injection.log")
    try:
        print(format_table([judge_case(case) for case in cases[: 1 if options.quick else None]]))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
