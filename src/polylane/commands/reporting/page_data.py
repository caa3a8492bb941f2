"""Page data: a run's files -> what its page shows, as plain data; every number here, every sentence too."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from polylane.commands.printing import format_name
from polylane.commands.reporting import curves
from polylane.commands.reporting.page_lanes import count_traffic, draw_lanes, stages_of
from polylane.commands.reporting.page_verdict import describe_changes, find_verdict, rate_other_batches
from polylane.commands.reporting.run_files import RunFiles, read_list, read_mapping, read_noise
from polylane.observe.timeline import Timeline
from polylane.plan.spec import shorten_plan

SHARES = ("computing", "moving", "communicating", "waiting", "bubble")
# What marks an event in a chart and before its sentence.
MARKS = {"restart": "↻", "batch": "⇕"}
MOST_SHARES = 300  # points of the chart of shares, each a mean
# Columns of step lines that are curves of their own, by chart.
CHARTS: Mapping[str, Mapping[str, str]] = {
    "loss": {"loss": "loss", "loss_max": "largest loss of a replica"},
    "learning_rate": {"learning_rate": "learning rate"},
    "gradient_norm": {"gradient_norm": "norm of the gradients"},
    "loss_scale": {"loss_scale": "loss scale"},
    "throughput": {"samples_per_second": "samples/s"},
    "tokens": {"tokens_per_second": "tokens/s"},
    "device_share": {
        "device_share": "of the devices' measured rate",
        "loading": "loading",
        "checkpoint_stall": "checkpoints",
    },
}


def collect_run(run: RunFiles) -> dict[str, Any]:
    """Return what the page of a run shows, as plain data for JSON."""
    pictures = {name: {**draw_lanes(timeline), "key": name} for name, timeline in run.timelines.items()}
    typical = next(iter(run.timelines.values()), None)
    charts = {name: _collect_chart(run, columns) for name, columns in CHARTS.items()}
    charts["loss"] |= _collect_epochs(run, lambda line: {n: line.get(n) for n in ("train_loss", "test_loss")})
    charts["metrics"] = _collect_epochs(run, lambda line: read_mapping(line.get("metrics")))
    charts["noise"] = _collect_noise(run)
    data: dict[str, Any] = {
        "name": run.path.resolve().name or str(run.path),
        "recipe": _find_recipe(run),
        "plan": _find_plan(run),
        "state": describe_state(run),
        "verdict": find_verdict(run),
        "changes": describe_changes(run),
        "missing": list(run.missing),
        "facts": _collect_facts(run),
        "pictures": list(pictures.values()),
        "shares": _collect_shares(run),
        "waits": _collect_waits(run),
        "charts": {name: chart for name, chart in charts.items() if chart},
        "events": _collect_events(run),
        "memory": _collect_memory(run),
        "traffic": [] if typical is None else count_traffic(typical),
        "goodput": _collect_goodput(run),
        "batches": rate_other_batches(run),
        "stages": _find_stages(run),
        "plan_text": run.plan,
        "environment": _describe_environment(run),
        "downsampled": _describe_thinning(run),
    }
    for name in ("timeline", "theory"):
        data["predicted" if name == "timeline" else name] = _draw_predicted(run, name)
    return data


def describe_state(run: RunFiles) -> str:
    """Return how a run is: "failed", "ended" well, "running", or "stopped" before its end."""
    if run.failure:
        return "failed"
    if run.has_ended:
        return "ended"
    return "running" if run.is_running else "stopped"


def _draw_predicted(run: RunFiles, name: str) -> dict[str, Any] | None:
    try:
        return draw_lanes(Timeline.from_dict(run.predicted[name])) if run.predicted.get(name) else None
    except (ValueError, TypeError, KeyError):  # a file of somebody else's making
        return None


def _find_recipe(run: RunFiles) -> str:
    for timeline in run.timelines.values():
        if timeline.notes.get("recipe"):
            return timeline.notes["recipe"]
    words = [str(word) for word in read_list(read_mapping(run.predicted.get("environment")).get("command"))]
    return next((word for word in words[1:] if word.endswith(".py")), "")


def _describe_environment(run: RunFiles) -> dict[str, str]:
    """Return what the run was made with, by name; the command line as a shell takes it."""
    rows = dict[str, str]()
    for name, value in read_mapping(run.predicted.get("environment")).items():
        words = [str(word) for word in value] if isinstance(value, list) else None
        rows[str(name)] = str(value) if words is None else shlex.join(words) if name == "command" else ", ".join(words)
    return rows


def _find_stages(run: RunFiles) -> list[Any]:
    """Return the stages as they were described before the run, or as a timeline has them."""
    stages = [_clean_stage(stage) for stage in map(read_mapping, read_list(run.predicted.get("stages")))]
    typical = next(iter(run.timelines.values()), None)
    return stages or ([] if typical is None else stages_of(typical))


def _clean_stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a stage, in the types that its script expects whatever the file has."""
    links = [read_mapping(link) for link in read_list(stage.get("sends"))]
    return {
        "stage": str(stage.get("stage", "")),
        "ranks": [str(rank) for rank in read_list(stage.get("ranks"))],
        "mesh": str(stage.get("mesh", "")),
        "modules": [str(module) for module in read_list(stage.get("modules"))],
        "parameters": curves.read_number(stage.get("parameters")),
        "sends": [{"to": str(link.get("to")), "bytes": curves.read_number(link.get("bytes")) or 0} for link in links],
    }


