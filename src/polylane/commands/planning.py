"""Shared by ``simulate`` and ``plan``: the training captured on the meta device, and the options of its cost model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polylane.commands import user_inputs as inputs
from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.commands.requests import PredictRequest
    from polylane.compile.training_problem import TrainingProblem
    from polylane.cost.operators.profile import Profile
    from polylane.cost.operators.training_options import TrainingOptions
    from polylane.graph.graph import Graph
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


def capture_on_meta(
    recipe: Recipe,
    cluster: Cluster,
    request: PredictRequest,
    pins: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[TrainingProblem, CapturedProblem]:
    """Return the recipe's training with a model without weights, and its capture with what predictions need.

    Args:
        recipe: the user's functions, as they were opened.
        cluster: the machines; measured times are those of its first device.
        request: the command's options, of which ``profile`` asks for measured times.
        pins: placements that a plan fixes: axis -> name of a parameter or node -> placement.

    Raises:
        PolylaneError: one of the recipe's functions raised, or did not return what it should; the model cannot be
            captured, or nothing was measured of it.
    """
    from polylane.runtime.workers.fork import limit_to_one_thread

    limit_to_one_thread()
    model = _without_weights(recipe)
    example = inputs.example_batch(recipe, inputs.open_data(recipe, "train"), EXAMPLE)
    problem = inputs.problem_of(recipe, model, example, request.batch)
    graph = problem.capture()
    profile = _profile(graph, cluster, request.recipe) if request.profile else None
    return problem, problem.captured(graph, pins=pins or {}, profile=profile)


def _profile(graph: Graph, cluster: Cluster, path: str) -> Profile:
    from polylane.probe.profiles import load_profile

    device = cluster.device(0)
    found = load_profile(graph, device)
    if found is None:
        raise PolylaneError(
            f"nothing was measured of {path} on {device.kind}: polylane probe --profile {path}, with the same --set"
        )
    return found


def _without_weights(recipe: Recipe) -> Any:
    """Return the model on the meta device, where it takes no memory; with weights where it cannot be built there."""
    import torch

    try:
        with torch.device("meta"):
            return inputs.build_model(recipe, seed=0)
    except PolylaneError:
        return inputs.build_model(recipe, seed=0)


def tokens_per_sample(problem: TrainingProblem) -> int:
    """Return the tokens of one sample, the row length of a batch's first tensor if it is an integer matrix; else 0."""
    from torch import Tensor

    first = next((leaf for leaf in problem.flat_example[0] if isinstance(leaf, Tensor)), None)
    if first is None or first.is_floating_point() or first.dim() != 2:
        return 0
    return int(first.shape[1])


def model_flops(graph: Graph, batch: int) -> float:
    """Return the FLOPs of a step that the model itself needs: three times those of its forward pass.

    Recomputation does not count (Chowdhery et al., PaLM, 2022, appendix B: model FLOPs utilization).
    """
    return 3.0 * sum(node.flops for node in graph.nodes) * batch / graph.samples


def method_of(request: PredictRequest) -> TrainingOptions:
    """Return the training options of the cost model, from the options of a command.

    Raises:
        PolylaneError: an option has a value that is not known.
    """
    from polylane.cost.operators.training_options import TrainingOptions

    dtype = request.dtype or "float32"
    if dtype == "float64":
        raise PolylaneError("--dtype 'float64': choose one of float32, bfloat16, float16")
    try:
        return TrainingOptions(dtype, True, request.recompute, request.shard, request.overlap)  # type: ignore[arg-type]
    except PolylaneError as error:
        raise PolylaneError(f"--{error}") from None  # the message begins with the option's name
