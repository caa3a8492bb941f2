"""Manifests that were changed at random, with a digest that is right for them: loaded, or refused in one sentence."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from polylane.checkpoint.commit import MANIFEST
from polylane.checkpoint.manifest import format_manifest, read_manifest
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, on_workers, save_steps
from tests.fuzzing.checkpoints import mutate_manifest

SECONDS, MEGABYTES = 2.0, 300.0


@pytest.mark.parametrize(("first", "count"), [(0, 60), pytest.param(60, 300, marks=pytest.mark.slow)])
def test_odd_manifests_are_loaded_or_refused(tmp_path: Path, first: int, count: int) -> None:
    save_steps("data=1", tmp_path, 1)
    manifest = tmp_path / "step-00000001" / MANIFEST
    text = manifest.read_text()

    def work(job: Job) -> list[Any]:
        wrong = []
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, first + count):
            manifest.write_bytes(mutate_manifest(random.Random(number), text))
            began, said = time.monotonic(), ""
            try:
                job.load_checkpoint(tmp_path / "step-00000001")
            except PolylaneError as error:
                said = str(error)
            except Exception as error:
                wrong.append((number, repr(error)[:300]))
            if "\n" in said or len(said) > 4300 or time.monotonic() - began > SECONDS:
                wrong.append((number, f"{time.monotonic() - began:.1f} s: {said[:300]}"))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
        return [*wrong, *([("all", f"{grown:.0f} MB")] if grown > MEGABYTES else [])]

    (wrong,) = on_workers(compile_once("data=1"), work)
    assert wrong == []


def test_a_manifest_that_is_too_long_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps("data=1", tmp_path, 1)
    path = tmp_path / "step-00000001" / MANIFEST
    manifest, text = read_manifest(path.parent), path.read_text()
    with path.open("r+") as file:
        file.truncate((128 << 20) + 1)  # a hole: nothing is read of it
    with pytest.raises(PolylaneError, match=r"manifest\.json: its size is over 128 MiB, which no manifest has"):
        read_manifest(path.parent)
    monkeypatch.setattr("polylane.checkpoint.manifest.MOST_BYTES", len(text))
    assert format_manifest(manifest) == text
    monkeypatch.setattr("polylane.checkpoint.manifest.MOST_BYTES", len(text) - 1)
    with pytest.raises(PolylaneError, match=r"^the manifest of \d+ chunks of \d+ tensors would be over 0 MiB"):
        format_manifest(manifest)
