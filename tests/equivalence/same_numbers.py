"""The judge of the trainings: does a plan compute what the user's plain loop computes on one device?

``python -m tests.equivalence.same_numbers`` writes the table of all trainings and plans; ``--only`` some of them.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.errors import AuditFailed, PolylaneError, WorkerFailed
from polylane.graph.batch import clone_leaves, count_parts, flatten, sample_count, split_bounds, take_samples
from polylane.graph.precision import Promoted
from polylane.recipe import Mean
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.audit import AuditMode
from polylane.verify.audit.audit_start import start_auditor
from polylane.verify.audit.training_audit import attach_audit
from tests.equivalence.blinded import BLINDED, blinded
from tests.equivalence.launched import Plain, Raised, by_script, by_train, isolated, read_epochs
from tests.equivalence.trainings.all_trainings import TRAININGS
from tests.equivalence.trainings.training import ALONE, BY_PASS, PLANS, Training
from tests.support.workers.compiling import compile_training

TOLERANCE = 1e-9
SMALLEST = 1e-6  # below which a tensor's own size is no scale for an error

EQUAL, REFUSED, DIFFERENT, FAILED, FROZEN = "equal", "refused", "DIFFERENT", "FAILED", "FROZEN"
CAUGHT = "caught"  # by an audit, which stopped it


@dataclass(frozen=True)
class Trained:
    """What a training leaves behind: the loss of every step, weights and buffers after the last."""

    losses: list[float]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What came of a training by a plan.

    Attributes:
        kind: EQUAL, REFUSED, CAUGHT, DIFFERENT, or FAILED: it ended otherwise than by a sentence for the user; or
            FROZEN: it is equal to one worker, but there no random number is drawn.
        error: the worst relative error of a loss, weight or buffer, where there is one.
        told: what was said, where it did not end.
    """

    kind: str
    error: float = 0.0
    told: str = ""

    def __str__(self) -> str:
        if self.kind != DIFFERENT:
            return self.kind
        return f"{self.kind} {self.error:.1e}" if math.isfinite(self.error) else f"{self.kind} NaN"


# The plan -------------------------------------------------------------------------------------------------------------


def prepared_for(training: Training, plan: str) -> CompiledTraining:
    """As ``train`` and ``parallelize`` prepare it: with the first batch as the example."""
    objectives = build_objectives(copy.deepcopy(training.loss), training.optimizer_or_sgd, None)
    example = training.batches()[0]
    return compile_training(training.model(), objectives, example, plan, in_float64=training.promoted)


def by_plan(training: Training, prepared: CompiledTraining, seed: int = 0, audit: AuditMode = "off") -> Trained:
    """Train by a plan on forked workers.

    Raises:
        PolylaneError: at a step.
        WorkerFailed: a worker raised otherwise, or died.
    """
    batches = training.batches()

    def run(_: Any) -> Trained:
        losses = []
        world, how = World.join(), dict[str, Any](example=batches[0], seed=seed)
        audits = start_auditor(audit, prepared, world, **how)
        with Job(prepared, world, **how) as job:
            attach_audit(audits, job)
            for step, batch in enumerate(batches):
                if training.before is not None:
                    training.before(prepared.model, step)
                losses.append(job.step(batch).loss)
            return Trained(losses, job.state_dict())

    trained: Trained = fork_workers(run, prepared.plan.processes)[0]
    return trained


# The loop -------------------------------------------------------------------------------------------------------------


def by_loop(training: Training, parts: int = 1, fewest: int = 1, steps: int | None = None) -> Trained:
    """Train in a plain loop on one device.

    Args:
        parts: how many microbatches pass forward one after another, their losses averaged as the training counts them.
        fewest: samples that each of them needs.
        steps: only the first so many.
    """
    if training.script is not None:
        losses, state = training.script(Plain)
        return Trained(losses, state)
    model, loss = training.model(), copy.deepcopy(training.loss)
    optimizer = (training.optimizer_or_sgd)(model.named_parameters())
    scheduler = None if training.scheduler is None else training.scheduler(optimizer)
    losses = []
    batches = training.batches()[:steps] if training.data is None else read_epochs(training)
    for step, batch in enumerate(batches):
        if training.before is not None:
            training.before(model, step)
        optimizer.zero_grad()
        losses.append(_backward(training, model, loss, batch, parts, fewest))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if training.before is not None and not training.isolated:
        training.before(model, 0)  # what it changes beside the model is as it was
    # torch.compile puts a name of its own into those of parameters.
    state = {name.replace("_orig_mod.", ""): value.detach().clone() for name, value in model.state_dict().items()}
    return Trained(losses, state)


def _backward(training: Training, model: nn.Module, loss: Any, batch: Any, parts: int, fewest: int) -> float:
    leaves, rebuild = flatten(batch)
    samples, total = sample_count(leaves), 0.0
    pieces = [
        rebuild(clone_leaves(take_samples(leaves, start, stop)))
        for start, stop in split_bounds(samples, count_parts(samples, parts, fewest))
        if start < stop
    ]
    counts = [_count(training, piece) for piece in pieces]
    for piece, count in zip(pieces, counts, strict=True):
        if count:
            with Promoted() if training.promoted else nullcontext():
                value = loss(model, piece)
            value = (value.value if isinstance(value, Mean) else value) * (count / sum(counts))
            value.backward()
            total += value.item()
        else:  # nothing counts, but the forward pass moves the model's state
            loss(model, piece)
    return total


