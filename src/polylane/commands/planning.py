"""What simulating and planning need of a recipe and a cluster: the graph on the meta device, and what it costs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polylane.commands import inputs
from polylane.commands.output import plural
from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.cost.method import Method
    from polylane.cost.profile import Profile
    from polylane.graph.graph import Graph
    from polylane.planner.setup import Job
    from polylane.recipe import Recipe

# Samples of the example that shows the form of a batch.
EXAMPLE = 2


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of reference cycles, which would go through a large graph again and again in vain."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class Scene:
    """A recipe ready to be priced.

    Attributes:
        recipe: the user's.
        job: its graph and optimizer.
        cluster: on what.
        batch: samples of a step.
        tokens: integers of one sample's first tensor, where those are whole numbers; 0 elsewhere.
    """

    recipe: Recipe
    job: Job
    cluster: Cluster
    batch: int
    tokens: int


def scene(
    path: str,
    settings: Sequence[str],
    cluster: str,
    batch: int,
    pins: Mapping[str, Mapping[str, str]],
    profile: bool = False,
) -> Scene:
    """Capture a recipe's model without its weights, and read the cluster.

    Args:
        path, settings: of the recipe.
        cluster: a line or a file.
        batch: samples of a step.
        pins: placements asked for, by axis.
        profile: take measured times of the recipe's nodes.

    Raises:
        PolylaneError: the cluster, the recipe or the model is wrong, or nothing was measured of it.
    """
    from polylane.cluster.line import given

    machines = given(cluster)
    recipe = inputs.open_recipe(path, settings)
    from polylane.planner.setup import Job
    from polylane.runtime.launch import single_threaded
    from polylane.runtime.optimizer_probe import whole_parameters
    from polylane.runtime.prepare import named_parameters

    single_threaded()
    model = _without_weights(recipe)
    example = inputs.example_batch(recipe, inputs.open_data(recipe, "train"), EXAMPLE)
    graph = _captured(recipe, model, example)
    whole = whole_parameters(named_parameters(model, [recipe.loss]), [recipe.optimizer])
    known = _profile(graph, machines, path) if profile else None
    job = Job(graph, recipe.optimizer, {name: str(why) for name, why in whole.items()}, pins, known)
    return Scene(recipe, job, machines, batch, _tokens(example))


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
    """The model on the meta device, where it takes no memory; with weights where it cannot be built so."""
    import torch

    try:
        with torch.device("meta"):
            return inputs.build_model(recipe, seed=0)
    except PolylaneError:
        return inputs.build_model(recipe, seed=0)


def _captured(recipe: Recipe, model: Any, example: Any) -> Graph:
    from polylane.runtime.prepare import named_parameters, optimized
    from polylane.samples.counts import capture_with_counts

    trainable = optimized(named_parameters(model, [recipe.loss]), recipe.optimizer)
    return capture_with_counts(model, recipe.loss, example, trainable=trainable)


def _tokens(example: Any) -> int:
    from torch import Tensor

    from polylane.graph.batch import flatten

    first = next((leaf for leaf in flatten(example)[0] if isinstance(leaf, Tensor)), None)
    if first is None or first.is_floating_point() or first.dim() != 2:
        return 0
    return int(first.shape[1])


def checked_workers(cluster: Cluster, workers: int) -> None:
    """Refuse a plan that takes more devices than there are.

    Raises:
        PolylaneError: with both numbers.
    """
    if workers > cluster.count:
        raise PolylaneError(
            f"the plan takes {plural(workers, 'worker')}, but the cluster has {plural(cluster.count, 'device')}"
        )


def model_flops(graph: Graph, batch: int) -> float:
    """Floating-point operations of a step that the model itself asks for: three times those of its forward pass.

    What is computed again does not count (Chowdhery et al., PaLM, 2022, appendix B: model FLOPs utilization).
    """
    return 3.0 * sum(node.flops for node in graph.nodes) * batch / graph.samples


def method_of(dtype: str, masters: bool, recompute: str, shard: str, overlap: bool) -> Method:
    """How training is done, from the options of a command.

    Raises:
        PolylaneError: an option that is wrong.
    """
    from polylane.cost.method import Method

    if dtype == "float64":
        raise PolylaneError("--dtype 'float64': choose one of float32, bfloat16, float16")
    try:
        return Method(dtype, masters, recompute, shard, overlap)  # type: ignore[arg-type]
    except PolylaneError as error:
        raise PolylaneError(f"--{error}") from None


def duration(seconds: float) -> str:
    """A time for people: "1.24 s", "35.1 ms", "820 µs"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
