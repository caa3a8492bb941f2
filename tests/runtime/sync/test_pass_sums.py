"""Gradients of a loop of one's own are summed while backward passes go on, whatever each of them reaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polylane
from polylane.errors import PolylaneError
from polylane.program import lower
from polylane.runtime.sync.pass_sums import foresee_next
from polylane.runtime.transport.choose import VARIABLE
from polylane.runtime.workers.team import fork_workers
from tests.support.nccl import fake_nccl
from tests.support.nccl.launch_laws import list_violations
from tests.support.nccl.recording import become_nccl_worker

WIDTH = 6
Loop = Callable[[Any, nn.ModuleDict], dict[str, Tensor]]


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ("aaaa", "--aa"),
        ("dgdgdg", "---gdg"),
        ("dddgdddgdddg", "--dd-gggdddg"),  # from the second round on
        ("abcd", "----"),
    ],
)
def test_what_followed_the_longest_match_is_foreseen(passes: str, expected: str) -> None:
    entries = {letter: SimpleNamespace(letter=letter) for letter in passes}
    for index, letter in enumerate(expected):
        foreseen: Any = foresee_next([entries[done] for done in passes[:index]])  # type: ignore[misc]
        assert (foreseen.letter if foreseen else "-") == letter, index


class Gated(nn.Module):
    """A layer that only samples with a large first number go through: on some replicas none does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0.8).nonzero().flatten()
        return x.index_add(0, chosen, self.inner(x[chosen])) if len(chosen) else x


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as people write it: its backward pass runs another one, by ``Tensor.backward``."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            ctx.layer(inner).backward(gradient)
        return None, inner.grad


def build_models(is_frozen: bool = False) -> nn.ModuleDict:
    torch.manual_seed(0)
    models = {n: nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), nn.Linear(WIDTH, 1)) for n in "dg"}
    models["g"].requires_grad_(not is_frozen)
    return nn.ModuleDict({**models, "table": nn.Embedding(8, WIDTH, sparse=True)}).double()


def read_batches(replicas: Any) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(1)
    samples = [torch.randn(WIDTH, generator=random).double() for _ in range(41)]
    yield from replicas.batches(samples, 5, epochs=1, shuffle=False)


def adversaries(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """Three passes of one model for each of the other, and gradients inside the loss; a step has two passes."""
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()}
    for step, batch in enumerate(read_batches(replicas)):
        name = "g" if step % 4 == 3 else "d"
        out = models[name](batch.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), batch, create_graph=True)
        torch.autograd.grad(out.sum(), models[name][0].weight, retain_graph=True)
        (out.square().mean() + slope.square().sum(1).mean()).backward()
        if step % 2:
            optimizers[name].step()
            optimizers[name].zero_grad()
    return gather_state(models)


