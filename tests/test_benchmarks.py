"""Every benchmark runs, if only for a moment; and what benchmarks compute beside their measurements."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import benchmarks
from benchmarks.speed import balance, cores
from benchmarks.zoo.packages import load_torchvision
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind
from tests.support import subsets
from tests.support.hosts import Hosts


def test_control_groups_of_either_version(tmp_path: Path) -> None:
    assert cores.find(tmp_path) == f"there are no control groups at {tmp_path}"
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    assert "hands no cpu controller to its groups" in str(cores.find(tmp_path))
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    assert cores.find(tmp_path) == cores.Groups(tmp_path, 2)
    assert cores.Groups(tmp_path, 2).limits(0.45) == {"cpu.max": "1800 4000"}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cgroup.procs").write_text("")
    assert cores.find(tmp_path) == cores.Groups(tmp_path / "cpu", 1)
    one = cores.Groups(tmp_path / "cpu", 1).limits(0.45)
    assert one == {"cpu.cfs_period_us": "4000", "cpu.cfs_quota_us": "1800"}


FOLDER = Path(benchmarks.__file__).parent
MODULES = sorted(
    [
        str(file.relative_to(FOLDER)).removesuffix(".py").removesuffix("/__main__").replace("/", ".")
        for file in FOLDER.rglob("*.py")
        # Others that have a __main__ are started by these.
        if file.name == "__main__.py"
        or ('__name__ == "__main__"' in (text := file.read_text()) and "make_parser(" in text)
    ]
)
slow = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_has_a_command_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``python -m`` runs it."""
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{module}", run_name="__main__")
    assert not ended.value.code
    known = capsys.readouterr().out
    command = f"python -m benchmarks.{module}".removesuffix(".__main__")
    assert known.startswith(f"usage: {command} [-h]")
    assert "--quick" in known or module == "published"  # which measures nothing


NO_HOSTS = Hosts.why_not()
NEEDS_HOSTS = [slow, pytest.mark.skipif(bool(NO_HOSTS), reason=f"no hosts can be made: {NO_HOSTS}")]
# Arguments of the shortest run of each, and what it prints.
QUICK = [
    pytest.param("overhead.observing", [], r"digits by data=2: steps of .* observed: ", marks=slow, id="observing"),
    pytest.param("overhead.audit", [], r"digits by data=2: 30 steps .* audits account for", marks=slow, id="audit"),
    pytest.param("__main__", ["tiny"], "polylane pipeline=2,schedule=1f1b,microbatches=2", id="benchmarks"),
    pytest.param("speed.balance", [], r"\| `pipeline=3` \| [\d.]+%|not measured, for ", id="balance"),
    pytest.param("learning.batches", ["digits"], r"Recommended: \d+, ", marks=slow, id="batches"),
    pytest.param("speed.gpipe", ["tiny"], r"\| polylane schedule=1f1b \| \d+, \d+ \|", id="gpipe"),
    pytest.param("speed.choosing", ["tiny"], "polylane tensor=2", marks=slow, id="choosing"),
    pytest.param("overhead.checkpoints", [], r"data=2 +\d+ +[\d.]+ +[\d.]+ ", marks=slow, id="checkpoints"),
    pytest.param(
        "overhead.lengths", ["--plans", "data=1"], r"\| polylane data=1 \| [\d.]+ \|", marks=slow, id="lengths"
    ),
    pytest.param("speed.hosts", ["--tasks", "mlp"], r"10 plans: median error [\d.]+%", marks=NEEDS_HOSTS, id="hosts"),
    pytest.param("overhead.host_time", [], r"\| data=2 \| bucket, launched \| 1 \| \d+ \|", marks=slow, id="host_time"),
    pytest.param("memory.laws", [], r"\| 1f1b \| 2, 1 \| ([\d.]+ MiB) \| \1 \|", marks=slow, id="memory_laws"),
    pytest.param("memory.limit", [], r"\* by this plan: trains", marks=slow, id="memory_limit"),
    pytest.param("planner", ["--tasks", "digits"], "7 cases: median error", marks=slow, id="planner"),
    pytest.param("overhead.prepared", [], r"(?s)## digits, one worker.*## gpt, two workers", marks=slow, id="prepared"),
    pytest.param("planner.scale", [], r"\| 2 layers of GPT-3 \| 8 a100-80g \|", marks=slow, id="scale"),
    pytest.param("speed.sharded", ["tiny"], "polylane shard=parameters", marks=slow, id="sharded"),
    pytest.param(
        "learning.staleness", ["digits"], r"schedule=pipedream` \| 1, 0 \| [\d.]+", marks=slow, id="staleness"
    ),
    pytest.param(
        "speed.sync", ["--only", "outer="], r"\| `data=2,every=8,outer=0.7:0.9` \| [\d.]+%", marks=slow, id="sync"
    ),
    pytest.param("speed.tensor", ["tiny"], "Their losses differ by ", id="tensor"),
    pytest.param("speed.transport", [], r"\| broadcast \| 2 \| 1 \|", id="transport"),
    pytest.param("speed.utilization", [], r"(?s)\| 1f1b, 2 \| [\d.]+%.*\| pipedream, 2 \| [\d.]+%", id="utilization"),
    pytest.param("overhead.witnesses", [], r"\| digits \| data=2 \|", marks=slow, id="witnesses"),
    pytest.param("speed.zero_bubble", ["tiny"], "torch ScheduleZBVZeroBubble", marks=slow, id="zero_bubble"),
    pytest.param("gpu.several", ["failure", "--device", "cpu"], "Everything holds", marks=slow, id="gpus"),
    pytest.param("zoo", ["--family", "vision_transformers"], r"DeiT +data=2 +equal", marks=slow, id="zoo"),
]


