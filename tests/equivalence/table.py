"""Which model is proven equal under which plan: the covering subset as a table, and the full product of all columns.

A cell reads "schedule microbatches optimizer": "1f1b 3 adamw". Batches are the sizes of the steps' batches, two
here and three in the product. They are odd on purpose: microbatches do not divide them, replicas get unequal parts or
none, and the last batch may have fewer samples than there are microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

PLANS = ("data=2", "pipeline=2", "pipeline=4", "data=2,pipeline=2")
SCHEDULES = ("naive", "afab", "1f1b")
PIPELINED = ("interleaved", "zb-h1", "zb-h2", "zb-v")  # only of pipelines
OPTIMIZERS = ("sgd", "adamw", "own")  # "own" is the one of the recipe

COVERING = """
model           | batches | data=2        | pipeline=2    | pipeline=4    | data=2,pipeline=2
----------------+---------+---------------+---------------+---------------+------------------
digits          | 8 5     | naive 1 adamw |               |               |
gpt             | 8 3     |               |               | naive 3 own   | afab 4 adamw
unet            | 6 3     | afab 2 sgd    | zb-h2 3 adamw | afab 3 sgd    | zb-v 3 sgd
inception       | 5 3     |               | naive 2 adamw |               |
two_devices     | 9 2     |               |               |               | 1f1b 4 sgd
hf_llama        | 5 2     |               | zb-h1 3 sgd   |               | 1f1b 3 adamw
hf_gpt2         | 5 3     |               | 1f1b 4 sgd    |               | zb-h2 4 own
t5              | 5 3     |               | afab 2 adamw  |               | interleaved 3 sgd
vit             | 8 3     |               | 1f1b 3 own    |               |
densenet        | 7 4     |               |               |               | 1f1b 2 adamw
moe             | 5 3     |               |               | 1f1b 4 adamw  |
custom_function | 8 2     |               |               | afab 5 adamw  |
encoder         | 8 3     |               | zb-v 4 adamw  |               | afab 4 sgd
lstm            | 8 3     | afab 4 adamw  |               |               |
in_place        | 8 3     |               | interleaved 4 own |           | naive 3 sgd
nested          | 9 2     |               | afab 4 sgd    |               |
routed          | 7 3     |               |               | afab 4 own    | zb-h1 3 sgd
separable       | 8 3     |               |               |               | naive 2 own
latents         | 8 3     | afab 3 own    |               |               |
branching       | 8 2     | 1f1b 3 sgd    |               |               |
"""

SPLIT_PLANS = (
    "tensor=2",
    "tensor=3",
    "tensor=4",
    "sequence=2",
    "sequence=2,tensor=2",
    "data=2,tensor=2",
    "pipeline=2,tensor=2",
)

# Heads, channels, classes and lengths that three ranks, and mostly two and four too, cannot share evenly. Every sample
# of towers counts for the loss of every other one: its replicas split the operators too.
COVERING_SPLIT = """
model           | sizes | plan                | proof
----------------+-------+---------------------+-------------
digits          | 8 5   | pipeline=2,tensor=2 | afab 3 sgd
gpt             | 8 3   | tensor=3            | naive 3 own
gpt             | 8 3   | sequence=2          | 1f1b 2 own
unet            | 6 3   | tensor=4            | afab 2 sgd
inception       | 5 3   | tensor=4            | naive 1 own
two_devices     | 9 2   | tensor=3            | 1f1b 4 adamw
hf_gpt2         | 5 3   | sequence=2          | afab 2 sgd
vit             | 8 3   | sequence=2          | naive 3 adamw
densenet        | 7 4   | tensor=3            | afab 2 sgd
moe             | 5 3   | data=2,tensor=2     | afab 2 own
custom_function | 8 2   | pipeline=2,tensor=2 | 1f1b 5 adamw
encoder         | 8 3   | sequence=2,tensor=2 | afab 3 own
lstm            | 8 3   | tensor=3            | 1f1b 2 adamw
in_place        | 8 3   | pipeline=2,tensor=2 | naive 1 own
nested          | 9 2   | data=2,tensor=2     | naive 2 sgd
towers          | 8 5   | sequence=2,tensor=2 | naive 1 sgd
towers          | 8 5   | data=2              | naive 1 own
routed          | 7 3   | tensor=2            | 1f1b 2 adamw
separable       | 8 3   | tensor=2            | afab 4 sgd
latents         | 8 3   | sequence=2,tensor=2 | 1f1b 3 sgd
"""

# An opaque model has no graph to cut.
ONLY_DATA = ("branching",)
# A loss that is not made up of its samples' losses: there can be no microbatches.
WHOLE_BATCHES = ("towers",)
# The user's own Python, of which nothing can be derived: the plan says that it treats each sample independently.
PER_SAMPLE = ("moe", "custom_function", "branching")
# Vectors through the user's own Python, which runs whole on every rank: there is no sequence to cut.
UNSPLIT = (("custom_function", "sequence"),)


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
        named = ",per_sample=model" if self.model in PER_SAMPLE else ""
        return f"{self.plan},schedule={self.schedule},microbatches={self.microbatches}{named}"

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.batches))
        return f"{self.model}/{self.plan}/{self.schedule}-{self.microbatches}/{self.optimizer}/{sizes}"


def covering() -> list[Row]:
    """The rows of :data:`COVERING`."""
    head, *lines = _cells(COVERING)
    return [
        _row(model, plan, cell, batches)
        for model, batches, *cells in lines
        for plan, cell in zip(head[2:], cells, strict=True)
        if cell
    ]


def covering_split() -> list[Row]:
    """The rows of :data:`COVERING_SPLIT`."""
    return [_row(model, plan, proof, batches) for model, batches, plan, proof in _cells(COVERING_SPLIT)[1:]]


def _cells(text: str) -> list[list[str]]:
    head, _, *lines = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    return [head, *lines]


def _row(model: str, plan: str, proof: str, batches: str) -> Row:
    schedule, microbatches, optimizer = proof.split()
    return Row(model, plan, schedule, int(microbatches), optimizer, tuple(int(size) for size in batches.split()))


def full() -> Iterator[Row]:
    """Every model under every plan, schedule and optimizer, at varying batch sizes and microbatches."""
    models = dict.fromkeys(row.model for row in covering())
    sizes = itertools.cycle([(8, 7, 5), (5, 7, 3), (9, 6, 3), (4, 5, 3)])
    microbatches = itertools.cycle([3, 4, 1, 2, 4])
    for model, plan, schedule, optimizer in itertools.product(models, PLANS, (*SCHEDULES, *PIPELINED), OPTIMIZERS):
        if schedule in PIPELINED and "pipeline=2" not in plan:
            continue
        if model not in ONLY_DATA or "pipeline" not in plan:
            yield Row(model, plan, schedule, next(microbatches), optimizer, next(sizes))


def full_split() -> Iterator[Row]:
    """Every model under every plan that splits operators and with every optimizer, at varying schedules and sizes."""
    models = dict.fromkeys(row.model for row in covering_split())
    sizes = itertools.cycle([(8, 7, 5), (5, 7, 3), (9, 6, 3), (4, 5, 3)])
    microbatches, schedules = itertools.cycle([3, 4, 1, 2, 4]), itertools.cycle(SCHEDULES)
    for model, plan, optimizer in itertools.product(models, SPLIT_PLANS, OPTIMIZERS):
        if model not in WHOLE_BATCHES:
            yield Row(model, plan, next(schedules), next(microbatches), optimizer, next(sizes))
        elif "pipeline" not in plan:
            yield Row(model, plan, next(schedules), 1, optimizer, next(sizes))
