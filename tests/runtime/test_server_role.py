"""What a user sees of a training by parameter servers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.support.workers.training import (
    Trained,
    adamw,
    assert_same,
    assert_state,
    batch_of,
    classify,
    mlp,
    plainly,
    sgd,
    trained,
    trained_by_servers,
    workers,
)

BATCHES = [batch_of(8, seed=i) for i in range(4)]


def test_gradients_are_the_summed_and_clipped_ones() -> None:
    def work(job: Job) -> Any:
        job.step(BATCHES[0])
        whole = job.whole_gradients()
        return (
            whole,
            {n: g.clone() for n, g in job.gradients().items() if g is not None},
            job.worker.part_of("0.weight"),
        )

    expected = plainly(mlp(6, 8, 4), BATCHES[:1], clip_norm=0.3).gradients
    for whole, own, part in workers(work, mlp(6, 8, 4), "data=2,servers=2,dedicated=yes", clip_norm=0.3):
        assert_state(whole, expected)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name])
        assert part == ""


class Experts(nn.Module):
    """Each sample goes to one of two layers; which one follows from the inputs alone, or from a weight as well."""

    def __init__(self, asks_inputs: bool) -> None:
        super().__init__()
        self.asks_inputs = asks_inputs
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = x.new_zeros(len(x), 4), torch.tanh(self.body(x))
        chosen = x[:, 0] if self.asks_inputs else x[:, 0] + 0 * self.body.weight.sum()
        for expert, head in enumerate(self.heads):
            rows = (chosen.long() == expert).nonzero().squeeze(1)
            if rows.numel():
                y = y.index_add(0, rows, head(hidden[rows]))
        return y


@pytest.mark.parametrize("asks_inputs", [True, False])
def test_parameters_that_get_no_gradient_in_some_step_are_skipped(asks_inputs: bool) -> None:
    batches = [batch_of(6, seed=i) for i in range(3)]
    for (inputs, _), experts in zip(batches, ((0, 0, 0, 1, 1, 1), (0,) * 6, (0, 0, 0, 1, 1, 1)), strict=True):
        inputs[:, 0] = torch.tensor(experts, dtype=torch.float64)
    expected = plainly(Experts(asks_inputs), batches, optimizer=adamw)
    plan = "data=2,servers=2" if asks_inputs else "data=2,servers=2,per_sample=model"
    for worker in trained_by_servers(Experts(asks_inputs), plan, batches, optimizer=adamw):
        assert_same(worker, expected)


def test_schedulers_run_on_the_servers_and_show_at_the_workers() -> None:
    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def rates(job: Job) -> list[float]:
        return [group["lr"] for group in job.optimizer.param_groups]

    expected = plainly(mlp(6, 8, 4), BATCHES, scheduler=halving)
    for worker in trained_by_servers(mlp(6, 8, 4), "data=2,servers=2", BATCHES, scheduler=halving, after=rates):
        assert_same(worker, expected)
        assert worker.extra == [0.025]


def test_what_a_user_changes_in_the_optimizer_goes_to_the_servers() -> None:
    def work(job: Job) -> Trained:
        losses = []
        for number, batch in enumerate(BATCHES):
            if number == 2:
                job.optimizer.param_groups[0]["lr"] *= 0.1
            losses.append(job.step(batch).loss)
        return Trained(losses, job.state_dict())

    model = copy.deepcopy(mlp(6, 8, 4))
    optimizer = sgd(model.named_parameters())
    losses = []
    for number, batch in enumerate(BATCHES):
        if number == 2:
            optimizer.param_groups[0]["lr"] *= 0.1
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    for worker in workers(work, mlp(6, 8, 4), "data=2,servers=2"):
        assert_same(worker, Trained(losses, model.state_dict()))


def test_evaluation_and_weights_at_those_who_only_serve() -> None:
    def work(job: Job) -> Any:
        seen = [(job.step(batch).samples, job.evaluate(batch)) for batch in BATCHES]
        return seen, job.state_dict(), job.timeline(2)

    seen, state, timeline = zip(*workers(work, mlp(6, 8, 4), "data=2,servers=1,dedicated=yes"), strict=True)
    assert seen[0] == seen[1] == seen[2]
    assert_state(state[2], state[0], 0)
    assert {span.rank for span in timeline[2].spans} == {0, 1, 2}  # the server's lane has its updates
    assert timeline[0].to_dict() == timeline[2].to_dict()
    assert timeline[2].groups == {"stage0.0": ((0,), (1,))}  # replicas sum nothing with each other
    size = sum(p.nbytes for p in mlp(6, 8, 4).parameters())
    given = [span.bytes for span in timeline[2].spans if span.rank == 2]
    assert given == [2 * size] * 2  # the new weights, to both


def test_an_optimizer_that_remembers_the_model_is_refused() -> None:
    model = mlp(6, 8, 4)

    def remembers(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(PolylaneError, match="must optimize the parameters that it is given: a parameter server"):
        trained(model, "data=2,servers=1", BATCHES, optimizer=remembers)


@pytest.mark.parametrize("plan", ["data=2,servers=1,staleness=1", "data=2,servers=2,staleness=1,dedicated=yes"])
def test_a_replica_that_has_ended_holds_nobody_up(plan: str) -> None:
    def work(job: Job) -> int:
        job.step(BATCHES[0])
        for _ in range(5 if job.world.rank == 1 else 0):
            job.step(BATCHES[0])
        job.close()
        job.close = lambda: None  # type: ignore[method-assign]  # it is
        return job.worker.staleness

    assert workers(work, mlp(6, 8, 4), plan)[1] == 0


def test_several_losses_have_optimizers_of_their_own() -> None:
    """Every replica steps both in turn; servers count the updates of both together."""

    def first(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return classify(model, batch)

    def second(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).square().mean()

    def last(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for name, p in parameters if name.startswith("2")], lr=0.01)

    losses, optimizers = {"first": first, "second": second}, {"first": sgd, "second": last}

    def work(job: Job) -> Any:
        seen = [job.step(batch, name).loss for batch in BATCHES for name in losses]
        return seen, job.state_dict(), job.worker.updates()

    model = mlp(6, 8, 4)
    plain = {name: factory(list(model.named_parameters())) for name, factory in optimizers.items()}
    expected = []
    for batch in BATCHES:
        for name, loss in losses.items():
            model.zero_grad()
            value = loss(model, batch)
            value.backward()
            expected.append(value.item())
            plain[name].step()
    for seen, state, _ in workers(work, mlp(6, 8, 4), "data=2,servers=2", loss=losses, optimizer=optimizers):
        assert seen == pytest.approx(expected, rel=1e-9)
        assert_state(state, model.state_dict())
    plan = "data=2,servers=2,staleness=any,dedicated=yes"
    every = workers(work, mlp(6, 8, 4), plan, loss=losses, optimizer=optimizers)
    for _, state, updates in every:
        assert_state(state, every[0][1], 0)
        for order in updates:
            assert [update.version for update in order] == list(range(1, 2 * 2 * len(BATCHES) + 1))
            assert [update.objective for update in order if update.replica == 0] == [0, 1] * len(BATCHES)
