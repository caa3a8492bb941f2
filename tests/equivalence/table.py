"""Which model is proven equal under which plan: the covering subset as a table, and the full product of all columns.

A cell reads "schedule microbatches optimizer": "1f1b 3 adamw". Batches are the sizes of three steps' batches. They are
odd on purpose: microbatches do not divide them, replicas get unequal parts or none, and the last batch may have fewer
samples than there are microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

PLANS = ("data=2", "pipeline=2", "pipeline=4", "data=2,pipeline=2")
SCHEDULES = ("naive", "afab", "1f1b")
OPTIMIZERS = ("sgd", "adamw", "own")  # "own" is the one of the recipe

COVERING = """
model           | batches | data=2        | pipeline=2    | pipeline=4    | data=2,pipeline=2
----------------+---------+---------------+---------------+---------------+------------------
digits          | 8 7 5   | naive 1 adamw | afab 3 sgd    | 1f1b 5 adamw  | 1f1b 3 sgd
gpt             | 8 7 3   | 1f1b 4 own    | 1f1b 5 adamw  | naive 3 own   | afab 4 adamw
unet            | 6 5 3   | afab 2 sgd    | 1f1b 4 adamw  | afab 3 sgd    | naive 4 own
inception       | 5 7 3   |               | naive 2 adamw | 1f1b 5 sgd    | afab 3 adamw
two_devices     | 9 7 2   | 1f1b 1 adamw  |               | afab 8 adamw  | 1f1b 4 sgd
hf_llama        | 5 3 2   | 1f1b 2 own    | afab 3 adamw  | 1f1b 5 sgd    | 1f1b 3 adamw
hf_gpt2         | 5 4 3   |               | 1f1b 4 sgd    |               | naive 2 adamw
t5              | 5 4 3   |               | afab 2 adamw  | 1f1b 4 own    |
vit             | 8 5 3   |               | 1f1b 3 own    |               | afab 4 sgd
densenet        | 7 5 4   |               | naive 3 sgd   | 1f1b 5 adamw  | 1f1b 2 adamw
moe             | 5 4 3   | afab 3 sgd    |               | 1f1b 4 adamw  | 1f1b 2 own
custom_function | 8 7 2   | naive 3 sgd   |               | afab 5 adamw  | 1f1b 4 adamw
encoder         | 8 7 3   |               | 1f1b 2 adamw  |               | afab 4 sgd
lstm            | 8 5 3   | afab 4 adamw  | naive 2 sgd   |               |
in_place        | 8 7 3   |               | 1f1b 4 adamw  |               | naive 3 sgd
nested          | 9 5 2   |               | afab 4 sgd    |               | 1f1b 3 adamw
branching       | 8 7 2   | 1f1b 3 sgd    |               |               |
"""

# An opaque model has no graph to cut.
ONLY_DATA = ("branching",)


@dataclass(frozen=True)
class Row:
    """One proof: a model, trained by a plan on batches of these sizes."""

    model: str
    plan: str
    schedule: str
    microbatches: int
    optimizer: str
    batches: tuple[int, ...]

    @property
    def spec(self) -> str:
        """The plan in one line."""
        return f"{self.plan},schedule={self.schedule},microbatches={self.microbatches}"

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.batches))
        return f"{self.model}/{self.plan}/{self.schedule}-{self.microbatches}/{self.optimizer}/{sizes}"


def covering() -> list[Row]:
    """The rows of :data:`COVERING`."""
    head, _, *lines = ([cell.strip() for cell in line.split("|")] for line in COVERING.strip().splitlines())
    rows = []
    for model, batches, *cells in lines:
        for plan, cell in zip(head[2:], cells, strict=True):
            if cell:
                schedule, microbatches, optimizer = cell.split()
                sizes = tuple(int(size) for size in batches.split())
                rows.append(Row(model, plan, schedule, int(microbatches), optimizer, sizes))
    return rows


def full() -> Iterator[Row]:
    """Every model under every plan, schedule and optimizer, at varying batch sizes and microbatches."""
    models = dict.fromkeys(row.model for row in covering())
    sizes = itertools.cycle([(8, 7, 5), (5, 7, 3), (9, 6, 3), (4, 5, 3)])
    microbatches = itertools.cycle([3, 4, 1, 2, 4])
    for model, plan, schedule, optimizer in itertools.product(models, PLANS, SCHEDULES, OPTIMIZERS):
        if model not in ONLY_DATA or "pipeline" not in plan:
            yield Row(model, plan, schedule, next(microbatches), optimizer, next(sizes))
