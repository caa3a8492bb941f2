"""Finished steps: what a run's folder says of its recipe, speed and gradient noise, while it trains or later."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polylane.commands.logs.file_names import METRICS, RUN, find_folder
from polylane.commands.logs.metrics_file import find_batch
from polylane.efficiency.noise_estimates import NoiseEstimate
from polylane.efficiency.noise_window import WINDOW, NoiseScales, NoiseWindows
from polylane.errors import PolylaneError


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that advice needs, as ``run.json`` in its folder has them.

    Attributes:
        recipe: path of the recipe, or the dotted name of its module.
        settings: texts NAME=VALUE, keyword arguments of the recipe's functions.
        batch: number of samples of a step, at the start of the run.
        seed: of weights and of the order of samples.
        workers: number of workers of its plan.
        population: number of samples of the training data, each of which an epoch has once; None for a stream, or a
            sampler's own order.
        divides_gradients: whether its optimizer divides gradients by their size, as Adam.
    """

    recipe: str
    settings: tuple[str, ...]
    batch: int
    seed: int
    workers: int
    population: int | None
    divides_gradients: bool = False  # runs of before say nothing of it

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class FinishedSteps:
    """What the steps of a run say so far.

    Attributes:
        batch: number of samples of its latest full steps.
        samples_per_second: median throughput of the steps with that many samples; 0 where there are none.
        learning_rate: of its latest step, of the optimizer's first group; None where it has none.
        noise: the noise scales of the latest steps in which they were measured.
        measured_sizes: numbers of samples of the steps that these are averaged over, ascending.
        rate_factor: by how much a batch that grows has multiplied the learning rates of the first steps; None with a
            fixed batch, or before its first change.
    """

    batch: int
    samples_per_second: float
    learning_rate: float | None
    noise: NoiseScales
    measured_sizes: Sequence[int]
    rate_factor: float | None


def read_options(folder: Path) -> RunOptions:
    """Read the options of a run.

    Args:
        folder: folder of the run, or of one that has not ended well.

    Raises:
        PolylaneError: there is no such file, or it is not one of a run.
    """
    path = find_folder(folder) / RUN
    if not folder.is_dir():
        raise PolylaneError(f"{folder} is no folder of a run")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return RunOptions(**content | {"settings": tuple(content["settings"])})
    except OSError as error:
        raise PolylaneError(
            f"{folder}: its {RUN} cannot be read ({error.strerror or error}); runs of a script have none: advise is of "
            "runs of polylane train"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise PolylaneError(f"{path} is not the file of a run: it was edited") from error


def read_steps(folder: Path) -> FinishedSteps:
    """Read the metrics of a run; lines that are torn, or not of steps, are passed over.

    Args:
        folder: folder of the run, or of one that has not ended well.

    Raises:
        PolylaneError: the metrics cannot be read.
    """
    path = find_folder(folder) / METRICS
    windows, measured = NoiseWindows(), deque[int](maxlen=WINDOW)
    steps, changes = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise PolylaneError(f"{folder}: {METRICS} cannot be read: {error.strerror or error}") from error
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            content = json.loads(line)
            if "batch" in content:
                changes.append({name: float(content["batch"][name]) for name in ("step", "size", "rate_factor")})
            if "samples" not in content:
                continue
            step = {name: float(content[name]) for name in ("step", "samples", "samples_per_second")}
            steps.append(step | {"learning_rate": content.get("learning_rate")})
            if noise := content.get("noise"):
                windows.add(_read_estimate(noise), _read_estimate(noise["adam"]) if "adam" in noise else None)
                measured.append(int(step["samples"]))
    batch = find_batch(
        [(step["step"], step["samples"]) for step in steps], [(change["step"], change["size"]) for change in changes]
    )
    speeds = [step["samples_per_second"] for step in steps[1:] if step["samples"] == batch]
    rates, noise_scales = [step["learning_rate"] for step in steps], windows.measure()
    averaged = [*measured][-noise_scales.deciding.batches :] if noise_scales.deciding.batches else []
    return FinishedSteps(
        batch,
        statistics.median(speeds) if speeds else 0.0,
        float(rates[-1]) if rates and rates[-1] is not None else None,
        noise_scales,
        sorted(set(averaged)),
        changes[-1]["rate_factor"] if changes else None,
    )


def _read_estimate(columns: Mapping[str, Any]) -> NoiseEstimate:
    return NoiseEstimate(float(columns["step_g2"]), float(columns["step_s"]))
