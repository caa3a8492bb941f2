"""``--plan auto``: the plan that is best for a recipe on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polylane.commands import inputs

if TYPE_CHECKING:
    from polylane.plan.plan import Plan


def automatic(path: str, settings: Sequence[str], batch: int, workers: int, seed: int = 0) -> Plan:
    """Measure a recipe's nodes, compare plans for up to so many workers, and say on stderr which one is best.

    Raises:
        PolylaneError: the recipe is wrong, or nothing fits.
    """
    recipe = inputs.open_recipe(path, settings)
    from polylane.graph.batch import flatten, sample_count
    from polylane.planner import auto
    from polylane.probe.machine import here
    from polylane.runtime.launch import single_threaded
    from polylane.runtime.optimizer_probe import whole_parameters
    from polylane.runtime.prepare import named_parameters, optimized

    single_threaded()
    model = inputs.build_model(recipe, seed)
    inputs.rehearse_optimizer(recipe, model)
    leaves, rebuild = flatten(inputs.example_batch(recipe, inputs.open_data(recipe, "train"), batch))
    named = named_parameters(model, [recipe.loss])
    subject = auto.Subject(
        model=model,
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        trainable=sorted(optimized(named, recipe.optimizer)),
        whole={name: str(why) for name, why in whole_parameters(named, [recipe.optimizer]).items()},
        leaves=leaves,
        rebuild=rebuild,
        batch=min(batch, sample_count(leaves)),
    )
    answer = auto.choose(subject, workers, here(workers))
    print(auto.told(answer), file=sys.stderr, flush=True)
    return answer.found[0].plan
