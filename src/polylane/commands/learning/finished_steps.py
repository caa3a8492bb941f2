"""Finished steps: what a run's folder says of its recipe, speed and gradient noise, while it trains or later."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polylane.commands.logs.file_names import METRICS, RUN, UNFINISHED
from polylane.efficiency.noise_estimates import NoiseEstimate
from polylane.efficiency.noise_window import NoiseScale, NoiseWindow
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
        population: number of samples of the training data; None for a stream.
    """

    recipe: str
    settings: tuple[str, ...]
    batch: int
    seed: int
    workers: int
    population: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class FinishedSteps:
    """What the steps of a run say so far.

    Attributes:
        batch: number of samples of its latest full steps.
        samples_per_second: median throughput of the steps with that many samples; 0 where there are none.
        noise: the noise scale, of gradients as they are.
        adam_noise: of gradients as Adam divides them; of no batches with other optimizers.
    """

    batch: int
    samples_per_second: float
    noise: NoiseScale
    adam_noise: NoiseScale

    @property
    def deciding_noise(self) -> NoiseScale:
        """The noise scale that a batch is chosen by: that of the steps that the optimizer really makes."""
        return self.adam_noise if self.adam_noise.batches else self.noise


def read_options(folder: Path) -> RunOptions:
    """Read the options of a run.

    Args:
        folder: folder of the run, or of one that has not ended well.

    Raises:
        PolylaneError: there is no such file, or it is not one of a run.
    """
    path = _find_file(folder, RUN)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return RunOptions(**content | {"settings": tuple(content["settings"])})
    except OSError as error:
        raise PolylaneError(
            f"{folder}: {RUN} cannot be read ({error.strerror or error}): give the folder of a polylane train"
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
    path = _find_file(folder, METRICS)
    plain, adam = NoiseWindow(), NoiseWindow()
    steps = list[tuple[int, float]]()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise PolylaneError(f"{folder}: {METRICS} cannot be read: {error.strerror or error}") from error
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            content = json.loads(line)
            if "samples" not in content:
                continue
            steps.append((int(content["samples"]), float(content["samples_per_second"])))
            for window, columns in ((plain, content.get("noise")), (adam, (content.get("noise") or {}).get("adam"))):
                if columns:
                    window.add(NoiseEstimate(float(columns["step_g2"]), float(columns["step_s"])))
    # The last batch of an epoch may be a short one; a batch that grows has its latest size.
    batch = max((samples for samples, _ in steps[-20:]), default=0)
    speeds = [speed for samples, speed in steps[1:] if samples == batch]
    return FinishedSteps(batch, statistics.median(speeds) if speeds else 0.0, plain.measure(), adam.measure())


def _find_file(folder: Path, name: str) -> Path:
    unfinished = folder / UNFINISHED / name
    return unfinished if unfinished.exists() else folder / name
