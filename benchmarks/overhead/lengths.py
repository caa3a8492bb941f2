"""python -m benchmarks.overhead.lengths [--lengths N] [--quick]: what a step costs on a length of text that is new."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import make_parser
from benchmarks.zoo.packages import load_torchvision
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

PLANS = ("data=1", "data=2", "pipeline=2,microbatches=4", "tensor=2", "sequence=2")
WORDS, SAMPLES = 1000, 16
EXAMPLE, SECOND = 64, 48  # lengths of the example batch, and of the one for which the open graph is captured

Step = Callable[[dict[str, Tensor]], Any]


@dataclass(frozen=True)
class Measured:
    """What one way of training takes.

    Attributes:
        first: seconds of a step on each length when it comes for the first time.
        again: seconds of a later step on the same length, in the same order.
        capture: seconds of the step that captured the graph with open sizes.
    """

    first: list[float]
    again: list[float]
    capture: float

    @property
    def ratio(self) -> float:
        """Median over the lengths of the first step's seconds to a later one's."""
        return statistics.median(a / b for a, b in zip(self.first, self.again, strict=True))


def encoder(layers: int, hidden: int) -> nn.Module:
    """A masked language model of transformers, of random weights, without dropout."""
    load_torchvision()
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, num_attention_heads=4, max_position_embeddings=256, **sizes, **still)
    model: nn.Module = BertForMaskedLM(config)
    return model


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def batch_of(length: int) -> dict[str, Tensor]:
    """Texts of one length, padded at their ends; every seventh word is to be guessed."""
    generator = torch.Generator().manual_seed(length)
    words = torch.randint(0, WORDS, (SAMPLES, length), generator=generator)
    mask = (torch.arange(length) < length - torch.arange(SAMPLES)[:, None] % 4).long()
    labels = torch.where((torch.arange(length) % 7 == 0) & (mask > 0), words, -100)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-4)


def alternate(step: Step, lengths: Sequence[int]) -> Measured:
    """Time steps on new lengths and on known ones in turns, each after a step on the example's length."""

    def seconds(length: int) -> float:
        step(batch_of(EXAMPLE))
        batch = batch_of(length)
        start = time.perf_counter()
        step(batch)
        return time.perf_counter() - start

    step(batch_of(EXAMPLE))
    capture = seconds(SECOND)
    pairs = [(seconds(length), seconds(length)) for length in lengths]
    return Measured([new for new, _ in pairs], [known for _, known in pairs], capture)


def plain(model: nn.Module, lengths: Sequence[int]) -> Measured:
    """A loop of plain PyTorch, in a worker as the others are: what new sizes cost torch itself."""
    model = copy.deepcopy(model)
    optimizer = adamw(model.named_parameters())

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        masked_loss(model, batch).backward()
        optimizer.step()

    return alternate(step, lengths)


def by_plan(model: nn.Module, plan: str, lengths: Sequence[int]) -> Measured:
    """Training by a plan, on workers of its own; what its slowest worker took."""
    objectives = build_objectives(masked_loss, adamw, None)
    prepared = compile_training(TrainingProblem(copy.deepcopy(model), objectives, batch_of(EXAMPLE)), plan)

    def work(_: Any) -> Measured:
        with Job(prepared, World.join(), example=batch_of(EXAMPLE)) as job:
            measured = alternate(lambda batch: float(job.step(batch).loss), lengths)
            assert len(job._role._cache) == 2, "a new length was captured again"
            return measured

    every = fork_workers(work, prepared.plan.processes)
    return max(every, key=lambda one: sum(one.first))


def table(rows: Sequence[tuple[str, Measured]]) -> str:
    """Everyone's seconds, as markdown."""
    lines = ["| | known length, ms | new length, ms | new to known | capture, s |", "|---|---:|---:|---:|---:|"]
    for name, one in rows:
        again, first = (1e3 * statistics.median(each) for each in (one.again, one.first))
        capture = "" if name == "plain loop" else f"{one.capture:.1f}"
        lines.append(f"| {name} | {again:.1f} | {first:.1f} | {one.ratio:.3f} | {capture} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each plan, and print the table."""
    parser = make_parser("benchmarks.overhead.lengths", __doc__)
    parser.add_argument("--lengths", type=int, default=24, help="new lengths that come (default 24)")
    parser.add_argument("--plans", nargs="+", default=PLANS, help=f"plans that train (default: {' '.join(PLANS)})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before anything runs: the workers are forked
    model = encoder(1, 16) if options.quick else encoder(4, 256)
    count = 2 if options.quick else options.lengths
    lengths = [33 + (17 * i) % 61 for i in range(count)]  # between 33 and 93, in no order, each once
    lengths = [length for length in lengths if length not in (EXAMPLE, SECOND)]
    rows = [("plain loop", fork_workers(lambda _: plain(model, lengths), 1)[0])]
    rows += [(f"polylane {plan}", by_plan(model, plan, lengths)) for plan in options.plans]
    print(f"\nBERT, batches of {SAMPLES} texts, {len(lengths)} lengths\n\n{table(rows)}", flush=True)


if __name__ == "__main__":
    main()
