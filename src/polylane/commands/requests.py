"""Requests: the options of a command line, one frozen record for each command, passed whole to everything below.

Plain data without torch: a request is made before torch is imported, and is sent to workers in new processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from polylane.commands.running.option_groups import (
    DataOptions,
    GoalOptions,
    OnNan,
    SavingOptions,
    TroubleOptions,
    WatchOptions,
)
from polylane.verify.audit import AuditMode

if TYPE_CHECKING:
    from polylane.commands.learning_rates import LearningRateOptions, NoiseMode
    from polylane.plan.plan import AnyPlan

Request = TypeVar("Request")


class WorkerRange(NamedTuple):
    """The workers that a training may have.

    Attributes:
        fewest: number of workers down to which it goes on when some are lost; None: it needs all.
        most: number of workers that it starts with.
    """

    fewest: int | None
    most: int


def default_restarts(restarts: int | None, workers: WorkerRange | None) -> int:
    """Return how often workers are started again: as given, or else once for each that may be lost."""
    if restarts is not None:
        return restarts
    return 0 if workers is None or workers.fewest is None else workers.most - workers.fewest


def build_request(request_class: type[Request], options: Mapping[str, Any]) -> Request:
    """Return the request of a command's options, which have the names of its attributes.

    Args:
        request_class: class of the command's request.
        options: what was given, by name; None where an option was not given and has no default: it has the request's.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    # An option that may be repeated comes as a list.
    tuples = {name: tuple(value) for name, value in given_options.items() if isinstance(value, list)}
    return request_class(**given_options | tuples)


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """The options of every command that reads a recipe: which one, and batches of which size.

    Attributes:
        recipe: the path of a Python file, or the dotted name of a module.
        batch: number of samples of a step, over all workers.
        settings: texts NAME=VALUE, keyword arguments of the recipe's functions.
        seed: of the weights, of the order of samples and of all dropout.
        json: print the result as one JSON object, in place of tables for people.
    """

    recipe: str
    batch: int
    settings: tuple[str, ...] = ()
    seed: int = 0
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The options of a command that runs a plan on workers of this machine, or on those that torchrun started.

    Attributes:
        workers: number of workers; None: as many as the plan takes.
        plan: a line, the path of a plan file, or "auto"; None: replicas on all workers. A command replaces it by the
            parsed plan, and leaves "auto" only where the workers find the plan once they are connected.
    """

    workers: int | None = None
    plan: str | AnyPlan | None = None


@dataclass(frozen=True, kw_only=True)
class WorkersRequest(RecipeRequest, PlanChoice):
    """The options of a command that runs a recipe under a plan.

    Attributes:
        clip_norm: bound on the 2-norm of all gradients; None: gradients are not clipped.
    """

    clip_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class FolderRequest(PlanChoice):
    """The options of a command whose workers train, and leave files in a run's folder.

    Attributes:
        run_folder: the folder for the run's files; None: a new folder below ``run/``.
        saving: checkpoints, and going on from one.
        trouble: reactions to hangs, disks and signals.
        audit: whether some steps are made a second time as the user wrote them, and what follows from a difference.
        watch: who sees the numbers of the run while it trains.
        checkpoints: folder of the run's checkpoints; None until the run's folder is claimed.
        resume_from: folder of the checkpoint that was found for ``saving.resume``; None: a fresh start.
    """

    run_folder: Path | None = None
    saving: SavingOptions = field(default_factory=SavingOptions)
    trouble: TroubleOptions = field(default_factory=TroubleOptions)
    audit: AuditMode = "auto"
    watch: WatchOptions = field(default_factory=WatchOptions)
    checkpoints: Path | None = None
    resume_from: Path | None = None

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are saved during the training, so that a stop signal waits for one."""
        return self.saving.save_every is not None


