"""The gradient noise that a training measures is that of the plain model's parts, and does not depend on the plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.sample_shares import compute_shares
from polylane.efficiency.noise_estimates import NoiseEstimate, estimate_noise
from polylane.efficiency.noise_window import NoiseScale
from polylane.errors import PolylaneError
from polylane.graph.batch import split_bounds
from polylane.optim import LAMB
from polylane.recipe import Mean
from polylane.runtime.job import Job
from polylane.runtime.telemetry.noise_log import NoiseLog
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.part_squares import norm
from tests.support import models
from tests.support.workers.training import Tied, adamw, batch_of, classify, mlp, sgd, workers

STEPS = 4
SAMPLES = 12


def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
    """A mean over some of the samples: parts count different numbers of them."""
    weights = (batch[1] != 0).double()
    return Mean((F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum(), weights.sum())


def sampled_squares(model: nn.Module, divisors: dict[str, Tensor] | None = None) -> float:
    pairs = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    dense = [(name, g.to_dense() if g.is_sparse else g) for name, g in pairs]
    return sum((g if divisors is None else g / divisors[name]).square().sum().item() for name, g in dense)


def plain_estimates(
    model: nn.Module,
    batches: Sequence[Any],
    bounds: Sequence[tuple[int, int]],
    loss: Any = classify,
    build: Any = sgd,
    clip: float | None = None,
) -> list[tuple[NoiseEstimate, NoiseEstimate | None]]:
    """Return the estimates, plain and preconditioned, of a plain loop's batches, from the gradient of every part."""
    model = copy.deepcopy(model)
    optimizer, estimates = build(list(model.named_parameters())), []
    for number, batch in enumerate(batches):
        divisors = adam_divisors(model, optimizer) if build is adamw and number >= 5 else None
        measured = list[tuple[float, float, float]]()
        for start, stop in [*bounds, (0, len(batch[1]))]:
            optimizer.zero_grad()
            value = loss(model, (batch[0][start:stop], batch[1][start:stop]))
            count = float(value.count) if isinstance(value, Mean) else stop - start
            (value.total / value.count if isinstance(value, Mean) else value).backward()
            scaled = sampled_squares(model, divisors) if divisors else 0.0
            measured.append((count, sampled_squares(model), scaled))
        counts = [count for count, *_ in measured[:-1]]
        samples = [count * len(batch[1]) / sum(counts) for count in counts]
        pair = [estimate_noise([m[i] for m in measured[:-1]], samples, measured[-1][i]) for i in (1, 2)]
        estimates.append((pair[0], pair[1] if divisors else None))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return estimates


def adam_divisors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    squares = {name: s["exp_avg_sq"] + 0.001 * s["exp_avg_sq"].mean() for name, s in states.items()}
    return {n: (square / (1 - 0.999 ** float(states[n]["step"]))).sqrt() + 1e-8 for n, square in squares.items()}


def measure(job: Job, batches: Sequence[Any]) -> list[NoiseReading | None]:
    job.worker.telemetry.noise.turn_on(every_step=True)  # type: ignore[union-attr]
    results = [job.step(batch) for batch in batches]
    return [result.noise for result in results]


def assert_alike(
    readings: Sequence[NoiseReading | None], expected: Sequence[tuple[NoiseEstimate, NoiseEstimate | None]]
) -> None:
    for reading, (plain, scaled) in zip(readings, expected, strict=True):
        assert reading is not None
        estimate = reading.estimate()
        assert estimate is not None
        assert (estimate.gradient, estimate.spread) == pytest.approx((plain.gradient, plain.spread), rel=1e-9)
        estimate = reading.estimate(preconditioned=True)
        assert (estimate is None) == (scaled is None)
        if estimate is not None and scaled is not None:
            assert (estimate.gradient, estimate.spread) == pytest.approx((scaled.gradient, scaled.spread), rel=1e-9)


def every(samples: int, parts: int) -> list[tuple[int, int]]:
    return split_bounds(samples, parts)


