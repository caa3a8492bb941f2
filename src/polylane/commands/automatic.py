"""``--plan auto``: the plan that is best for a recipe on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polylane.commands import inputs
from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from polylane.plan.plan import Plan


def automatic(path: str, settings: Sequence[str], batch: int, workers: int, seed: int = 0) -> Plan:
    """Measure a recipe's nodes, compare plans for up to so many workers, and say on stderr which one is best.

    Raises:
        PolylaneError: the recipe is wrong, nothing fits, or torchrun started several processes, which would all
            measure at once.
    """
    if "RANK" in os.environ:
        raise PolylaneError(
            "--plan auto measures in one process: run this command without torchrun, or write the plan first "
            "(polylane inspect RECIPE --plan auto --write plan.yaml) and give that file"
        )
    recipe = inputs.open_recipe(path, settings)
    from polylane.auto import choose as auto
    from polylane.auto.on_workers import subject
    from polylane.graph.batch import flatten, sample_count
    from polylane.probe.machine import here
    from polylane.runtime.launch import single_threaded
    from polylane.runtime.prepare import Objective

    single_threaded()
    model = inputs.build_model(recipe, seed)
    inputs.rehearse_optimizer(recipe, model)
    example = inputs.example_batch(recipe, inputs.open_data(recipe, "train"), batch)
    objective = Objective("loss", recipe.loss, recipe.optimizer)
    given = subject(model, objective, example, min(batch, sample_count(flatten(example)[0])))
    answer = auto.choose(given, range(1, workers + 1), here(workers), copies=True)
    print(auto.told(answer), file=sys.stderr, flush=True)
    return answer.found[0].plan
