"""What `make gpu` measures: on the CPU, on a CUDA device that is only pretended, and refused where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import dropout, report, speed, teams
from benchmarks.gpu.setting import Row, Setting, relative_difference
from tests.fake_cuda import build

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def test_without_a_device_it_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    assert gpu.main([]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


def test_every_integer_operation_of_keyed_numbers_is_written_out_in_known_bits():
    """The numbers that the operations must give on any device, computed with Python's own integers."""

    def wrap(value: int) -> int:
        value &= 0xFFFFFFFF
        return value - (1 << 32) if value >= 1 << 31 else value

    found = dict(dropout.integer_operations(CPU))
    extremes = dropout.EXTREMES
    assert found["shift by 15"].tolist() == [each >> 15 for each in extremes]
    assert found["and"].tolist() == [each & 0x1FFFF for each in extremes]
    assert found["xor"].tolist() == [wrap(a ^ b) for a, b in zip(extremes, extremes[::-1], strict=True)]
    assert found["product with 2146121005"].tolist() == [wrap(each * 2146121005) for each in extremes]
    assert found["product with -2073254261"].tolist() == [wrap(each * -2073254261) for each in extremes]
    assert found["sum"].tolist() == [[wrap(a + b) for b in extremes] for a in extremes]
    assert found["arange"].tolist() == list(range(2**31 - 9, 2**31 - 1))
    assert found["cast of 64 bits"].tolist() == [wrap(each) for each in range(2**32 - 4, 2**32 + 4)]
    assert found["lower half"].tolist() == [1 << 8] * 8


def test_values_by_key_are_compared_bit_by_bit():
    rows = dropout.measure(Setting("cpu", True), CPU)
    assert sum(row.holds is True for row in rows) > 35 and not any(row.holds is False for row in rows)
    assert sum("ms" in row.figures for row in rows) == 6


def test_the_report_names_what_does_not_hold(tmp_path: Path):
    rows = [Row("memory", "a", {"ratio": 1.5}, False), Row("equality", "b", {"far": 0.0, "why": "x"}, True)]
    report.write(rows, {"device": "CPU"}, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["figures"] == {"ratio": 1.5}
    text = (tmp_path / "report.md").read_text()
    assert "| a | 1.5 | NO |" in text and text.index("## equality") < text.index("## memory")


def test_figures():
    assert relative_difference({"x": torch.tensor([1.0, 2.5])}, {"x": torch.tensor([1.0, 2.0])}) == 0.25
    # 350 million parameters: 6 operations for each and token, and attention's
    assert speed.count_flops({"layers": 24, "hidden": 1024, "length": 1024, "vocabulary": 50304}, 1) > 2.1e9 * 1024


def test_a_plan_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    runs: list[tuple[str, ...]] = []

    def spawn(work, workers, hear, start_method):
        plans = work.args[0]
        runs.append(plans)
        for plan in plans:
            if plan == "bad":
                raise RuntimeError("first line\nthe cause")
            hear(0, {"plan": plan, "figures": {"seconds": 0.0}})

    monkeypatch.setattr(teams, "start_workers", spawn)
    monkeypatch.setattr(teams.families, "plans_of", lambda workers, quick: ("a", "bad", "b"))
    found = teams.measure_families(Setting("cpu", True), 2)
    assert runs == [("a", "bad", "b"), ("b",)]
    assert found["bad"] == {"failed": "RuntimeError: the cause"} and "figures" in found["b"]


def run_quickly(folder: Path, *words: str, **options) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--run", str(folder), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]


@pytest.mark.slow
def test_the_same_measurements_on_the_cpu(tmp_path: Path):
    run_quickly(
        tmp_path, "--device", "cpu", "--only", "equality", "collectives", "spans", "memory", "speed", "prediction"
    )


@pytest.mark.slow
def test_a_killed_training_is_resumed_to_the_unbroken_one(tmp_path: Path):
    run_quickly(tmp_path, "--device", "cpu", "--only", "resuming")
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["figures"]["weights"] for row in rows] == [0.0, 0.0]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not build.can_build():
        pytest.skip("a compiler, and a torch without CUDA, are needed")
    return build.build(tmp_path_factory.mktemp("fake"))


@pytest.mark.slow
def test_on_a_pretended_device(tmp_path: Path, library: Path):
    """Workers share one device: every tensor is on it, and every copy to the host is waited for."""
    subjects = ("equality", "dropout", "spans", "families")
    run_quickly(tmp_path, "--only", *subjects, env=build.environment(library, 1))
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    carried = {row["figures"].get("carried by") for row in rows if row["subject"] == "families"}
    devices = {row["figures"].get("device") for row in rows if row["subject"] == "families"}
    assert carried == {"host memory"} and devices == {"cuda:0"}


@pytest.mark.slow
def test_captured_code_is_checked_on_the_device_that_trains(library: Path):
    """Where the model runs there; the host checks what keeps tensors of its own, and what needs too much memory."""
    command, env = [sys.executable, str(ROOT / "tests/fake_cuda/check_device.py")], build.environment(library, 1)
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.stdout == "checked\n", ended.stdout + ended.stderr[-2000:]


@pytest.mark.slow
def test_a_training_on_a_pretended_device_is_the_host_s(library: Path):
    """Also where a worker holds a part of the model there, and captures all of it again."""
    command = [sys.executable, str(ROOT / "tests/fake_cuda/check_training.py"), "pipeline=2", "tensor=2"]
    lines: list[list[list[float]]] = []
    for more in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        env = {**build.environment(library, 1), **more}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        lines.append([json.loads(line) for line in ended.stdout.splitlines()])
    assert len(lines[0]) == 2
    for on_device, on_host in zip(*lines, strict=True):
        assert on_device == pytest.approx(on_host, rel=1e-12)


@pytest.mark.slow
def test_workers_with_a_device_each_launch_in_one_order_and_never_wait_for_it(library: Path):
    """Over a fake NCCL: equal to one device, no law of launches broken, and no wait of the host in a step."""
    plans = ("data=2", "pipeline=2,microbatches=4", "tensor=2", "data=2,shard=parameters", "data=2,compress=top_k:0.1")
    command = [sys.executable, str(ROOT / "tests/fake_cuda/check_nccl.py"), "gpt", *plans]
    environment = build.environment(library, 2)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert [row[0] for row in rows] == list(plans)
    for plan, difference, violations, waits in rows:
        assert difference < 1e-9 or "compress" in plan
        assert (violations, waits) == ([], {})
