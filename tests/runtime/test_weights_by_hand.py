"""Weights that a script writes or takes between steps: what one device would have, or what to call instead."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.support import subsets
from tests.support.workers.training import batch_of, classify, mlp, plainly, sgd, workers

BATCH = batch_of(8)
PARTS = ("tensor=2", "data=2,shard=parameters")
PLANS = ("data=2", "data=2,shard=gradients", "pipeline=2,microbatches=2", *PARTS)


def model() -> nn.Sequential:
    return mlp(6, 8, 8, 4)


def clamp(own: Any) -> None:
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.clamp_(-0.3, 0.3)


def noise(own: Any) -> None:
    torch.manual_seed(3)
    for parameter in own.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.01)


def decay(own: Any) -> None:
    for name, parameter in own.named_parameters():
        if parameter.dim() > 1 and parameter.shape[-1] == parameter.numel() // len(parameter):
            parameter.data *= 0.9 if "weight" in name else 1.0


def mask(own: Any) -> None:
    kept = torch.arange(64).view(8, 8) % 3 != 0
    own[2].weight.data.mul_(kept)


def again(own: Any) -> None:
    torch.manual_seed(9)
    nn.init.normal_(own[4].weight, std=0.1)
    nn.init.xavier_uniform_(own[0].weight)
    own[2].reset_parameters()
    nn.init.zeros_(own[4].bias)


def reset(own: Any) -> None:
    torch.manual_seed(4)
    with torch.no_grad():
        own[2].weight[:] = torch.randn(8, 8, dtype=torch.float64)
        own[2].bias.fill_(0.1)


def assign(own: Any) -> None:
    own[0].bias.data = torch.linspace(0, 1, 8, dtype=torch.float64)
    own[4].weight.data = own[4].weight.new_ones(own[4].weight.shape)


def load(own: Any) -> None:
    own.load_state_dict({name: value * 0.7 for name, value in model().state_dict().items()})


def zero_gradients(own: Any) -> None:
    own.zero_grad()


WRITES: tuple[Callable[[Any], None], ...] = (clamp, noise, decay, mask, again, reset, assign, load, zero_gradients)


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_script_writes_between_steps_is_trained_on(plan: str) -> None:
    def work(job: Job) -> dict[str, Tensor]:
        for write in WRITES:
            job.step(BATCH)
            write(job.model)
        job.step(BATCH)
        return job.state_dict()

    plain = model()
    optimizer = sgd(list(plain.named_parameters()))
    for write in (*WRITES, None):
        optimizer.zero_grad()
        classify(plain, BATCH).backward()
        optimizer.step()
        if write is not None:
            write(plain)
    for state in workers(work, model(), plan):
        for name, value in plain.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), name


INITIALIZERS: tuple[Callable[[Tensor], Any], ...] = (
    nn.init.orthogonal_,
    partial(nn.init.orthogonal_, gain=0.5),
    nn.init.eye_,
    partial(nn.init.sparse_, sparsity=0.3, std=0.1),
    partial(nn.init.trunc_normal_, std=0.1, a=-0.1, b=0.1),
    partial(nn.init.trunc_normal_, std=0.1, a=0.1, b=0.3),
    lambda weight: nn.init.orthogonal_(weight.data),
    lambda weight: nn.init.eye_(nn.init.orthogonal_(weight)).mul_(0.5),
    lambda weight: nn.init.orthogonal_(nn.init.kaiming_normal_(weight), gain=2),
)


@pytest.mark.parametrize("plan", subsets.one_in(3, ["pipeline=2,microbatches=2", *PARTS], first=1))
def test_all_of_torch_init_gives_what_it_gives_one_device(plan: str) -> None:
    """Also those that write by views, into ``out=``, or element by element."""

    def begin(own: Any, number: int) -> None:
        torch.manual_seed(number)
        for layer in own[0], own[2], own[7]:
            with torch.no_grad():
                INITIALIZERS[number](layer.weight)
        nn.init.dirac_(own[5].weight, groups=1 + number % 2)

    def work(job: Job) -> dict[str, Tensor]:
        for number in range(len(INITIALIZERS)):
            job.step(BATCH)
            begin(job.model, number)
        job.step(BATCH)
        begin(job.model, 0)
        return job.state_dict()

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Unflatten(1, (4, 2)), nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(8, 4)]
        return nn.Sequential(*mlp(6, 8, 8, 4)[:4], *layers).double()

    plain = build()
    optimizer = sgd(list(plain.named_parameters()))
    for number in (*range(len(INITIALIZERS)), 0):
        optimizer.zero_grad()
        classify(plain, BATCH).backward()
        optimizer.step()
        begin(plain, number)
    for state in workers(work, build(), plan):
        for name, value in plain.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), name


def save(own: Any) -> None:
    torch.save(own.state_dict(), io.BytesIO())


TAKEN: tuple[Callable[[Any], Any], ...] = (
    save,
    copy.deepcopy,
    AveragedModel,
    lambda own: torch.save(own, io.BytesIO()),
    lambda own: sum(parameter.norm() for parameter in own.parameters()),
    lambda own: torch.nn.utils.parameters_to_vector(own.parameters()),
    lambda own: [parameter.detach().clone() for parameter in own.parameters()],
    lambda own: [parameter.data.tolist() for parameter in own.parameters()],
    lambda own: model().load_state_dict(own.state_dict()),
    lambda own: [parameter.div_(parameter.norm()) for parameter in own.parameters()],
)


def said(call: Callable[[], Any]) -> str:
    try:
        with torch.no_grad():
            call()
    except (PolylaneError, RuntimeError) as error:  # load_state_dict raises its own, with all that was said
        return str(error)
    return ""


@pytest.mark.parametrize("plan", subsets.one_in(2, ["pipeline=2,microbatches=2", *PARTS, "data=2,every=4"]))
def test_values_that_are_not_whole_are_refused_and_whole_ones_are_there_on_request(plan: str) -> None:
    def work(job: Job) -> tuple[list[str], str, str, float, float]:
        job.step(BATCH)
        told = [said(lambda take=take: take(job.model)) for take in TAKEN]
        gradient = said(lambda: [parameter.grad for parameter in job.model.parameters()])
        printed = str(next(iter(job.model.parameters())))
        state = job.state_dict()
        with job.whole_model() as whole:
            far = max(float((whole.state_dict()[name] - value).abs().max()) for name, value in state.items())
            for take in TAKEN[:-1]:
                take(whole)
            loss = float(classify(whole, BATCH))
        return told, gradient, printed, far, abs(loss - job.evaluate(BATCH))

    for told, gradient, _, far, off in workers(work, model(), plan):
        for sentence in told:
            assert "is not whole in this process" in sentence and "`with job.whole_model():`" in sentence
        assert "job.whole_gradients()" in gradient
        assert far == 0.0 and off < 1e-12


@pytest.mark.parametrize("plan", subsets.one_in(3, ["pipeline=2,microbatches=2", *PARTS], first=1))
def test_what_is_written_into_the_whole_model_is_trained_on(plan: str) -> None:
    def normalize(own: nn.Module) -> None:
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.div_(parameter.norm())

    def work(job: Job) -> dict[str, Tensor]:
        job.step(BATCH)
        with job.whole_model() as whole:
            normalize(whole)
        job.step(BATCH)
        job.load_state_dict({name: value * 0.5 for name, value in job.state_dict().items()})
        with pytest.raises(PolylaneError, match=r"the state lacks 0\.weight"):
            job.load_state_dict({})
        job.step(BATCH)
        return job.state_dict()

    plain = model()
    optimizer = sgd(list(plain.named_parameters()))
    for number in range(3):
        optimizer.zero_grad()
        classify(plain, BATCH).backward()
        optimizer.step()
        if number == 0:
            normalize(plain)
        elif number == 1:
            plain.load_state_dict({name: value * 0.5 for name, value in plain.state_dict().items()})
    for state in workers(work, model(), plan):
        for name, value in plain.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), name


def test_what_a_server_has_is_read_and_not_written() -> None:
    def work(job: Job) -> tuple[bool, list[str]]:
        job.step(BATCH)
        state, weight = job.state_dict(), job.model[2].weight  # type: ignore[index]
        writes: list[Callable[[], Any]] = [
            lambda: clamp(job.model),
            lambda: weight[0].fill_(0.0),
            lambda: weight.view(-1)[:8].zero_(),
            lambda: weight.data.t()[1:].mul_(2),
            lambda: torch.add(weight, 1.0, out=weight),
            *(partial(begin, weight) for begin in INITIALIZERS[:6]),
        ]
        told = [said(write) for write in writes]
        return torch.equal(copy.deepcopy(job.model)[2].weight, state["2.weight"]), told

    for equal, sentences in workers(work, model(), "data=2,servers=1")[:2]:
        assert equal
        for sentence in sentences:
            assert "cannot be written by hand: under" in sentence


def test_a_training_leaves_ordinary_tensors_to_those_who_train_alone() -> None:
    def work(job: Job) -> bool:
        job.step(BATCH)
        return all(type(parameter) is nn.Parameter for parameter in job.model.parameters())

    assert workers(work, model(), "data=2,shard=gradients") == [True, True]
    assert plainly(model(), [BATCH]).losses
