"""Groups of options that several commands take, each a record whose fields are options of the command line.

Plain data without torch, as the requests that they are parts of. A group's title is its heading in the help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from polylane.callbacks.callback import Callback
from polylane.callbacks.metric_rules import BestSteps, EarlyStopping, MetricRule, StopAtMetric
from polylane.commands.learning_rates import LargeBatch, LearningRateOptions, NoiseMode, RateRule
from polylane.errors import PolylaneError
from polylane.runtime.workers.stop_request import GRACE

OnNan = Literal["stop", "warn"]
OnDiskError = Literal["warn", "stop"]
OnHang = Literal["stop", "restart", "wait"]

LOG_SECONDS = 5.0  # least time between two lines of a log


@dataclass(frozen=True)
class SavingOptions:
    """The options of checkpoints.

    Attributes:
        save_every: text of the interval of checkpoints: "500" steps, "10m", or "auto"; None: none are saved.
        keep: number of newest complete checkpoints that are kept.
        resume: "auto" for the newest complete checkpoint of the run's folder, if any; or the path of one; None: begin.
        max_restarts: times that workers are started again after one has died; None: not at all, or once for each
            worker that may be lost.
    """

    title: ClassVar[str] = "Checkpoints and restarts"
    save_every: str | None = None
    keep: int = 3
    resume: str | None = None
    max_restarts: int | None = None

    @property
    def restarts(self) -> int:
        """Times that workers are started again."""
        return self.max_restarts or 0


@dataclass(frozen=True)
class TroubleOptions:
    """The options for what may happen to a run.

    Attributes:
        on_hang: reaction to a worker that does not go on: "stop" the training, "restart" it, or "wait".
        hang_after: seconds without progress after which a worker hangs; None: from the run's own step times.
        on_disk_error: reaction to a run folder that cannot be written to any more: "warn" and go on, or "stop".
        grace: seconds that a stop signal leaves for a checkpoint.
        requeue_code: exit code of a training that a signal but Ctrl-C ended early, with a checkpoint.
    """

    title: ClassVar[str] = "When something goes wrong"
    on_hang: OnHang = "stop"
    hang_after: float | None = None
    on_disk_error: OnDiskError = "warn"
    grace: float = GRACE
    requeue_code: int = 0


@dataclass(frozen=True)
class LearningOptions:
    """The options for the optimizer.

    Attributes:
        large_batch_optimizer, learning_rate: "lars" or "lamb" in place of the recipe's optimizer, and its rate.
        scale_rate, base_batch: how learning rates grow with the batch, and the batch that they are meant for.
        warmup: number of steps in which learning rates rise to their full value.
        noise: whether the gradient noise is measured.
        ema: part of the weights' moving average that remains in a step; None: none is kept.
    """

    title: ClassVar[str] = "Optimizer and learning rate"
    large_batch_optimizer: LargeBatch | None = None
    learning_rate: float | None = None
    scale_rate: RateRule | None = None
    base_batch: int | None = None
    warmup: int = 0
    noise: NoiseMode = "auto"
    ema: float | None = None

    def build_rates(self, batch: int, largest_batch: int | None) -> LearningRateOptions:
        """Return the changes to a recipe's optimizer and rates that the options ask for.

        Args:
            batch: number of samples of the first steps.
            largest_batch: number of samples up to which the batch may grow; see :class:`.LearningRateOptions`.

        Raises:
            PolylaneError: one of two options that go together is missing, or a rate is not positive and finite.
        """
        return LearningRateOptions(
            batch,
            optimizer=self.large_batch_optimizer,
            lr=self.learning_rate,
            rule=self.scale_rate,
            base_batch=self.base_batch,
            warmup=self.warmup,
            noise=self.noise,
            ema=self.ema,
            largest_batch=largest_batch,
        )


@dataclass(frozen=True)
class DataOptions:
    """The options for how batches are read, and how many of them.

    Attributes:
        accumulate: batches whose gradients are added up before an update.
        loader_workers: processes of each worker that load ahead; 0: batches are loaded where they are needed.
        prefetch: batches that each of these processes loads ahead; None: torch's default.
        overfit_batches: the training has the first so many batches of its data only, in their order, and is tested on
            them; None: all.
        fast_dev_run: one batch of each split is run, and nothing is saved while training.
    """

    title: ClassVar[str] = "Data"
    accumulate: int = 1
    loader_workers: int = 0
    prefetch: int | None = None
    overfit_batches: int | None = None
    fast_dev_run: bool = False


@dataclass(frozen=True)
class WatchOptions:
    """The options for who sees the numbers of a run while it trains.

    Attributes:
        log: names of what receives them beside the run's folder, see :func:`.open_loggers`.
        log_every: least seconds between two lines where the output is no terminal.
    """

    title: ClassVar[str] = "Logs"
    log: str = ""
    log_every: float = LOG_SECONDS


@dataclass(frozen=True)
class GoalOptions:
    """The options for what is to be reached: each follows a result of the tests.

    Attributes:
        early_stop: text of --early-stop; None: not given.
        stop_at: text of --stop-at; None: not given.
        keep_best: text of --keep-best; None: not given.
    """

    title: ClassVar[str] = "When to end, and what to keep"
    early_stop: str | None = None
    stop_at: str | None = None
    keep_best: str | None = None

    def __post_init__(self) -> None:
        # Of an option that is given twice the command line would take the last one without a word.
        for name in ("early_stop", "stop_at", "keep_best"):
            texts = getattr(self, name)
            if isinstance(texts, list):
                if len(texts) > 1:
                    option = f"--{name.replace('_', '-')}"
                    raise PolylaneError(f"{option} is given {len(texts)} times, and follows one result: give it once")
                object.__setattr__(self, name, texts[0] if texts else None)

    def build(self) -> list[Callback]:
        """Return the callbacks that the options ask for.

        Raises:
            PolylaneError: an option has a wrong form.
        """
        callbacks = list[Callback]()
        if self.early_stop is not None:
            callbacks.append(EarlyStopping(MetricRule.parse("--early-stop", self.early_stop)))
        if self.stop_at is not None:
            callbacks.append(StopAtMetric(MetricRule.parse("--stop-at", self.stop_at)))
        return callbacks

    def build_best(self) -> BestSteps | None:
        """Return the steps whose checkpoints are kept; None where that was not asked for.

        Raises:
            PolylaneError: the option has a wrong form.
        """
        return None if self.keep_best is None else BestSteps(MetricRule.parse("--keep-best", self.keep_best, default=1))

    def list_rules(self) -> list[MetricRule]:
        """Return the rules of all options.

        Raises:
            PolylaneError: an option has a wrong form.
        """
        options = {"--early-stop": self.early_stop, "--stop-at": self.stop_at, "--keep-best": self.keep_best}
        return [MetricRule.parse(option, text, 1) for option, text in options.items() if text is not None]
