"""What `verify` says of two small models by some plan: a transformer, and a mobile-net-like convolutional network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 12  # of a text


class Block(nn.Module):
    """Causal attention with q, k and v in one matrix, then two layers; both are added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (part.view(samples, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(samples, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Two blocks between an embedding and the same table as the head."""

    def __init__(self, classes: int, width: int = 16, heads: int = 4, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(classes, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Inverted(nn.Module):
    """Mobile and efficient networks' block: wider, depthwise, squeeze and excite, narrower, added to what came in."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(channels, wide, 1), nn.BatchNorm2d(wide)
        self.depthwise, self.norm2 = nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.project, self.norm3 = nn.Conv2d(wide, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.expand(x)))
        y = F.silu(self.norm2(self.depthwise(y)))
        y = y * self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.norm3(self.project(y))


class Mobile(nn.Module):
    """Convolution, two such blocks, and a head over the mean of all places."""

    def __init__(self, classes: int, channels: int = 8, wide: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(Inverted(channels, wide) for _ in range(blocks)))
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(F.silu(self.norm(self.stem(x)))).mean((2, 3))))


Batch = tuple[Tensor, Tensor]


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch[0]).flatten(0, 1), batch[1].flatten()


def classify(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def mean(scores: Tensor, labels: Tensor, samples: int) -> Tensor:
    return F.cross_entropy(scores, labels)


def total(scores: Tensor, labels: Tensor, samples: int) -> Tensor:
    """A sum over the batch, which counts more the more samples there are."""
    return F.cross_entropy(scores, labels, reduction="sum") / 100


def per_sample(scores: Tensor, labels: Tensor, samples: int) -> Tensor:
    """Each over the batch's size, and the sum of that."""
    return (F.cross_entropy(scores, labels, reduction="none") / samples).sum()


def own_labels(scores: Tensor, labels: Tensor, samples: int) -> Tensor:
    """Labels that the model finds itself: how many there are cannot be counted beforehand."""
    return F.cross_entropy(scores, scores.detach().argmax(-1))


LOSSES = {"mean": mean, "total": total, "per_sample": per_sample, "own_labels": own_labels}


def _loss(
    scored: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]], name: str
) -> Callable[[nn.Module, Batch], Tensor]:
    criterion = LOSSES[name]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return criterion(*scored(model, batch), len(batch[0]))

    return loss


