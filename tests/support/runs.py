"""Folders of runs as a training writes them, of any size, without a training."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from polylane.inspection.schedule_report import ScheduleShape, draw_schedule
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind

TICK = 4e-3  # seconds of a tick of theory


def make_theory(stages: int, replicas: int, microbatches: int) -> Timeline:
    """A pipeline of theory in seconds, with a lane for every rank: replicas of a stage follow each other."""
    theory = draw_schedule(ScheduleShape(schedule="1f1b", stages=stages, microbatches=microbatches), 1, 2).timeline
    spans = [
        replace(span, rank=span.rank * replicas + replica, start=span.start * TICK, end=span.end * TICK)
        for span in theory.spans
        for replica in range(replicas)
    ]
    return Timeline(tuple(spans), stages * replicas, title="theory")


def make_measured(theory: Timeline, replicas: int, seed: int = 0, name: str = "h") -> Timeline:
    """As the theory, with later starts, messages between stages, and a reduce at the end of every rank."""
    chance, spans = random.Random(seed), list[Span]()
    delay = [chance.uniform(0, TICK) for _ in range(theory.ranks)]
    for rank, lane in enumerate(theory.lanes()):
        for span in lane:
            start, action = 1.2 * span.start + delay[rank], span.action
            length = (span.end - span.start) * chance.uniform(1, 1.15)
            peer = rank - replicas if action.kind is ActionKind.FORWARD else rank + replicas
            if 0 <= peer < theory.ranks:
                sent = Action(ActionKind.SEND, action.stage, action.microbatch, name, rank)
                received = Action(ActionKind.RECEIVE, action.stage, action.microbatch, name, peer)
                sent, received = (replace(one, gradient=peer > rank) for one in (sent, received))
                spans.append(Span(peer, sent, start - TICK / 8, start - TICK / 16, bytes=65536))
                spans.append(Span(rank, received, max(0.0, start - TICK / 2), start, bytes=65536))
            spans.append(Span(rank, action, start, start + length, waited=length * 0.05, bytes=1024))
        end = max(span.end for span in spans if span.rank == rank)
        reduce = Action(ActionKind.REDUCE, lane[0].action.stage, value=f"stage{lane[0].action.stage}.0")
        spans.append(Span(rank, reduce, end, end + chance.uniform(1, 2) * TICK, bytes=1 << 20))
    return Timeline(tuple(spans), theory.ranks, title="measured")


def _keep_steps(theory: Timeline, replicas: int, steps: int, name: str) -> dict[str, Timeline]:
    kept = {}
    for seed, key in enumerate(("first", "slowest", "typical", "last")):
        number = str(seed * steps // 4 + 1)
        notes = {"step": number, "reason": f"the {key} step", "plan": f"data={replicas}", "recipe": name}
        measured = make_measured(theory, replicas, seed, name)
        kept[key] = replace(measured, title=f"measured · step {number}", notes=notes)
    return kept


def _make_goodput(steps: int, replicas: int, ranks: int) -> dict[str, Any]:
    """What goodput.json has: the run was resumed in the middle, under another plan."""
    attempts = [
        {"began": 1.7e9, "plan": f"data={replicas}", "workers": ranks, "resumed_at": None},
        {"began": 1.7e9 + 60, "plan": f"data={replicas},pipeline=2", "workers": ranks, "resumed_at": steps // 2},
    ]
    causes = {"computing": 60.0, "bubble": 22.0, "waiting": 12.0, "start": 5.0, "redone steps": 1.0}
    verdict = (
        f"2.9 times the speed of one device, on {ranks} workers; 61% computing, 22% bubble, 12% waiting for rank 3"
    )
    sums = {"wall_seconds": 100.0, "useful_seconds": 60.0, "share": 0.6, "seconds": causes}
    return {"attempts": attempts, **sums, "verdict": verdict}


def _make_lines(steps: int, typical: Timeline, replicas: int, name: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: four epochs, every tenth step observed."""
    account, chance, ranks = account_time(typical), random.Random(1), typical.ranks
    waits = {str(rank): share for rank, share in account.waiting_for().items()}
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3 * math.exp(-3 * step / steps) + 0.5 + chance.gauss(0, 0.02)
        line: dict[str, Any] = {"step": step, "epoch": 1 + step * 4 // (steps + 1), "loss": loss, "samples": 64}
        line |= {"seconds": 0.1, "samples_per_second": 640 + chance.gauss(0, 9)}
        line |= {"learning_rate": 1e-3 * (1 - step / steps)}
        if step % 10 == 0 or step < 5:
            scale = 200 + 100 * step / steps
            line |= account.shares() | {"loss_max": loss + 0.1, "gradient_norm": 1 + loss, "bytes_sent": 1 << 22}
            line |= {"waiting_for": waits, "memory": [(1 << 28) + rank * (1 << 20) for rank in range(ranks)]}
            line |= {"device_share": 0.4, "loading": 0.01, "checkpoint_stall": 0.0}
            line |= {"noise": {"g2": 0.1, "s": 20.0, "scale": scale, "low": 0.8 * scale, "high": 1.3 * scale}}
        lines.append(line)
        if step % max(1, steps // 4) == 0:
            epoch = {"epoch": line["epoch"], "step": step, "train_loss": loss, "seconds": 3.0}
            metrics = {"test_loss": loss + 0.05, "metrics": {name: 1 - loss / 4}, "evaluation_seconds": 0.5}
            lines.append({**epoch, **metrics})
    return lines


def _predict(theory: Timeline, stages: int, replicas: int, name: str) -> dict[str, Any]:
    described = [
        {
            "stage": stage,
            "ranks": list(range(stage * replicas, (stage + 1) * replicas)),
            "mesh": f"data={replicas}",
            "modules": [name, f"blocks.{stage}"],
            "parameters": 123456,
            "sends": [{"to": stage + 1, "bytes": 65536}] if stage + 1 < stages else [],
        }
        for stage in range(stages)
    ]
    environment = {"torch": "2.13", "host": name, "devices": ["cpu"], "command": ["polylane", "train", "x.py"]}
    return {
        "plan": f"data={replicas},pipeline={stages}",
        "plan_yaml": "",
        "timeline": replace(make_measured(theory, replicas, 9, name), title="predicted").to_dict(),
        "theory": theory.to_dict(),
        "memory": [(1 << 28) + (1 << 24)] * theory.ranks,
        "step_seconds": 0.09,
        "one_device_seconds": 0.3,
        "stages": described,
        "changes": [{"change": "twice as many microbatches (8)", "plan": "pipeline=2,microbatches=8", "faster": 1.14}],
        "environment": environment,
    }


def write_run(
    folder: Path, steps: int = 60, stages: int = 2, replicas: int = 2, microbatches: int = 4, name: str = "h"
) -> Path:
    """Write a run's files, and return the folder.

    Args:
        folder: is made.
        steps: number of steps; a tenth of them is observed.
        stages, replicas, microbatches: of the plan.
        name: of a value that crosses, a module, a metric and the recipe: the user's words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    theory = make_theory(stages, replicas, microbatches)
    kept = _keep_steps(theory, replicas, steps, name)
    lines = _make_lines(steps, kept["typical"], replicas, name)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "goodput.json").write_text(json.dumps(_make_goodput(steps, replicas, theory.ranks)))
    (folder / "timelines.json").write_text(json.dumps({"steps": {key: t.to_dict() for key, t in kept.items()}}))
    (folder / "predicted.json").write_text(json.dumps(_predict(theory, stages, replicas, name)))
    (folder / "plan.yaml").write_text(f"stages: {stages}  # {name}\nmicrobatches: {microbatches}\n")
    (folder / "model.safetensors").write_bytes(b"")
    return folder