def test_the_page_of_the_zoo_is_written_from_what_was_measured() -> None:
    from benchmarks.zoo import page

    text = page.PAGE.read_text()
    assert text == page.render_page(page.load_measured())
    assert not re.findall(r"(?<![\w.`])/\w+/\S*", text)  # no path of one machine


def test_files_of_the_zoo_are_named_alike_on_every_machine() -> None:
    from benchmarks.zoo.page import name_files_alike

    there = (
        "x (/.venv/lib/python3.11/site-packages/timm/models/vit.py:3) and (/home/me/benchmarks/zoo/models/physics.py:9)"
    )
    assert name_files_alike(there) == "x (timm/models/vit.py:3) and (benchmarks/zoo/models/physics.py:9)"
    generated = "called from /tmp/torch_geometric.nn.conv.sage_conv_SAGEConv_propagate_1p7ckm95.py:83)"
    assert name_files_alike(generated) == "called from torch_geometric.nn.conv.sage_conv_SAGEConv_propagate.py:83)"


def test_every_benchmark_has_a_quick_run() -> None:
    # The first three measure nothing here, and read files of others; the last one needs a device.
    without = {"published", "published.flight_recordings", "scripts", "gpu"}
    assert {case.values[0] for case in QUICK} | without == set(MODULES)


@pytest.mark.parametrize(("module", "arguments", "printed"), subsets.one_in(2, QUICK, several=True))
def test_a_quick_run_prints_its_table(
    module: str, arguments: list[str], printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if module == "zoo":
        load_torchvision()
        pytest.importorskip("timm")
    monkeypatch.chdir(FOLDER.parent)  # recipes are named by where they are from there
    package = Path(FOLDER, module.replace(".", "/")).is_dir()
    main: Any = importlib.import_module(f"benchmarks.{module}{'.__main__' if package else ''}").main
    assert not main([*arguments, "--quick"])
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.parametrize("module", ["benchmarks.__main__", "benchmarks.speed.sharded"])
def test_races_are_of_the_tasks_that_are_named_or_the_usual_ones(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Any = importlib.import_module(module)
    raced = list[int]()
    monkeypatch.setattr(main, "race", lambda entries, rounds, steps: raced.append(steps))
    monkeypatch.setattr(main, "table", lambda entries, by: "")
    monkeypatch.setattr(main, "field", lambda task, more: [])
    main.main([])
    assert raced == ([2, 8] if module == "benchmarks.__main__" else [2])
    main.main(["mlp"])
    assert raced[-1] == 8
    with pytest.raises(SystemExit):
        main.main(["gtp"])
    assert "there is no task 'gtp': choose from gpt, mlp" in capsys.readouterr().err


def passes_of(times: tuple[float, ...], plan: list[int], waited: float) -> Timeline:
    """A forward and a backward pass of every rank; ``plan`` is the stage of each."""
    spans = []
    for rank, stage in enumerate(plan):
        middle, end = times[stage] / 3, times[stage]
        spans.append(Span(rank, Action(ActionKind.FORWARD, stage, 0), 0, middle, waited * middle))
        spans.append(Span(rank, Action(ActionKind.BACKWARD, stage, 0), middle, end, waited * (end - middle)))
    return Timeline(tuple(spans), len(plan))


@pytest.mark.parametrize(
    ("line", "times", "expected"),
    [
        ("pipeline=3", (1.0, 2.0, 1.0), 32 / 52),
        ("[1 | data=2 | 1]", (1.0, 1.0, 1.0), 0.8),
        ("[1 | tensor=2 | 1]", (1.0, 1.0, 1.0), 0.8),
    ],
)
def test_the_play_of_stage_times(line: str, times: tuple[float, ...], expected: float) -> None:
    """Balanced stages are used better; what passes wait inside is not used."""
    model, batch = nn.Sequential(*(balance.Unit() for _ in range(4))), [torch.zeros(16, balance.WIDTH)] * 2
    prepared = balance.prepared_for(line, model, batch)
    stages = [prepared.plan.stage_and_replica(rank)[0] for rank in range(prepared.plan.workers)]
    for waited in (0.0, 0.25):
        found = balance.by_stage_times(prepared, [passes_of(times, stages, waited)] * 2)
        assert found == pytest.approx((1 - waited) * expected)