def texts(samples: int, classes: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, classes, (samples, LENGTH + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def pictures(samples: int, classes: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 12, 12, generator=random), torch.randint(0, classes, (samples,), generator=random)


def _optimizer(name: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(parameters)
    if name == "lamb":
        from polylane.optim import LAMB

        return LAMB(named, lr=0.01, weight_decay=0.1)
    if name == "adagrad":
        return torch.optim.Adagrad(named, lr=0.01, initial_accumulator_value=0.1)
    if name == "adamw":
        return torch.optim.AdamW(named, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(named, lr=0.1, momentum=0.9 if name == "momentum" else 0.0)


# The number of classes is odd, so that two ranks have unequal parts of them.
MODELS = {"gpt": (Gpt, next_token, texts, "adamw", 23), "network": (Mobile, classify, pictures, "sgd", 5)}


@dataclass(frozen=True)
class Proof:
    """One question to `verify`.

    Attributes:
        model: of :data:`MODELS`.
        plan: in one line.
        batch, steps: samples of a batch, and how many steps are taken.
        clip: bound on the gradients' norm, or None.
        classes: how many, where it is another number than usually: words of the text, say.
        pins: of what nodes give, how it is to lie: node, axis, placement; the rest of the plan is chosen around them.
        loss: of :data:`LOSSES`.
        optimizer: "sgd", "momentum", "adamw", "lamb", or "adagrad", which has its states from the start.
        audited: whether the audit of a training is asked, in place of `verify`.
    """

    model: str
    plan: str
    batch: int = 7
    steps: int = 2
    clip: float | None = None
    optimizer: str = ""
    loss: str = "mean"
    classes: int | None = None
    pins: tuple[tuple[str, str, str], ...] = ()
    audited: bool = False

    @classmethod
    def parse(cls, model: str, asked: str) -> Proof:
        """From a plan and settings behind it: ``data=2 batch=5 steps=3 clip=0.1 pins=norm/layer_norm:tensor:shard(2)``.

        Several pins are separated by semicolons.
        """
        plan, *settings = asked.split()
        given: dict[str, Any] = dict(each.split("=", 1) for each in settings)
        kinds = {
            "batch": int,
            "steps": int,
            "clip": float,
            "classes": int,
            "optimizer": str,
            "loss": str,
            "pins": _pins,
            "audited": bool,
        }
        return cls(model, plan, **{key: kinds[key](value) for key, value in given.items()})


def _pins(text: str) -> tuple[tuple[str, str, str], ...]:
    parts = (each.split(":") for each in text.split(";"))
    return tuple((node, axis, placement) for node, axis, placement in parts)


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        verdict: "equal", "NOT equal", "replicas differ" (their bits), "refused" (an error), or "hung".
        culprit: the first operator that differs, or what the error says.
        worst: the largest relative error.
    """

    verdict: str
    culprit: str = ""
    worst: float = 0.0

    def notices(self, error: str) -> bool:
        """Whether a bug has been noticed: by a difference, or by an error that says this."""
        refused = bool(error) and self.verdict == "refused" and error in self.culprit
        return refused or self.verdict in ("NOT equal", "replicas differ")


def objective_of(proof: Proof) -> Any:
    """Its loss and optimizer."""
    from polylane.compile.objectives import Objective

    _, scored, _, optimizer, _ = MODELS[proof.model]
    return Objective("loss", _loss(scored, proof.loss), partial(_optimizer, proof.optimizer or optimizer))


def prove(proof: Proof) -> Outcome:
    """Ask `verify`."""
    from polylane.verify.verify import TOLERANCE, verify

    made, _, batch, _, classes = MODELS[proof.model]
    classes = proof.classes or classes
    torch.manual_seed(0)
    model, random = made(classes), torch.Generator().manual_seed(1)
    batches = [batch(proof.batch, classes, random) for _ in range(proof.steps)]
    objective = objective_of(proof)
    try:
        plan = _pinned(proof, model, objective, batches[0]) if proof.pins else proof.plan
        if proof.audited:
            return _audited(model, objective, batches, plan, proof.clip)
        verdict = verify(model, objective, batches, plan, clip_norm=proof.clip)
    except Exception as error:  # whatever a bug may raise
        line = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), "")
        return Outcome("refused", f"{type(error).__name__}: {line.strip()}"[:300])
    if verdict.passed:
        return Outcome("equal", worst=verdict.worst)
    kind = "NOT equal" if not verdict.worst <= TOLERANCE else "replicas differ"
    return Outcome(kind, verdict.culprit or "", verdict.worst)


def _audited(model: nn.Module, objective: Any, batches: Sequence[Any], plan: Any, clip: float | None) -> Outcome:
    """Train by the plan, and let every step be audited that is due."""
    from polylane.compile.compiled_training import compile_training
    from polylane.compile.training_problem import TrainingProblem
    from polylane.errors import AuditFailed
    from polylane.runtime.job import Job
    from polylane.runtime.workers.started_worker import WorkerContext
    from polylane.runtime.workers.team import fork_workers
    from polylane.verify.audit.audit_report import AuditReport
    from polylane.verify.audit.audit_start import start_auditor
    from polylane.verify.audit.training_audit import attach_audit
    from polylane.verify.verify import batch_in_float64

    batches = [batch_in_float64(batch) for batch in batches]
    prepared = compile_training(TrainingProblem(model.double(), {"loss": objective}, batches[0]), plan)

    def run(context: WorkerContext) -> AuditReport | None:
        how: dict[str, Any] = {"example": batches[0], "clip_norm": clip}
        audits = start_auditor("stop", prepared, context.world, begins_as_built=True, **how)
        job = Job(prepared, context.world, **how)
        audit = attach_audit(audits, job)
        for batch in batches:
            job.step(batch)
        job.close()
        return audit and audit.report()

    try:
        report = fork_workers(run, prepared.plan.processes)[0]
    except AuditFailed as failed:
        return Outcome("NOT equal", str(failed).partition("computes: ")[2].partition(" (largest")[0])
    assert report is not None
    return Outcome("equal" if report.steps else "refused", report.note, report.worst)


def _pinned(proof: Proof, model: nn.Module, objective: Any, batch: Any) -> Any:
    """The proof's plan, of one stage, as a plan file that says how some values lie."""
    from polylane.plan.plan import Plan
    from polylane.plan.spec import parse
    from tests.support.workers.compiling import compile_training

    nodes, spec = (
        compile_training(model, {"loss": objective}, batch, "data=1").main_partition.graph.nodes,
        parse(proof.plan),
    )
    placements: dict[str, dict[str, str]] = {}
    for node, axis, placement in proof.pins:
        placements.setdefault(node, {})[axis] = placement
    stage = {
        "nodes": [nodes[0].name, nodes[-1].name],
        "devices": list(range(spec.workers)),
        "mesh": {axis: n for axis, n in spec.meshes[0]._asdict().items() if n > 1},
        "placements": placements,
    }
    return Plan.model_validate({"stages": [stage]})


def answer(asked: Sequence[str]) -> None:
    """Print what `verify` says to each question ("gpt data=2"), one line of JSON each."""
    for each in asked:
        model, _, rest = each.partition(" ")
        print(json.dumps(asdict(prove(Proof.parse(model, rest)))), flush=True)