@dataclass(frozen=True, kw_only=True)
class TrainRequest(WorkersRequest, FolderRequest):
    """The options of ``polylane train``.

    Attributes:
        fewest_workers: number of workers down to which the training goes on when some are lost; None: none may be.
        epochs: times through the training data; None: as many as ``steps`` take, or one where these are None as well.
        steps: optimizer steps after which the training ends; None: it ends after ``epochs``.
        on_nan: reaction to a loss that is not finite: "stop", naming the first operator, or "warn" and go on.
        drop_last: leave out an epoch's last batch where it has fewer samples than the others.
        rates: changes to the recipe's optimizer and learning rates.
        data: how batches are read, and how many of them.
        goals: results of the tests at which the training ends, or whose best steps are kept.
        model_path: the file that the weights are written to; None until the run's folder is claimed.
    """

    fewest_workers: int | None = None
    epochs: int | None = None
    steps: int | None = None
    on_nan: OnNan = "stop"
    drop_last: bool = False
    rates: LearningRateOptions
    data: DataOptions = field(default_factory=DataOptions)
    goals: GoalOptions = field(default_factory=GoalOptions)
    model_path: Path | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether the training may go on with another number of workers than its plan takes."""
        return self.fewest_workers is not None or self.saving.resume == "auto"


@dataclass(frozen=True, kw_only=True)
class RunRequest(FolderRequest):
    """The options of ``polylane run``.

    Attributes:
        script: the path of a Python file that calls ``polylane.prepare``.
        arguments: the script's own arguments.
        noise: whether the gradient noise is measured: "on" in every step, "auto" in some, where the plan allows it.
    """

    script: str
    arguments: tuple[str, ...] = ()
    noise: NoiseMode = "auto"


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options of ``polylane export``.

    Attributes:
        checkpoint: a checkpoint's folder, or one with checkpoints, or a run's.
        out: the safetensors file that is written.
        force: replace the file where it is there already.
        json: print what was written as one JSON object, in place of a line for people.
    """

    checkpoint: Path
    out: Path
    force: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """The options of ``polylane report``.

    Attributes:
        runs: folders of one run, or of two that are compared.
        html: the page that is written; None: the folder's own, or one in the current folder for two runs.
        serve: whether the page is served and updated instead.
        port: that it is served on; 0: any that is free.
    """

    runs: tuple[Path, ...]
    html: Path | None = None
    serve: bool = False
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class WhyRequest:
    """The options of ``polylane why``.

    Attributes:
        run: the folder of the run.
        svg: the file that the last steps are drawn into; None: they are not.
        html: the page that they are drawn into; None: they are not.
        json: print the report as one JSON object, in place of text for people.
    """

    run: Path
    svg: Path | None = None
    html: Path | None = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(WorkersRequest):
    """The options of ``polylane verify``.

    Attributes:
        steps: number of optimizer steps that are trained and compared.
        resume: whether a training from a checkpoint is compared with the unbroken one, in place of one worker's.
        resume_plan: the plan that goes on from the checkpoint as well; None: the same plan alone.
        arguments: of a script in place of a recipe, the words behind its name.
    """

    steps: int
    arguments: tuple[str, ...] = ()
    resume: bool = False
    resume_plan: str | None = None


