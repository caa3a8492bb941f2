"""All trainings by name, family by family: their order decides which plans `make test` covers them by."""

from __future__ import annotations

from collections.abc import Callable

from tests.equivalence.trainings import (
    branches,
    coupled_samples,
    detection,
    extended_modules,
    hugging_face,
    inner_gradients,
    late_changes,
    late_data_changes,
    late_optimizer_changes,
    late_script_changes,
    python_state,
    random_numbers,
    sample_means,
    uncounted_labels,
    weighted_means,
)
from tests.equivalence.trainings.training import ENTERED, Training

FAMILIES = (
    uncounted_labels,
    weighted_means,
    detection,
    sample_means,
    coupled_samples,
    branches,
    python_state,
    random_numbers,
    hugging_face,
    inner_gradients,
    extended_modules,
    late_changes,
    late_data_changes,
    late_optimizer_changes,
    late_script_changes,
)
# A family enters its trainings when it is imported, which a test may have done before, in another order.
_PLACES = {family.__name__: place for place, family in enumerate(FAMILIES)}
TRAININGS: dict[str, Callable[[], Training]] = dict(
    sorted(ENTERED.items(), key=lambda entry: _PLACES[entry[1].__module__])
)