def accumulation(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """Two passes a step; hooks that are not linear, and a gradient that is kept as zeros."""
    models["d"][0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    optimizer = torch.optim.AdamW(models.parameters(), lr=0.01)
    for batch in read_batches(replicas):
        models["d"](batch).square().mean().backward()
        models["g"](models["d"](batch).expand(-1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return gather_state(models)


def checkpoints(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """A layer that is reached several times in a pass, by checkpoints that run backward passes of their own."""
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    layer = models["d"][0]
    for batch in read_batches(replicas):
        x = checkpoint(layer, batch.requires_grad_(), use_reentrant=True)
        x = OwnCheckpoint.apply(layer, checkpoint(layer, x, use_reentrant=True))
        models["g"](x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return gather_state(models)


def failures(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """Every third pass fails half way, and the loop goes on."""
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("half way")

    for step, batch in enumerate(read_batches(replicas)):
        hidden = models["d"][0](batch)
        if step % 3 == 1:
            hidden.register_hook(fail)
        try:
            models["d"][2](models["d"][1](hidden)).square().mean().backward()
        except ArithmeticError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    return gather_state(models)


def unfreezing(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """A model that is frozen until the second round, and again in every other pass from the fourth on."""
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    for step, batch in enumerate(read_batches(replicas)):
        models["g"].requires_grad_(step == 2 or (step > 3 and step % 2 == 0))
        optimizer.zero_grad()
        models["d"](models["g"](batch).expand(-1, WIDTH)).square().mean().backward()
        optimizer.step()
    return gather_state(models)


def tables(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """An embedding whose gradient is sparse: each replica reads rows of its own."""
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    for batch in read_batches(replicas):
        rows = models["table"]((batch[:, 0].abs() * 4).long().clamp(max=7))
        models["d"](rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in models.state_dict().items()}


def shared_gradients(replicas: Any, models: nn.ModuleDict) -> dict[str, Tensor]:
    """Gradients in one buffer of the loop's own, which alone is set to zero; two passes add to it."""
    parameters = [*models["d"].parameters(), *models["g"].parameters()]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for batch in read_batches(replicas):
        buffer.zero_()
        for name in "dg":
            models[name](batch).square().mean().backward()
        buffer.clamp_(-0.5, 0.5)
        optimizer.step()
    return gather_state(models)


def gather_state(models: nn.ModuleDict) -> dict[str, Tensor]:
    gradients = {f"{n}.grad": p.grad for n, p in models.named_parameters() if p.grad is not None}
    return {n: t.detach().clone() for n, t in {**models.state_dict(), **gradients}.items()}


@pytest.mark.parametrize(
    "loop", [adversaries, accumulation, checkpoints, failures, unfreezing, tables, shared_gradients]
)
@pytest.mark.parametrize("backend", ["shared_memory", "nccl"])
def test_loops_on_replicas_are_those_of_one_worker(loop: Loop, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "BUCKET_BYTES", 300)  # several buckets

    def work(_: Any) -> tuple[dict[str, Tensor], list[fake_nccl.Launch]]:
        if backend == "nccl":
            become_nccl_worker()
        models = build_models(is_frozen=loop is unfreezing)
        replicas = polylane.data_parallel(*models.values())
        fake_nccl.RECORDER.phase = "step 0"
        return loop(replicas, models), fake_nccl.RECORDER.launches

    ((alone, _),), several = fork_workers(work, 1), fork_workers(work, 3)
    for state, _ in several:
        assert state.keys() == alone.keys()  # who got no gradient has none
        for name, value in alone.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n} {text}"
            )
    assert list_violations([launches for _, launches in several]) == []


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
@pytest.mark.parametrize("failing_step", [0, 3])  # with nothing foreseen, and with sums under way
def test_an_error_of_one_replica_ends_the_loop_of_all(
    failing_step: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that goes on behind its own error would add its gradients to those of other batches."""
    monkeypatch.setenv(VARIABLE, transport)

    def work(_: Any) -> tuple[int, str]:
        models = build_models()
        replicas, step = polylane.data_parallel(*models.values()), -1

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("on this rank alone")

        try:
            for step, batch in enumerate(read_batches(replicas)):
                hidden = models["d"][0](batch)
                if step == failing_step and replicas.world.rank == 1:
                    hidden.register_hook(fail)
                with suppress(ArithmeticError):
                    models["d"][2](hidden).square().mean().backward()
        except PolylaneError as error:
            return step, str(error)
        return step, ""

    first, second = fork_workers(work, 2)
    assert first[0] == failing_step and second[0] == failing_step + 1
    assert first[1] == second[1]
    assert "loss.backward() raised on rank 1, and not on all 2" in first[1]


def test_gradients_that_are_to_be_differentiated_again_are_refused() -> None:
    def work(_: Any) -> bool:
        models = build_models()
        replicas = polylane.data_parallel(*models.values())
        for batch in read_batches(replicas):
            loss = models["d"](batch).square().mean()
            with pytest.raises(PolylaneError, match="create_graph=True"):
                loss.backward(create_graph=True)
            with pytest.raises(PolylaneError, match="create_graph=True"):
                loss.backward(None, True, True)
        return all(parameter.grad is None for parameter in models.parameters())

    assert fork_workers(work, 2) == [True, True]


def test_sums_begin_in_the_pass_and_wait_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL: how many sums are launched when the backward pass has come to each layer, and in all."""
    monkeypatch.setattr(lower, "BUCKET_BYTES", 0)  # a bucket for each parameter

    def work(_: Any) -> list[list[int]]:
        become_nccl_worker()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        replicas = polylane.data_parallel(model)
        rows, start = list[list[int]](), 0

        def note(_: Tensor) -> None:
            rows[-1].append(len(fake_nccl.RECORDER.launches) - start)

        for x in replicas.batches([torch.randn(WIDTH) for _ in range(12)], 4):
            rows.append([])
            start = len(fake_nccl.RECORDER.launches)
            for layer in model:
                x = layer(x)
                x.register_hook(note)
            x.square().mean().backward()
            note(x)
            assert fake_nccl.RECORDER.open == set()
            model.zero_grad()
        return rows

    for rows in fork_workers(work, 2):
        assert rows == [[0, 0, 0, 0, 4], [0, 0, 0, 0, 4], [0, 1, 2, 3, 4]]


def test_nothing_is_sent_for_what_a_pass_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, os.environ.get(VARIABLE, "gloo"))

    def work(_: Any) -> list[int]:
        models = build_models()
        replicas = polylane.data_parallel(*models.values())
        sent = list[int]()
        for step, batch in enumerate(read_batches(replicas)):
            before = replicas._transport.counters.bytes["all_reduce"]
            models["dg"[step % 2]][0](batch).square().mean().backward()
            sent.append(replicas._transport.counters.bytes["all_reduce"] - before)
        return sent

    (sent, _) = fork_workers(work, 2)
    assert sent == [8 * (WIDTH + 1) * WIDTH] * len(sent)
