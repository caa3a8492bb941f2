"""data_parallel: a loop that owns its steps gives one device's numbers, on any number of replicas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.errors import PolylaneError, WorkerFailed
from polylane.runtime.workers.team import fork_workers
from tests.support import subsets


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def samples(count: int = 23) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=random).double(), torch.tensor(i % 3)) for i in range(count)]


def trained(replicas: Any, model: nn.Module, accumulate: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Nine steps; with ``accumulate`` two backward passes each, and noise that the loop itself draws."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, labels in replicas.batches(samples(), 5, epochs=2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        if accumulate:
            noisy = inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype)
            F.cross_entropy(model(noisy), labels).backward()
        optimizer.step()
        losses.append(replicas.mean(loss))
    return losses, model.state_dict()


@pytest.mark.parametrize("workers", subsets.one_in(2, [2, 3], first=1))
@pytest.mark.parametrize("accumulate", subsets.one_in(2, [False, True], first=1))
def test_replicas_train_as_one_worker_does(workers: int, accumulate: bool) -> None:
    def run(_: Any) -> tuple[list[float], dict[str, Tensor]]:
        model = network()
        return trained(polylane.data_parallel(model), model, accumulate)

    (losses, state), *_ = fork_workers(run, 1)
    results = fork_workers(run, workers)
    for others, weights in results:
        assert others == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)
    first = results[0][1]
    assert all(torch.equal(first[name], weights[name]) for _, weights in results for name in first)


def test_one_worker_is_a_plain_loop_where_nothing_is_random() -> None:
    model = network()
    model[3].p = 0.0
    plain = copy.deepcopy(model)
    replicas = polylane.data_parallel(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for inputs, labels in replicas.batches(samples(), 5):
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(each(inputs), labels).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_parameters_that_only_some_replicas_reach_are_summed() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.seldom = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[:, 0] > 1.5  # few samples, so none on some replica
            out = self.always(x)
            if chosen.any():
                out = out.index_add(0, chosen.nonzero().flatten(), self.seldom(x[chosen]))
            return out

    def run(_: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Gated().double()
        replicas = polylane.data_parallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, _ in replicas.batches(samples(), 4, shuffle=False):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    alone, several = fork_workers(run, 1)[0], fork_workers(run, 3)
    for state in several:
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)


def test_hooks_see_the_whole_gradient_of_a_pass() -> None:
    def run(_: Any) -> tuple[list[float], dict[str, Tensor]]:
        model, seen = network(), list[float]()
        first, weight, bias = model[0].weight, model[4].weight, model[4].bias
        first.register_hook(lambda g: g / g.norm())
        first.register_hook(lambda g: g + 0.1 * torch.randn_like(g))
        # What earlier passes of the step have accumulated is part of this one's.
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
        torch.autograd.graph.register_multi_grad_hook(
            (weight, bias), lambda grads: seen.append(sum(g.norm().item() for g in grads))
        )
        return seen, trained(polylane.data_parallel(model), model, True)[1]

    (seen, state), ((seen_of_two, of_two), _) = fork_workers(run, 1)[0], fork_workers(run, 2)
    assert len(seen) == 40 and seen_of_two == pytest.approx(seen, rel=1e-11)
    for name, value in state.items():
        torch.testing.assert_close(of_two[name], value, rtol=1e-9, atol=1e-11)


def test_hooks_of_one_worker_are_those_of_a_plain_loop() -> None:
    model = network()
    model[3].p = 0.0
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    replicas = polylane.data_parallel(model)
    for inputs, labels in replicas.batches(samples(), 5):
        for each in (model, plain):
            F.cross_entropy(each(inputs), labels).backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


def test_weights_of_rank_0_count() -> None:
    def run(context: Any) -> dict[str, Tensor]:
        torch.manual_seed(context.rank)
        model = nn.Linear(3, 2)
        polylane.data_parallel(model)
        return model.state_dict()

    torch.manual_seed(0)
    expected = nn.Linear(3, 2).state_dict()
    for state in fork_workers(run, 2):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_leaving_the_loop_early_leaves_nothing_behind() -> None:
    model = network()
    for _ in polylane.data_parallel(model).batches(samples(), 5):
        break
    torch.manual_seed(3)
    one = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(one, torch.randn(4))


def test_what_is_not_summed_is_refused() -> None:
    def run(_: Any) -> None:
        model = network()
        replicas = polylane.data_parallel(model)
        stream: Iterator[Any] = replicas.batches(samples(), 6)
        inputs, labels = next(stream)
        torch.autograd.backward(F.cross_entropy(model(inputs), labels))

    with pytest.raises((PolylaneError, WorkerFailed), match=r"loss\.backward"):
        fork_workers(run, 2)


def test_no_module_is_refused() -> None:
    with pytest.raises(PolylaneError, match=r"nn\.Module"):
        polylane.data_parallel()
    with pytest.raises(PolylaneError, match=r"nn\.Module"):
        polylane.data_parallel(3)  # type: ignore[arg-type]


def test_what_it_returns_is_no_module() -> None:
    """Who uses it as they use a wrapped model is told so, whatever they ask of it first."""
    replicas = polylane.data_parallel(nn.Linear(2, 2))
    for use in (lambda: replicas.named_parameters(), lambda: replicas(torch.zeros(1, 2)), lambda: replicas.train()):
        with pytest.raises(PolylaneError, match=r"returns no module, .* inside of a loop over its batches\(\)"):
            use()
    assert not hasattr(replicas, "module")