def shared_parts(samples: int, microbatches: int, replicas: int) -> list[tuple[int, int]]:
    shares = [share for r in range(replicas) for share in compute_shares(samples, microbatches, replicas, r)]
    return [(share.start, share.stop) for share in shares if share.weight]


# Plans whose parts are halves of the batch, and plans with parts of their own.
HALVES = [
    "data=2",
    "microbatches=2",
    "pipeline=2,microbatches=2",
    "pipeline=2,schedule=zb-h1,microbatches=2",
    "pipeline=2,schedule=interleaved,chunks=2,microbatches=2",
    "tensor=2,microbatches=2",
    "tensor=2,data=2",
    "data=2,pipeline=2,microbatches=1",
    "data=2,shard=optimizer",
    "data=2,shard=gradients",
    "data=2,shard=parameters",
    "pipeline=2,microbatches=2,replicas=round-robin,data=2",
]


@pytest.mark.parametrize("plan", HALVES)
@pytest.mark.parametrize("kind", ["plain", "tied", "masked"])
def test_the_noise_is_that_of_the_halves(plan: str, kind: str) -> None:
    model = mlp(6, 12, 12, 4) if kind != "tied" else TiedBetweenStages()
    loss = masked if kind == "masked" else classify
    batches = [batch_of(SAMPLES, step) for step in range(STEPS)]
    expected = plain_estimates(model, batches, every(SAMPLES, 2), loss, clip=0.1)
    for readings in workers(
        lambda job: measure(job, batches), model, plan, loss=loss, example=batches[0], clip_norm=0.1
    ):
        assert_alike(readings, expected)