def _count(training: Training, batch: Any) -> float:
    return training.counted(batch) if training.counted is not None else float(sample_count(flatten(batch)[0]))


# The judge ------------------------------------------------------------------------------------------------------------


def judged(training: Training, plan: str, audit: AuditMode = "off") -> Outcome:
    """What comes of a training by a plan, held against one device."""
    try:
        if training.is_launched:
            trained, reference, drawn = *_launched(training, plan, audit), True
        elif training.isolated:
            # The loop runs in a process that has not compiled the training: of that, something may be left in Python.
            trained, parts = isolated(partial(_trained, training, plan, audit))
            reference, drawn = _of_one_process(training, *parts), True
        else:
            prepared = prepared_for(training, plan)
            trained = by_plan(training, prepared, audit=audit)
            reference, drawn = _reference(training, prepared)
    except AuditFailed as failed:
        return Outcome(CAUGHT, told=str(failed))
    except PolylaneError as refusal:
        one_sentence = len(str(refusal).splitlines()) == 1
        return Outcome(REFUSED if one_sentence else FAILED, told=str(refusal))
    except (WorkerFailed, Raised) as failure:
        return Outcome(FAILED, told=str(failure))
    except Exception as error:  # a refusal is a sentence: all else is a fault, to be shown with the others
        return Outcome(FAILED, told=f"{type(error).__name__}: {error}")
    error = distance(trained, reference)
    if error > TOLERANCE:
        return Outcome(DIFFERENT, error)
    return Outcome(EQUAL if drawn else FROZEN, error)


def _launched(training: Training, plan: str, audit: AuditMode) -> tuple[Trained, Trained]:
    launch = by_train if training.data is not None else by_script
    trained = Trained(*isolated(partial(launch, training, plan, audit)))
    if training.draws:
        return trained, Trained(*isolated(partial(launch, training, ALONE, "off")))
    return trained, _of_one_process(training)


def _trained(training: Training, plan: str, audit: AuditMode) -> tuple[Trained, tuple[int, int]]:
    prepared = prepared_for(training, plan)
    return by_plan(training, prepared, audit=audit), _parts(training, prepared)


@cache
def _of_one_process(training: Training, parts: int = 1, fewest: int = 1) -> Trained:
    return isolated(partial(by_loop, training, parts, fewest))


def _parts(training: Training, prepared: CompiledTraining) -> tuple[int, int]:
    """How many parts of a batch pass forward one after another, and how many samples each of them needs."""
    return (prepared.plan.microbatches, prepared.min_samples.samples) if training.in_turn else (1, 1)


def _reference(training: Training, prepared: CompiledTraining) -> tuple[Trained, bool]:
    """What one device makes of it; and whether it draws the random numbers that it should."""
    if not training.draws:
        return by_loop(training, *_parts(training, prepared)), True
    parts = prepared.plan.microbatches if training.draws == BY_PASS else 1
    alone = prepared_for(training, f"data=1,microbatches={parts}")
    reference = by_plan(training, alone)
    return reference, distance(by_plan(training, alone, seed=1), reference) > 1e-3


def distance(trained: Trained, reference: Trained) -> float:
    """The worst relative error of a loss, a weight or a buffer; infinite where one has what the other lacks."""
    if trained.state.keys() != reference.state.keys() or len(trained.losses) != len(reference.losses):
        return float("inf")
    losses = torch.tensor([trained.losses, reference.losses], dtype=torch.float64)
    pairs = list(zip(*losses, strict=True))
    pairs += [(trained.state[name], value) for name, value in reference.state.items()]
    errors = [_error(_widen(value), _widen(truth)) for value, truth in pairs if truth.numel()]
    return max(float("inf") if error != error else error for error in errors)


def _widen(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _error(value: Tensor, truth: Tensor) -> float:
    if value.shape != truth.shape:
        return float("inf")
    return float((value - truth).abs().max() / truth.abs().max().clamp(min=SMALLEST))


# The table ------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Write the table as it is found; 1 if any training is different, or failed, or is refused where it must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(TRAININGS), choices=list(TRAININGS))
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=list(PLANS), choices=[*PLANS, ALONE])
    parser.add_argument("--audit", action="store_true", help="audit every step that is due")
    parser.add_argument("--blind", nargs="+", default=[], choices=list(BLINDED), help="switch these detections off")
    parser.add_argument("--told", action="store_true", help="show what was said of what was refused or failed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, wrong = time.monotonic(), 0
    print(f"| training | {' | '.join(options.plans)} |\n|---{'|---' * len(options.plans)}|", flush=True)
    told: list[str] = []
    for name in options.only:
        training = TRAININGS[name]()
        with blinded(options.blind):
            outcomes = {plan: judged(training, plan, "stop" if options.audit else "off") for plan in options.plans}
        wrong += sum(not accepted(training, plan, outcome) for plan, outcome in outcomes.items())
        cells = [f"{o}{'' if accepted(training, plan, o) else ' (!)'}" for plan, o in outcomes.items()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        told += [f"{name}, {plan}: {o.kind}: {_short(o.told)}" for plan, o in outcomes.items() if o.told]
    if options.told:
        print("\n" + "\n".join(told))
    print(f"\n{wrong} wrong (!), {time.monotonic() - began:.0f} s", file=sys.stderr)
    return min(wrong, 1)


def accepted(training: Training, plan: str, outcome: Outcome) -> bool:
    """Whether the table allows that."""
    return outcome.kind == EQUAL or (outcome.kind == REFUSED and plan in training.refusable)


def _short(told: str) -> str:
    lines = told.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