@dataclass(frozen=True, kw_only=True)
class InspectRequest(RecipeRequest):
    """The options of ``polylane inspect``.

    Attributes:
        plan: a line, the path of a plan file, or "auto"; None: the model alone is shown.
        plan_file: the file that the plan is written to; None: it is not written.
        svg: the file that a step is drawn into; None: no step is drawn.
    """

    plan: str | None = None
    plan_file: Path | None = None
    svg: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PredictRequest(RecipeRequest):
    """The options of a prediction for a cluster that need not be there.

    Attributes:
        cluster: a line such as 8:h100-80g, or the path of a cluster file.
        dtype: of the passes: "float32", "bfloat16" or "float16"; None: the plan's.
        recompute: the plan's key: activations that are recomputed instead of kept; None: what the plan says, or what a
            search needs.
        shard: the plan's key: what is sharded over replicas (ZeRO): "none", "optimizer", "gradients" or "parameters";
            None: what the plan says, or what a search finds best.
        every: the plan's key: steps between two averages of the replicas' parameters; None: what the plan says.
        schedule: the plan's key: name of the pipeline schedule; None: what the plan says, or what a search finds best.
        chunks: the plan's key: stages of every worker; None: what the plan says, or what a search finds best.
        overlap: whether gradients are reduced during the backward pass.
        reserve: memory that a search keeps free on every device, as text: a share ("5%") or a size ("2 GiB"); None: the
            usual share.
        profile: use the times that ``polylane probe --profile`` measured of the recipe's operators.
    """

    cluster: str
    dtype: str | None = None
    recompute: str | None = None
    shard: str | None = None
    every: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    overlap: bool = True
    reserve: str | None = None
    profile: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PredictRequest):
    """The options of ``polylane plan``.

    Attributes:
        workers: how many devices to use at most; None: all of the cluster's.
        plan: keys that the plan must have, as in "data=2,shard=parameters"; the others are searched. None: all are.
        memory: bytes that a worker may use, as text with a unit ("30 GB"); None: all that a device has but the reserve.
        top: number of plans that are shown.
        output: the file that the best plan is written to; None: it is not written.
    """

    workers: int | None = None
    plan: str | None = None
    memory: str | None = None
    top: int = 5
    output: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(PredictRequest):
    """The options of ``polylane simulate``.

    Attributes:
        plan: a line, the path of a plan file, or "auto" for the plan that ``polylane plan`` puts first.
        slow: stragglers as texts RANK=SPEED: 3=0.8 makes the device of rank 3 four fifths as fast.
        html: the page that the predicted swimlanes are written to; None: none.
        svg: the picture that the predicted swimlanes are written to; None: none.
        breakdown: print the times by kind of operator as well.
    """

    plan: str
    slow: tuple[str, ...] = ()
    html: Path | None = None
    svg: Path | None = None
    breakdown: bool = False


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The options of ``polylane probe``.

    Attributes:
        output: the cluster file that this machine is measured into; None: the machine itself is not measured.
        workers: number of workers that will train on this machine; None: as many as it has devices, up to four.
        recipes: the recipes whose operators are measured, at their batch size and at fractions of it.
        json: print the result as one JSON object, in place of sentences.
    """

    output: Path | None = None
    workers: int | None = None
    recipes: tuple[RecipeRequest, ...] = ()
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class LanesRequest:
    """The options of ``polylane lanes``.

    Attributes:
        schedule: name of the schedule, see :data:`polylane.schedule.schedules.NAMES`; None with ``compare``.
        compare: whether all schedules are drawn side by side.
        stages: a number of stages in a chain, or the path of a YAML file of stages that branch.
        chunks: how many parts each stage of a chain is cut into, all on its worker; None: as the schedule has them.
        microbatches: number of microbatches in a batch.
        batches: number of batches of a run of pipedream-2bw; None: two.
        vertical_sync: whether the stages of pipedream compute on the same version of the weights.
        live: live microbatches that a worker of auto may hold at most; None: as many as there are.
        replicas: replicas of a stage that compute whole microbatches in turn, or one number for each stage as in 2,1;
            None: one.
        forward: ticks of one forward pass, or one number for each stage as in 1,2,1.
        backward: ticks of one backward pass, given like ``forward``.
        weight: the ticks of it that weight gradients take, given like ``forward``; None: half of them.
        halving: what a backward pass takes longer in two halves, as a part of it, given like ``forward``.
        hop: ticks of a value from one worker to another.
        svg: file for the picture as SVG; None: not written.
        html: file for the picture as a page; None: not written.
        json: print the figures as one JSON object, in place of the picture.
    """

    schedule: str | None = None
    compare: bool = False
    stages: str
    chunks: int | None = None
    microbatches: int
    batches: int | None = None
    vertical_sync: bool = False
    live: int | None = None
    replicas: str | None = None
    forward: str = "1"
    backward: str = "2"
    weight: str | None = None
    halving: str = "0"
    hop: str = "0"
    svg: Path | None = None
    html: Path | None = None
    json: bool = False