class TiedBetweenStages(nn.Module):
    """Its last layer has the first one's weights, whatever the stages between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tied()
        self.middle = mlp(6, 8, 6)
        self.head = nn.Linear(6, 6, bias=False).double()
        self.head.weight = self.body.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.body(x))))


@pytest.mark.parametrize(
    ("plan", "microbatches", "replicas"),
    [
        ("data=3,microbatches=2", 2, 3),
        ("data=2,tensor=2,microbatches=3", 3, 2),
        ("data=2,pipeline=2,microbatches=4,shard=parameters", 4, 2),
        ("data=4,shard=gradients,microbatches=2", 2, 4),
    ],
)
def test_parts_of_different_sizes(plan: str, microbatches: int, replicas: int) -> None:
    batches = [batch_of(11, step) for step in range(STEPS)]
    model = mlp(6, 12, 12, 4)
    expected = plain_estimates(model, batches, shared_parts(11, microbatches, replicas))
    for readings in workers(lambda job: measure(job, batches), model, plan, example=batches[0]):
        assert_alike(readings, expected)


@pytest.mark.parametrize(
    "plan",
    [
        *("data=2", "pipeline=2,microbatches=2", "tensor=2,data=2", "tensor=2,microbatches=2"),
        *("data=2,shard=optimizer", "data=2,shard=gradients", "data=2,pipeline=2,microbatches=1,shard=gradients"),
        "data=2,tensor=2,shard=optimizer",
    ],
)
def test_as_adam_divides_gradients(plan: str) -> None:
    batches = [batch_of(SAMPLES, step) for step in range(8)]
    model = mlp(6, 12, 12, 4)
    expected = plain_estimates(model, batches, every(SAMPLES, 2), build=adamw)
    for readings in workers(lambda job: measure(job, batches), model, plan, example=batches[0], optimizer=adamw):
        assert_alike(readings, expected)


@pytest.mark.parametrize("plan", ["data=4,shard=optimizer", "data=4,shard=gradients,within=2"])
def test_as_adam_divides_gradients_of_which_replicas_have_shards(plan: str) -> None:
    batches = [batch_of(SAMPLES, step) for step in range(8)]
    model = mlp(6, 12, 12, 4)
    expected = plain_estimates(model, batches, every(SAMPLES, 4), build=adamw)
    for readings in workers(lambda job: measure(job, batches), model, plan, example=batches[0], optimizer=adamw):
        assert_alike(readings, expected)


def test_parameters_that_one_replica_updates_as_a_whole_are_divided_alike() -> None:
    """LAMB has a trust ratio for each parameter: under ZeRO every one has an owner, and others have no part of it."""

    def lamb(parameters: Any) -> torch.optim.Optimizer:
        return LAMB(list(parameters), lr=0.01)

    def scaled(plan: str) -> list[list[tuple[float, float]]]:
        options: dict[str, Any] = {"example": batches[0], "optimizer": lamb}
        results = workers(lambda job: measure(job, batches), mlp(6, 12, 12, 4), plan, **options)
        found = [[r.estimate(preconditioned=True) for r in readings if r is not None] for readings in results]
        return [[(e.gradient, e.spread) for e in estimates if e is not None] for estimates in found]

    batches = [batch_of(SAMPLES, step) for step in range(8)]
    (expected, _), sharded = scaled("data=2"), scaled("data=2,shard=optimizer")
    assert len(expected) == 3 and all(
        found == [pytest.approx(pair, rel=1e-9) for pair in expected] for found in sharded
    )


def test_shards_of_parameters_have_no_preconditioned_noise() -> None:
    """Whole divisors would need the memory of whole parameters, which no worker has."""
    batches = [batch_of(SAMPLES, step) for step in range(8)]
    model = mlp(6, 12, 12, 4)
    readings = workers(
        lambda job: measure(job, batches), model, "data=2,shard=parameters", example=batches[0], optimizer=adamw
    )[0]
    assert all(r is not None and r.estimate() and r.estimate(preconditioned=True) is None for r in readings)


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4)).double()
    batches = [(torch.randint(0, 9, (8, 3)), torch.randint(0, 4, (8,))) for _ in range(3)]
    plain = lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.1)  # noqa: E731
    expected = plain_estimates(model, batches, every(8, 2), build=plain)
    for readings in workers(lambda job: measure(job, batches), model, "data=2", example=batches[0], optimizer=plain):
        assert_alike(readings, expected)


@pytest.mark.parametrize("plan", ["data=2,microbatches=2,every=3", "data=2,microbatches=2,servers=1"])
def test_replicas_that_do_not_sum_compare_their_own_parts(plan: str) -> None:
    """In the first step, when weights are still equal: the mean of what each replica's halves say."""
    batches = [batch_of(SAMPLES, step) for step in range(2)]
    model = mlp(6, 12, 12, 4)
    shares = [[(s.start, s.stop) for s in compute_shares(SAMPLES, 2, 2, replica)] for replica in range(2)]
    inputs, labels = batches[0]
    halves = []
    for bounds in shares:
        rows = torch.cat([torch.arange(*bound) for bound in bounds])
        halves.append(plain_estimates(model, [(inputs[rows], labels[rows])], every(6, 2))[0][0])
    expected = NoiseEstimate(*(sum(getattr(h, f) for h in halves) / 2 for f in ("gradient", "spread")))
    for readings in workers(lambda job: measure(job, batches), model, plan, example=batches[0])[:2]:
        assert_alike(readings[:1], [(expected, None)])


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("data=1", "no parts of it to compare"),
        ("pipeline=2,schedule=pipedream", "update at different times"),
        ("data=2,compress=powersgd:2", "what replicas sum"),
        ("data=2,every=4", "replicas do not sum theirs"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(plan: str, reason: str) -> None:
    def turn_on(job: Job) -> str:
        with pytest.raises(PolylaneError) as raised:
            job.worker.telemetry.noise.turn_on()  # type: ignore[union-attr]
        return str(raised.value)

    assert all(reason in sentence for sentence in workers(turn_on, mlp(6, 12, 12, 4), plan))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_replicas_that_share_statistics_and_not_gradients_are_refused(microbatches: int) -> None:
    """A part would be a whole microbatch, of whose gradient servers get the summands one by one."""

    def turn_on(job: Job) -> str:
        with pytest.raises(PolylaneError) as raised:
            job.worker.telemetry.noise.turn_on()  # type: ignore[union-attr]
        return str(raised.value)

    plan = f"data=2,microbatches={microbatches},servers=1"
    sentences = workers(turn_on, normalized(), plan, example=batch_of(SAMPLES))[:2]
    assert all("each sends its own gradient" in sentence for sentence in sentences)


def test_training_is_the_same_beside_it() -> None:
    """Weights are those of a training that measures nothing, to the last bit."""
    batches = [batch_of(SAMPLES, step) for step in range(6)]

    def train(job: Job, is_measured: bool) -> dict[str, Tensor]:
        if is_measured:
            job.worker.telemetry.noise.turn_on(every_step=True)  # type: ignore[union-attr]
        for batch in batches:
            job.step(batch)
        return job.state_dict()

    for plan in ("data=2,pipeline=2,microbatches=2", "tensor=2,microbatches=2", "data=2,shard=parameters"):
        plain = workers(lambda job: train(job, False), TiedBetweenStages(), plan, example=batches[0])[0]
        measured = workers(lambda job: train(job, True), TiedBetweenStages(), plan, example=batches[0])[0]
        assert all(torch.equal(plain[name], measured[name]) for name in plain)


def numbers_of(readings: Sequence[NoiseReading | None]) -> list[tuple[float, float]]:
    estimates = [None if reading is None else reading.estimate() for reading in readings]
    return [(estimate.gradient, estimate.spread) for estimate in estimates if estimate is not None]


JOINT = [
    "[data=2|tensor=2],microbatches=2",
    "[data=2|data=1],microbatches=2",
    "[data=1|data=2],microbatches=2,replicas=round-robin",
    "[tensor=2|data=2],microbatches=2,recompute=full",
]


@pytest.mark.parametrize("plan", JOINT)
@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_with_different_meshes_compute_parts_together(plan: str, is_tied: bool) -> None:
    model, batches = TiedBetweenStages() if is_tied else mlp(6, 12, 12, 4), [batch_of(SAMPLES, i) for i in range(2)]
    expected = numbers_of(workers(lambda job: measure(job, batches), model, "microbatches=2", example=batches[0])[0])
    for readings in workers(lambda job: measure(job, batches), model, plan, example=batches[0]):
        assert numbers_of(readings) == [pytest.approx(pair, rel=1e-9) for pair in expected] and len(expected) == 2


@pytest.mark.parametrize(
    "plan", ["sequence=2,microbatches=2", "data=2,tensor=2,recompute=full", "pipeline=2,microbatches=2"]
)
def test_a_gpt_with_tied_embeddings(plan: str) -> None:
    case = models.example_case("gpt")
    batches = [case.batch(4, step) for step in range(2)]
    torch.manual_seed(0)
    model, options = case.model().double(), {"loss": case.loss, "example": batches[0]}
    expected = numbers_of(workers(lambda job: measure(job, batches), model, "microbatches=2", **options)[0])
    for readings in workers(lambda job: measure(job, batches), model, plan, **options):
        assert numbers_of(readings) == [pytest.approx(pair, rel=1e-9) for pair in expected] and len(expected) == 2


@pytest.mark.parametrize("plan", ["data=2,microbatches=2", "pipeline=2,data=2,microbatches=2,shard=gradients"])
def test_normalization_by_statistics_of_all_replicas_makes_microbatches_the_parts(plan: str) -> None:
    model, batches = normalized(), [batch_of(SAMPLES, step) for step in range(2)]
    expected = numbers_of(workers(lambda job: measure(job, batches), model, "microbatches=2", example=batches[0])[0])
    for readings in workers(lambda job: measure(job, batches), model, plan, example=batches[0]):
        assert numbers_of(readings) == [pytest.approx(pair, rel=1e-9) for pair in expected] and len(expected) == 2


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def test_halves_of_a_normalized_batch_are_not_independent() -> None:
    """Why replicas that share statistics are not compared: the estimate of |E G|² is too small, and negative here."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False)).double()
    estimates, gradients = [], []
    parameters = list(model.parameters())
    for seed in range(2000):
        inputs, labels = batch_of(SAMPLES, seed)
        halves = F.cross_entropy(model(inputs), labels, reduction="none").view(2, 6).mean(dim=1)
        parts = [
            torch.cat([g.flatten() for g in torch.autograd.grad(half, parameters, retain_graph=True)])
            for half in halves
        ]
        gradients.append(torch.stack(parts).mean(dim=0))
        squares = [part.square().sum().item() for part in parts]
        estimates.append(estimate_noise(squares, [6, 6], gradients[-1].square().sum().item()).gradient)
    mean, error = torch.tensor(estimates).mean(), torch.tensor(estimates).std() / 2000**0.5
    assert mean + 4 * error < 0 < torch.stack(gradients).mean(dim=0).square().sum()


def test_hooks_on_parameters_change_updates_and_not_the_noise() -> None:
    batches = [batch_of(SAMPLES, 0)]
    model = mlp(6, 12, 12, 4)
    expected = plain_estimates(model, batches, every(SAMPLES, 2))
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for readings in workers(lambda job: measure(job, batches), model, "data=2", example=batches[0]):
        assert_alike(readings, expected)


@pytest.mark.parametrize("plan", ["data=2,microbatches=2", "tensor=2,microbatches=4"])
def test_a_training_finds_the_closed_form(plan: str) -> None:
    """Linear regression on x ~ N(0, I) without noise: d + 1, within 3%, from 300 steps at the same weights."""

    def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square().mean() / 2

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters), lr=0.0)

    torch.manual_seed(0)
    model = nn.Linear(20, 1, bias=False).double()
    inputs = [torch.randn(256, 20, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(300)]
    batches = [(rows, torch.zeros(256, dtype=torch.float64)) for rows in inputs]

    def follow(job: Job) -> NoiseScale:
        log = NoiseLog()
        job.worker.telemetry.noise.turn_on(every_step=True)  # type: ignore[union-attr]
        for batch in batches:
            log.add(job.step(batch))
        return log.scales.plain

    scales = workers(follow, model, plan, loss=squared_error, optimizer=still, example=batches[0])
    assert scales[0].scale == pytest.approx(21, rel=0.03) and all(scale == scales[0] for scale in scales)
    assert scales[0].low is not None and scales[0].high is not None and scales[0].low < 21 < scales[0].high


def test_norms_are_in_single_precision_at_least() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert norm(values).item() == values.norm().item()
    assert norm(values.bfloat16()).item() == pytest.approx(values.bfloat16().double().norm().item(), rel=1e-6)
    pairs = torch.view_as_complex(values.view(500, 2))
    assert norm(pairs).item() == pytest.approx(values.norm().item(), rel=1e-14)
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 1, 2]]), torch.ones(3, 2), (4, 2))
    assert norm(rows).item() == pytest.approx(10**0.5)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_loss_scale_is_divided_out(optimizer: Any) -> None:
    """Passes in float16 compute gradients of a multiple of the loss; what is told of them is the loss's own."""
    batches = [(x.float(), y) for x, y in (batch_of(8, seed=i) for i in range(7))]
    plain_readings, scaled_readings = (
        workers(
            lambda job: measure(job, batches),
            mlp(6, 8, 4).float(),
            f"data=2,precision={precision}",
            optimizer=optimizer,
            example=batches[0],
        )[0]
        for precision in ("float32", "float16")
    )
    for plain, scaled in zip(plain_readings, scaled_readings, strict=True):
        assert scaled.numbers[:-3] == pytest.approx(plain.numbers[:-3], rel=5e-2, nan_ok=True)
    assert plain_readings[-1].is_preconditioned == (optimizer is adamw)
