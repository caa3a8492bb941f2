"""Recordings of collectives that others' jobs left are read without running anything, and judged by the same walk."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import flight_recordings

# Two groups of two ranks, and one of all four.
GROUPS = {"0": (0, 1, 2, 3), "5": (0, 1), "6": (2, 3)}


class Call:
    """What a pickle of this would call, where names were imported."""

    def __reduce__(self) -> Any:
        return (print, ("this was run",))


def collective(group: str, number: int, state: str = "scheduled") -> dict[str, Any]:
    return {
        "process_group": (group, "GROUP"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "state": state,
        "is_p2p": False,
    }


def message(way: str, number: int = 70, state: str = "scheduled") -> dict[str, Any]:
    """One message of group 0, as ``send 0->2`` or ``recv 2<-0``; its number is the rank's own."""
    return {**collective("0", number, state), "profiling_name": f"nccl:{way}", "is_p2p": True}


def write_case(folder: Path, recordings: Mapping[int, Sequence[dict[str, Any]]], injected: Sequence[int]) -> Path:
    """Write a case as the recorder and the injection leave it; what a rank launched first comes last in its file."""
    folder.mkdir()
    config = {name: {"name": name, "desc": "GROUP", "ranks": json.dumps(ranks)} for name, ranks in GROUPS.items()}
    for rank, operations in recordings.items():
        entries = [{"record_id": place, **operation} for place, operation in enumerate(operations)][::-1]
        recording = {"version": "2.9", "pg_config": config, "entries": entries}
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(recording, protocol=2))
    log = ["Fault delay: 180.0", *(f"Rank {rank}, fault_type: LOCK_GIL" for rank in injected)]
    (folder / "fault_injection.log").write_text("\n".join(log))
    return folder


def name_culprits(folder: Path, recordings: Mapping[int, Sequence[dict[str, Any]]]) -> tuple[int, ...]:
    return flight_recordings.judge_case(write_case(folder, recordings, [0])).named


def test_a_rank_that_has_launched_nothing_is_waited_for(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for 2 and 3 in a sum of all; of these 2 waits for 3."""
    sums = [collective("0", 7)]
    recordings = {0: sums, 1: sums, 2: [collective("6", 4, "completed"), collective("6", 5)], 3: []}
    assert name_culprits(tmp_path / "case", recordings) == (3,)


def test_what_another_member_has_completed_is_not_waited_for(tmp_path: Path) -> None:
    """The device of rank 1 has stopped in an operation that rank 0 completed; its host has launched more."""
    recordings = {
        0: [collective("5", 3, "completed"), collective("0", 7)],
        1: [collective("5", 3), collective("0", 7)],
        2: [collective("0", 7)],
        3: [collective("0", 7)],
    }
    assert name_culprits(tmp_path / "case", recordings) == (1,)


def test_messages_are_matched_by_their_order_between_two_ranks(tmp_path: Path) -> None:
    """Rank 0 waits for rank 2's message, which waits for rank 3; the ranks count their messages differently."""
    recordings = {
        0: [message("recv 0<-2", 12, "completed"), message("recv 0<-2", 13)],
        1: [collective("5", 9)],
        2: [collective("6", 5), message("send 2->0", 40)],
        3: [],
    }
    assert name_culprits(tmp_path / "case", recordings) == (3,)


def test_nobody_is_named_where_all_have_arrived(tmp_path: Path) -> None:
    assert name_culprits(tmp_path / "case", {rank: [collective("0", 7)] for rank in range(4)}) == ()


def test_the_table_says_what_was_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = [collective("0", 7)]
    write_case(tmp_path / "found", {0: sums, 1: sums, 2: sums, 3: []}, [3])
    write_case(tmp_path / "missed", {0: sums, 1: sums, 2: sums, 3: []}, [1])
    flight_recordings.main([str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| found | LOCK_GIL | 3 | 3 | yes |",
        "| missed | LOCK_GIL | 1 | 3 | no |",
        "",
        "named: 1 of 2 ranks with a fault, and 1 without one",
    ]


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_of_a_recording_is_run(protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_case(tmp_path / "case", {}, [0])
    (folder / "_dump_0").write_bytes(pickle.dumps({"entries": [Call()]}, protocol=protocol))
    with pytest.raises(ValueError, match=r"_dump_0: this is no pickle of plain values: it would call .*print"):
        flight_recordings.judge_case(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("data", "said"), [(b"", "no pickle of plain values"), (pickle.dumps([]), "no flight rec")])
def test_other_files_are_one_sentence(data: bytes, said: str, tmp_path: Path, capsys: Any) -> None:
    folder = write_case(tmp_path / "case", {}, [0])
    (folder / "_dump_0").write_bytes(data)
    with pytest.raises(SystemExit):
        flight_recordings.main([str(tmp_path)])
    assert said in capsys.readouterr().err
