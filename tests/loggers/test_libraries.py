"""Loggers of other libraries: with the real packages, offline, what is read back is what was logged."""

from __future__ import annotations

import importlib.util
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polylane.errors import PolylaneError
from polylane.loggers.libraries import open_loggers
from polylane.loggers.logger import LoggerGroup, RunFacts
from polylane.runtime.workers.team import fork_workers

LINES = {1: {"loss": 2.5, "memory": [10, 20]}, 2: {"loss": 1.5}, 3: {"loss": 1.25}}


def log_run(library: str, folder: Path) -> None:
    """Log two steps, stop, and go on with the third, as a run that is resumed after its second step."""
    for resumed_at, steps in ((None, (1, 2)), (2, (3,))):
        group = LoggerGroup(open_loggers(library), pytest.fail)
        group.begin(RunFacts("digits", folder, "data=2", 2, resumed_at, {"batch": 64}))
        for step in steps:
            group.log(LINES[step], step, "train")
        group.log({"accuracy": 0.5 + steps[-1] / 10}, steps[-1], "test")
        group.end()
        if library == "wandb":  # which names a folder by the second
            time.sleep(1.1)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert values["train/loss"] == [(1, 2.5), (2, 1.5), (3, 1.25)]
    assert values["train/memory/1"] == [(1, 20.0)]
    assert [step for step, _ in values["test/accuracy"]] == [2, 3]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        log_run("mlflow", tmp_path)
        (run,) = mlflow.MlflowClient().search_runs(["0"])
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    finally:
        mlflow.set_tracking_uri(None)
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.5), (2, 1.5), (3, 1.25)]
    assert run.data.tags["plan"] == "data=2" and run.data.tags["batch"] == "64"
    assert run.data.metrics["test/accuracy"] == 0.8


@pytest.mark.parametrize("place", [None, "file:mlruns", "gopher://away"])
def test_a_place_that_mlflow_cannot_open_is_refused(
    place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a run begins, with what can be set in its stead: mlflow-skinny has no database, which is the default."""
    pytest.importorskip("mlflow")
    if place is None and importlib.util.find_spec("sqlalchemy") is not None:
        pytest.skip("a database can be opened here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    if place is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    with pytest.raises(PolylaneError) as refused:
        open_loggers("mlflow")
    said = str(refused.value)
    assert said.startswith(f"--log mlflow: MLflow cannot open {place or 'sqlite:///'}")
    assert said.endswith("set MLFLOW_TRACKING_URI=file:mlruns and MLFLOW_ALLOW_FILE_STORE=true, for a folder")


def test_a_full_disk_is_one_sentence_for_tensorboard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its thread that writes prints no traceback of its own: it passes what it raises on to the next call."""
    pytest.importorskip("tensorboard")

    def log() -> list[str]:
        said = list[str]()
        group = LoggerGroup(open_loggers("tensorboard"), said.append)
        group.begin(RunFacts("digits", tmp_path, "data=2", 2, None, {}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        for step in range(300):
            group.log({"loss": 0.5}, step, "train")
            time.sleep(0.001)
        group.end()
        return said

    (said,) = fork_workers(lambda context: log(), 1)
    assert len(said) == 1 and said[0].startswith("--log tensorboard: OSError: [Errno 27] File too large")
    assert "Traceback" not in capfd.readouterr().err


def read_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a run's file: LevelDB's log format, 7 bytes of a header before the first block's records."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as records

    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    log_run("wandb", tmp_path)
    losses, identities = dict[int, float](), set[str]()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in read_records(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                identities.add(record.run.run_id)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in items:
                losses[int(items["_step"])] = float(items["train/loss"])
    assert losses == {1: 2.5, 2: 1.5, 3: 1.25}
    assert len(identities) == 1  # one run, which was resumed