def _find_plan(run: RunFiles) -> str:
    plans = [attempt.get("plan") for attempt in run.attempts] + [run.predicted.get("plan")]
    return shorten_plan(next((str(plan) for plan in reversed(plans) if plan), ""))


# Curves --------------------------------------------------------------------------------------------------------------


def _collect_chart(run: RunFiles, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the curves of some columns, by the words for them."""
    chart: dict[str, Any] = {}
    for column, words in columns.items():
        curve = curves.read_curve(run.steps, lambda line, name=column: line.get(name))  # type: ignore[misc]
        if curve[0]:
            chart[words] = _pack(curve)
    return chart


def _collect_epochs(run: RunFiles, read: Any) -> dict[str, Any]:
    """Return the curves of what was evaluated at the end of epochs, by name."""
    names = dict.fromkeys(name for line in run.epochs for name in (read(line) or {}))
    chart: dict[str, Any] = {}
    for name in names:
        curve = curves.read_curve(run.epochs, lambda line, key=name: (read(line) or {}).get(key))  # type: ignore[misc]
        if curve[0]:
            chart[format_name(name).replace("_", " ")] = _pack(curve) | {"points": True}
    return chart


def _collect_noise(run: RunFiles) -> dict[str, Any]:
    """Return the curves of the noise scale and of the ends of its interval."""
    chart: dict[str, Any] = {}
    for key, words in (("scale", "noise scale"), ("low", "95% from"), ("high", "95% to")):
        curve = curves.read_curve(
            run.steps,
            lambda line, name=key: read_noise(line).get(name),  # type: ignore[misc]
        )
        if curve[0]:
            chart[words] = _pack(curve)
    return chart


def _pack(curve: curves.Curve) -> dict[str, Any]:
    steps, values = curves.thin(curve)
    return {"x": [int(step) for step in steps], "y": curves.round_all(values)}


def _collect_shares(run: RunFiles) -> dict[str, Any]:
    """Return the shares of the steps' time over the run, as columns; empty where no step was observed."""
    names = [name for name in SHARES if any(curves.read_number(line.get(name)) is not None for line in run.steps)]
    rows = [
        (float(line["step"]), [curves.read_number(line.get(name)) or 0.0 for name in names])
        for line in run.steps
        if names and curves.read_number(line.get("computing")) is not None
    ]
    means = curves.average(rows, MOST_SHARES)
    columns = {name: curves.round_all((values[at] for _, values in means), 4) for at, name in enumerate(names)}
    return {"x": [int(step) for step, _ in means], "columns": columns, "observed": len(rows)} if rows else {}


def _collect_waits(run: RunFiles) -> list[list[Any]]:
    """Return [rank, mean share of all workers' time] that was waited for a rank, the most first."""
    observed = [line["waiting_for"] for line in run.steps if isinstance(line.get("waiting_for"), dict)]
    sums: dict[str, float] = {}
    for waits in observed:
        for rank, share in waits.items():
            sums[str(rank)] = sums.get(str(rank), 0.0) + (curves.read_number(share) or 0.0)
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    return [[rank, round(total / len(observed), 5)] for rank, total in ranked if total > 0][:12]


def _collect_events(run: RunFiles) -> list[dict[str, Any]]:
    """Return what happened at steps: restarts, changes of the plan and of the batch, in order."""
    events, plan = list[dict[str, Any]](), ""
    for number, attempt in enumerate(run.attempts):
        step, name = curves.read_number(attempt.get("resumed_at")), str(attempt.get("plan") or "")
        if number or step is not None:
            workers = f", {attempt['workers']} workers" if attempt.get("workers") else ""
            change = f", plan changed to {name}" if plan and name != plan else ""
            begin = round(step or 0)
            text = f"resumed at step {begin}{workers}{change}"
            events.append({"step": begin, "text": text, "mark": MARKS["restart"]})
        plan = name or plan
    for batch_change in run.batch_changes:
        step, size = (curves.read_number(batch_change.get(key)) for key in ("step", "size"))
        if step is not None and size is not None:
            factor = curves.read_number(batch_change.get("rate_factor"))
            rate = "" if factor is None else f", with {factor:.2f} times the learning rate of the first batch"
            text = f"batches of {size:,.0f} samples after step {step:.0f}{rate}"
            events.append({"step": round(step), "text": text, "mark": MARKS["batch"]})
    return sorted(events, key=lambda event: event["step"])


# Tables --------------------------------------------------------------------------------------------------------------


def _collect_facts(run: RunFiles) -> list[list[str]]:
    """Return [name, value] of what a reader looks for first."""
    facts: list[list[str]] = []
    if run.steps:
        line = run.steps[-1]
        facts.append(["steps", f"{line['step']:,}"])
        loss = curves.read_number(line.get("loss"))
        facts.append(["last loss", "not finite" if loss is None else f"{loss:.5g}"])
        speeds = sorted(curves.read_curve(run.steps[1:] or run.steps, lambda row: row.get("samples_per_second"))[1])
        facts += [["samples/s, median", f"{speeds[len(speeds) // 2]:,.5g}"]] if speeds else []
    for name in ("test_loss", "metrics"):
        value = run.epochs[-1].get(name) if run.epochs else None
        values = value if isinstance(value, dict) else {name.replace("_", " "): value}
        numbers = {format_name(key): curves.read_number(number) for key, number in values.items()}
        facts += [[key, f"{number:.5g}"] for key, number in numbers.items() if number is not None]
    if run.attempts:
        began = curves.read_number(run.attempts[0].get("began"))
        facts += [["began", time.strftime("%Y-%m-%d %H:%M", time.localtime(began))]] if began else []
        facts += [["attempts", str(len(run.attempts))]] if len(run.attempts) > 1 else []
    facts += [["audited steps", str(len(run.audits))]] if run.audits else []
    return facts


def _collect_memory(run: RunFiles) -> dict[str, Any]:
    """Return the peak bytes of each rank, measured over the run and predicted; None where they are not known."""
    measured: list[float] = []
    for line in run.steps:
        row = line.get("memory")
        if isinstance(row, list):
            numbers = [curves.read_number(value) or 0.0 for value in row]
            longest = max(len(numbers), len(measured))
            pairs = zip(_padded(numbers, longest), _padded(measured, longest), strict=True)
            measured = [max(pair) for pair in pairs]
    numbers = [curves.read_number(value) or 0.0 for value in read_list(run.predicted.get("memory"))]
    return {"measured": measured, "predicted": numbers} if measured or numbers else {}


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]


def _collect_goodput(run: RunFiles) -> dict[str, Any]:
    """Return the wall time of the run by cause, the most first."""
    seconds = read_mapping(run.goodput.get("seconds"))
    numbers = {str(cause): curves.read_number(value) for cause, value in seconds.items()}
    causes = sorted(((v, cause) for cause, v in numbers.items() if v), reverse=True)
    wall = curves.read_number(run.goodput.get("wall_seconds")) or sum(value for value, _ in causes)
    return {"wall": wall, "causes": [[cause, round(value, 3)] for value, cause in causes]} if causes else {}


def _describe_thinning(run: RunFiles) -> str:
    """Return a sentence on what the charts leave out; "" where they show every step."""
    if len(run.steps) <= curves.MOST_POINTS:
        return ""
    return (
        f"Of {len(run.steps):,} steps the charts show the lowest and the highest of each stretch, at most "
        f"{curves.MOST_POINTS} points a curve: no spike is left out."
    )
