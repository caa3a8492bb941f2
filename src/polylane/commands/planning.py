"""Shared by ``simulate`` and ``plan``: the training captured without weights, and the options of its cost model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polylane.commands import user_inputs as inputs
from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.commands.requests import PredictRequest, SimulateRequest
    from polylane.compile.training_problem import TrainingProblem
    from polylane.cost.operators.profile import Profile
    from polylane.cost.operators.training_options import TrainingOptions
    from polylane.graph.graph import Graph
    from polylane.plan.fixed_keys import FixedKeys
    from polylane.plan.plan import AnyPlan
    from polylane.planner.memory_reserve import MemoryReserve
    from polylane.planner.problem import CapturedProblem
    from polylane.recipe import Recipe

# Samples of the example batch, which shows the form of a batch and not its size.
EXAMPLE = 2


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's cyclic garbage collector, which would traverse a large graph repeatedly and free nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def capture_for_prediction(
    recipe: Recipe,
    cluster: Cluster,
    request: PredictRequest,
    pins: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[TrainingProblem, CapturedProblem]:
    """Return the recipe's training and its capture with what predictions need, if possible of a model without weights.

    Args:
        recipe: the user's functions, as they were opened.
        cluster: the machines; measured times are those of its first device.
        request: the command's options, of which ``profile`` asks for measured times.
        pins: placements that a plan fixes: axis -> name of a parameter or node -> placement.

    Raises:
        PolylaneError: one of the recipe's functions raised, or did not return what it should; the model cannot be
            captured, or nothing was measured of it.
    """
    from polylane.runtime.workers.threads import limit_to_one_thread

    limit_to_one_thread()
    problem, graph = _capture(recipe, request.batch)
    profile = _profile(graph, cluster, request.recipe) if request.profile else None
    return problem, problem.captured(graph, pins=pins or {}, profile=profile)


def _capture(recipe: Recipe, batch: int) -> tuple[TrainingProblem, Graph]:
    """Capture a model without weights; one with weights where values decide what is computed, if it is small enough."""
    example = inputs.example_batch(recipe, inputs.open_data(recipe, "train"), EXAMPLE)
    problem = inputs.problem_of(recipe, build_without_weights(recipe), example, batch)
    try:
        graph = problem.capture()
    except PolylaneError:
        if not _can_have_weights(problem.model):
            raise
    else:
        # What asks about its batch is whole only where it is answered; without values it runs as the user's own Python.
        if not any(node.op == "leaf" for node in graph.nodes) or not _can_have_weights(problem.model):
            return problem, graph
    problem = inputs.problem_of(recipe, inputs.build_model(recipe, seed=0), example, batch)
    return problem, problem.capture()


def _can_have_weights(model: Any) -> bool:
    """Return whether a model is without weights, and this machine has the memory to train it with some."""
    from polylane.probe.machine import available_memory

    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return False
    # Weights, their gradients, and copies of both while a capture is compared with the model.
    needed: int = 4 * sum(tensor.nbytes for tensor in tensors)
    return needed < available_memory() // 2


def _profile(graph: Graph, cluster: Cluster, path: str) -> Profile:
    from polylane.probe.profiles import load_profile

    device = cluster.device(0)
    profile = load_profile(graph, device)
    if profile is None:
        raise PolylaneError(
            f"nothing was measured of {path} on {device.kind}: polylane probe --profile {path}, with the same --set"
        )
    if profile.disturbance:
        from polylane.profiling.machine_load import SO_WHAT

        print(f"while {path} was measured, {profile.disturbance}: {SO_WHAT}", file=sys.stderr, flush=True)
    return profile


def build_without_weights(recipe: Recipe) -> Any:
    """Return the model on the meta device, where it takes no memory; with weights where it cannot be built there."""
    import torch

    try:
        with torch.device("meta"):
            return inputs.build_model(recipe, seed=0)
    except PolylaneError:
        return inputs.build_model(recipe, seed=0)


def parse_memory(text: str) -> int:
    """Return the bytes of the option ``--memory``.

    Raises:
        PolylaneError: it is no size.
    """
    from polylane.cluster.figures import figure

    parsed_figure = figure(text)
    if parsed_figure is None or not parsed_figure[0] > 0 or parsed_figure[1] not in ("size", None):
        raise PolylaneError(f'--memory takes a size, as in "30 GB", not {text!r}')
    return int(parsed_figure[0])


def tokens_per_sample(problem: TrainingProblem, graph: Graph) -> int:
    """Return the tokens of one sample of the example batch; 0 where it has none."""
    from polylane.graph.nodes.token_leaves import count_tokens, find_token_leaves

    return count_tokens(problem.flat_example[0], find_token_leaves(graph.code.fx), samples=1)


def model_flops(graph: Graph, batch: int) -> float:
    """Return the FLOPs of a step that the model itself needs: three times those of its forward pass.

    Recomputation does not count (Chowdhery et al., PaLM, 2022, appendix B: model FLOPs utilization).
    """
    return 3.0 * sum(node.flops for node in graph.nodes) * batch / graph.samples


def sync_options(request: PredictRequest) -> dict[str, Any]:
    """Return the options of a command that are keys of a plan's ``sync``, by key, where they are given.

    Raises:
        PolylaneError: an option has a value that its key does not take; the message names the option.
    """
    from polylane.plan.sync import SUM

    options = {name: getattr(request, name) for name in ("shard", "every") if getattr(request, name) is not None}
    for name, value in options.items():
        if name == "every" and value < 1:
            raise PolylaneError(f"--every must be at least 1, not {value}")
        try:
            SUM.changed(**{name: value})
        except PolylaneError as error:
            raise PolylaneError(f"--{error}") from None  # the message begins with the option's name
    return options


def _refuse_clash(request: PredictRequest, key: str, planned: Any, unsaid: Any, hint: str = "") -> None:
    """Refuse an option that says another value than a key of the plan.

    Args:
        request: the options of the command, one of which is refused.
        key: the plan's key, which is the option's name as well.
        planned: the value that the plan says.
        unsaid: value of a plan that does not have the key.
        hint: what to do, behind the sentence.
    """
    option = "dtype" if key == "precision" else key
    value = getattr(request, option)
    if value is not None and planned not in (unsaid, value):
        raise PolylaneError(f"--{option} {value}, but the plan says {key}={planned}{hint}")


def patch_plan(plan: AnyPlan, request: SimulateRequest) -> AnyPlan:
    """Return a plan with the options of a command as keys of its own: the options say what its keys would say.

    Raises:
        PolylaneError: an option contradicts a key of the plan, or the plan cannot have both.
    """
    from polylane.plan.options import PRECISIONS
    from polylane.plan.plan import Plan
    from polylane.plan.recompute import NONE, format_recompute, parse_recompute
    from polylane.plan.sync import SUM

    hint, options, changes = ": leave one of them out", sync_options(request), dict[str, Any]()
    for key in options:
        _refuse_clash(request, key, getattr(plan.sync, key), getattr(SUM, key), hint)
    _refuse_clash(request, "precision", plan.precision, PRECISIONS[0], hint)
    _refuse_clash(request, "chunks", plan.most_chunks if isinstance(plan, Plan) else plan.chunks, 1, hint)
    if options:
        changes["sync"] = plan.sync.changed(**options)
    if request.dtype in PRECISIONS:
        changes["precision"] = request.dtype
    if request.recompute is not None:
        changes["recompute"] = rule = parse_recompute(request.recompute)
        # A rule can be written in several ways: rules are compared, not texts.
        if plan.recompute not in (NONE, rule):
            _refuse_clash(request, "recompute", format_recompute(plan.recompute), NONE, hint)
    return plan.changed(**changes, **_schedule_changes(plan, request))


def _schedule_changes(plan: AnyPlan, request: SimulateRequest) -> dict[str, Any]:
    """Return the schedule that an option asks for, as keys of the plan; a plan in one line gets its chunks as well.

    Raises:
        PolylaneError: the plan names another one, be it the default, or the schedule is not known.
    """
    from polylane.plan.plan import Plan
    from polylane.plan.spec import Spec, says_schedule
    from polylane.schedule.schedules import DEFAULT_CHUNKS, RUNNABLE

    schedule = request.schedule
    if schedule is None or schedule == plan.schedule:
        return {}
    # A file names its schedule by a key, a line by a word.
    is_named = "schedule" in plan.model_fields_set if isinstance(plan, Plan) else says_schedule(request.plan)
    _refuse_clash(request, "schedule", plan.schedule, None if is_named else Spec.schedule, ": leave one of them out")
    if schedule not in RUNNABLE:
        raise PolylaneError(f"--schedule {schedule} is not known, known are {', '.join(RUNNABLE)}")
    if isinstance(plan, Plan):
        return {"schedule": schedule}
    return {"schedule": schedule, "chunks": DEFAULT_CHUNKS.get(schedule, 1) if plan.pipeline > 1 else 1}


def with_microbatches(plan: AnyPlan, graph: Graph, batch: int) -> AnyPlan:
    """Return a plan with the number of microbatches that its training takes, where the plan leaves that open.

    Args:
        plan: the plan, as it was read.
        graph: the captured graph, whose batches may have to stay whole.
        batch: samples of a step, over all workers.
    """
    from polylane.plan.spec import default_microbatches
    from polylane.samples.batch_division import choose_whole_batches

    if plan.microbatches is not None:
        return plan
    return plan.changed(microbatches=choose_whole_batches(plan, [graph], default_microbatches(plan, batch)))


def fixed_keys(text: str | None, request: PredictRequest) -> FixedKeys:
    """Return the keys that a search must keep: those of a line such as ``data=2``, and those that options say.

    Raises:
        PolylaneError: a key or an option is wrong, or they contradict each other.
    """
    from polylane.plan.fixed_keys import FixedKeys, parse_fixed

    fixed = parse_fixed(text) if text else FixedKeys()
    options = sync_options(request)
    for key in options:
        if key in fixed.sync_keys:
            _refuse_clash(request, key, getattr(fixed.sync, key), None)
    for key in ("precision", "schedule", "chunks", "recompute"):
        _refuse_clash(request, key, getattr(fixed, key), None)
    if request.chunks is not None and request.chunks < 1:
        raise PolylaneError(f"--chunks must be at least 1, not {request.chunks}")
    option = parse_fixed(f"recompute={request.recompute}") if request.recompute is not None else fixed
    fixed = replace(fixed, recompute=option.recompute)
    fixed = fixed.with_sync(**options).with_schedule(request.schedule, request.chunks)
    fixed.check_options(request.dtype)
    return fixed


def reserve_of(request: PredictRequest) -> MemoryReserve:
    """Return the memory that a search keeps free on every device, from the options of a command.

    Raises:
        PolylaneError: the option is neither a share of the memory nor a size.
    """
    from polylane.planner.memory_reserve import USUAL, parse_reserve

    return USUAL if request.reserve is None else parse_reserve(request.reserve)


def method_of(request: PredictRequest) -> TrainingOptions:
    """Return the training options of the cost model, from the options of a command.

    Raises:
        PolylaneError: an option has a value that is not known.
    """
    from polylane.cost.operators.training_options import TrainingOptions
    from polylane.plan.recompute import MODES, NONE, parse_recompute

    dtype = request.dtype or "float32"
    if dtype == "float64":
        raise PolylaneError("--dtype 'float64': choose one of float32, bfloat16, float16")
    # Budgets and modules are a plan's: a search knows whole modes alone.
    mode = request.recompute or NONE
    try:
        parse_recompute(mode)
        return TrainingOptions(dtype, True, mode if mode in MODES else NONE, request.overlap)
    except PolylaneError as error:
        raise PolylaneError(f"--{error}") from None  # the message begins with the option's name
