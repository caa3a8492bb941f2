"""A call of the user's model computes with the training's weights, or is refused and says what to call instead."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.runtime import stale_weights as stale
from polylane.runtime.job import Job
from polylane.runtime.stale_weights import StaleWeights
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd, workers

BATCH = batch_of(8)
WHOLE = [
    "data=1",
    "data=2",
    "data=2,microbatches=2",
    "data=2,shard=optimizer",
    "data=2,shard=gradients",
    "data=2,servers=1",
]
PARTS = {
    "pipeline=2,microbatches=2": r"is trained by stage \d, and this worker \(rank \d\) is of stage \d",
    "data=2,pipeline=2": "is trained by stage",
    "tensor=2": r"under tensor=2 this worker \(rank \d\) holds a part of",
    "data=2,shard=parameters": "under shard=parameters this worker",
    "data=2,every=4": "under every=4 each replica has weights of its own",
    "data=2,servers=1,staleness=1": "each replica has weights of its own",
}


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except StaleWeights as error:
        return str(error)
    return ""


def model() -> nn.Sequential:
    return mlp(6, 8, 8, 4)


@pytest.mark.parametrize("plan", subsets.one_in(2, WHOLE))
def test_where_all_weights_are_up_to_date_a_model_is_called_as_ever(plan: str) -> None:
    def work(job: Job) -> tuple[Tensor, dict[str, Tensor], int]:
        for _ in range(3):
            job.step(BATCH)
        return job.model(BATCH[0]).detach(), job.state_dict(), len(modules._global_forward_pre_hooks)

    for found, state, hooks in workers(work, model(), plan):
        plain = model()
        plain.load_state_dict(state)
        assert torch.equal(found, plain(BATCH[0])) and hooks == 0


@pytest.mark.parametrize("plan", subsets.one_in(2, PARTS))
def test_elsewhere_it_is_refused_and_says_what_to_call(plan: str) -> None:
    def work(job: Job) -> tuple[str, str, float, float] | None:
        job.step(BATCH)
        if plan.startswith("pipeline") and len(job.worker.held()) == len(job.state_dict()):
            return None  # the other stage has nothing but the loss
        said = outcome(lambda: job.model(BATCH[0]))
        before = job.evaluate(BATCH)
        whole = model()
        whole.load_state_dict(job.state_dict())
        after = float(classify(whole, BATCH))
        job.close()
        return said, outcome(lambda: job.model(BATCH[0])), before, after

    for said, later, before, after in filter(None, workers(work, model(), plan)):
        for sentence in (said, later):
            assert sentence.startswith("model(...) would compute with weights that are not those of the training: ")
            assert sentence.endswith("job.state_dict(), the whole weights, into a newly built model")
        assert re.search(PARTS[plan], said)
        assert before == pytest.approx(after, rel=1e-12)


def test_modules_inside_are_refused_as_far_as_they_are_stale() -> None:
    def work(job: Job) -> list[bool]:
        job.step(BATCH)
        hidden = BATCH[0]
        said = []
        for layer in job.model:  # type: ignore[attr-defined]
            said.append(bool(outcome(lambda layer=layer, hidden=hidden: layer(hidden))))
            hidden = torch.zeros(8, 4 if said[-1] and layer.out_features == 4 else 8, dtype=torch.float64)
        return said

    first, second = workers(work, model(), "pipeline=2,microbatches=2")
    linear = [True, False, True, False, True]
    assert [a or b for a, b in zip(first, second, strict=True)] == linear
    assert not any(a and b for a, b in zip(first, second, strict=True))


def test_before_the_first_step_all_have_the_first_weights() -> None:
    def work(job: Job) -> bool:
        return torch.equal(job.model(BATCH[0]), model()(BATCH[0]))

    assert workers(work, model(), "pipeline=2,microbatches=2") == [True, True]


def test_whole_weights_loaded_into_the_model_are_those_of_the_training_until_the_next_step() -> None:
    def work(job: Job) -> list[str]:
        said = []
        for _ in range(3):
            job.step(BATCH)
            said.append(outcome(lambda: job.model(BATCH[0])))
            job.model.load_state_dict(job.state_dict())
            said.append(outcome(lambda: job.model(BATCH[0])))
        job.step(BATCH)
        said.append(outcome(lambda: job.model(BATCH[0])))
        state = job.state_dict()
        job.close()
        said.append(outcome(lambda: job.model(BATCH[0])))
        job.model.load_state_dict(state)
        return [*said, outcome(lambda: job.model(BATCH[0]))]

    for said in workers(work, model(), "pipeline=2,microbatches=2"):
        assert [bool(each) for each in said] == [*([True, False] * 3), True, True, False]


@pytest.mark.parametrize("plan", ["data=2,shard=parameters", "data=2,every=4"])
def test_after_the_training_a_model_may_be_made_whole(plan: str) -> None:
    def work(job: Job) -> tuple[str, str, float]:
        job.step(BATCH)
        state = job.state_dict()
        job.close()
        said = outcome(lambda: job.model(BATCH[0]))
        job.model.load_state_dict(state, assign=plan != "data=2,every=4")
        plain = model()
        plain.load_state_dict(state)
        later = outcome(lambda: job.model(BATCH[0]))
        return said, later, float((job.model(BATCH[0]) - plain(BATCH[0])).abs().max())

    for said, later, far in workers(work, model(), plan):
        assert said and not later and far == 0.0


def test_replicas_that_have_just_agreed_are_up_to_date() -> None:
    def work(job: Job) -> list[bool]:
        said = []
        for _ in range(5):
            job.step(BATCH)
            said.append(bool(outcome(lambda: job.model(BATCH[0]))))
        return said

    for said in workers(work, model(), "data=2,every=3,warmup=1"):
        assert said == [False, True, True, False, True]


CENTERS = nn.Parameter(torch.zeros(0))


def near_centers(model: nn.Module, batch: Any) -> Tensor:
    return classify(model, batch) + (model(batch[0]) - CENTERS).square().mean()


def moving_centers(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*[p for _, p in parameters], CENTERS], 0.1)


@pytest.mark.parametrize(
    "plan", ["pipeline=2,microbatches=2", "data=2,shard=parameters", "data=1,servers=1,dedicated=yes"]
)
def test_parameters_of_a_loss_are_guarded_as_those_of_the_model(plan: str) -> None:
    """Read whole, or refused; whole, and written, in ``whole_model``, and in ``state_dict(losses=True)``."""

    def work(job: Job) -> tuple[str, list[float], float, bool]:
        job.step(BATCH)
        found: list[float] = []
        said = outcome(lambda: found.append(CENTERS.sum().item()))
        with job.whole_model(), torch.no_grad():
            found.append(CENTERS.sum().item())
            if "servers" not in plan:  # whose weights nobody can write
                CENTERS.mul_(2)
        after = job.state_dict(losses=True)
        return said, found, after.get("loss.CENTERS", torch.zeros(())).sum().item(), "loss.CENTERS" in job.state_dict()

    CENTERS.data = torch.full((4,), 3.0, dtype=torch.float64)
    outcomes = workers(work, model(), plan, loss=near_centers, optimizer=moving_centers)
    value = next(found[-1] for _, found, _, _ in outcomes)
    assert value != 12.0
    assert any("loss.CENTERS is not whole in this process" in said for said, _, _, _ in outcomes)
    for _, found, after, is_of_model in outcomes:
        assert found == [value] * len(found) and not is_of_model
        assert after in (value if "servers" in plan else 2 * value, 0.0)


class TiedLoss(nn.Module):
    """A loss with a weight that has two names, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        self.second.weight = self.first.weight

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) + self.second(self.first(model(batch[0]))).square().mean()

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_loss_with_a_weight_of_two_names_is_loaded_again() -> None:
    def work(job: Job) -> bool:
        job.step(BATCH)
        job.load_state_dict(job.state_dict())
        with job.whole_model():
            pass
        job.load_state_dict(job.state_dict(losses=True))
        return "loss.second.weight" in job.state_dict(losses=True)

    assert workers(work, model(), "data=2", loss=TiedLoss()) == [True, True]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.again = self.first
        self.head = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.last(torch.tanh(self.middle(x)))))


def test_a_module_by_any_of_its_names() -> None:
    def work(job: Job) -> tuple[bool, bool]:
        job.step(BATCH)
        own: Any = job.model
        return bool(outcome(lambda: own.first(BATCH[0]))), bool(outcome(lambda: own.again(BATCH[0])))

    assert sorted(workers(work, Tied(), "pipeline=2,microbatches=2")) == [(False, False), (True, True)]


class Choosing(nn.Module):
    """Which a capture keeps whole: it is called as it is, by the runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 if float(x.detach().abs().max()) >= 0 else 2.0)


@pytest.mark.parametrize(
    "plan",
    subsets.one_in(4, ["pipeline=2,microbatches=2", "tensor=2", "data=2,shard=parameters", "data=2,every=2"], first=2),
)
def test_the_runtime_itself_calls_what_it_must(plan: str) -> None:
    """Leaves; captures of batches of other forms in mid-training, and in evaluation mode."""

    def work(job: Job) -> list[float]:
        losses = [job.step(BATCH).loss, job.evaluate(BATCH)]
        wide = BATCH[0].unsqueeze(1).repeat(1, 3, 1), BATCH[1]
        return [*losses, job.step(wide).loss, job.evaluate(wide), job.step(BATCH).loss]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0] if batch[0].dim() == 2 else batch[0].mean(1)
        return classify(model, (inputs, batch[1]))

    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), Choosing(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    named = "" if plan == "tensor=2" else ",per_sample=1"
    runs = workers(work, nn.Sequential(*layers).double(), plan + named, loss=loss)
    assert all(len(run) == 5 for run in runs)


def test_copies_and_pickles_of_whole_models_are_their_owners() -> None:
    def work(job: Job) -> list[str]:
        job.step(BATCH)
        file = io.BytesIO()
        told = [outcome(lambda: copy.deepcopy(job.model)), outcome(lambda: torch.save(job.model, file))]
        assert all("is not whole in this process" in sentence for sentence in told)
        with job.whole_model() as whole:
            copies = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
            file = io.BytesIO()
            torch.save(whole, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        assert not any(module._forward_pre_hooks for module in job.model.modules())
        return [outcome(lambda copied=copied: copied(BATCH[0])) for copied in copies]

    assert workers(work, model(), "pipeline=2,microbatches=2") == [[""] * 3] * 2


def test_a_training_begun_with_stale_weights_is_refused() -> None:
    def work(job: Job) -> str:
        job.step(BATCH)
        with pytest.raises(PolylaneError) as caught:
            compile_training(job.model, build_objectives(classify, sgd, None), BATCH, "data=1")
        return str(caught.value)

    for said in workers(work, model(), "pipeline=2,microbatches=2"):
        assert "is not whole in this process" in said


@pytest.mark.parametrize("plan", ["tensor=2", "data=2,shard=parameters"])
def test_a_job_that_is_closed_leaves_nothing_in_memory(plan: str) -> None:
    def work(_: Any) -> tuple[list[bool], str]:
        prepared = compile_training(model(), build_objectives(classify, sgd, None), BATCH, plan)
        with Job(prepared, World.join(), example=BATCH) as job:
            job.step(BATCH)
        weight, role = job.model[0].weight, job.worker
        references = [weakref.ref(each) for each in (job.model, role._local_model, prepared, job)]
        # A weight that the script still has says what became of it.
        del job, prepared, role
        gc.collect()
        return [reference() is None for reference in references], outcome(lambda: weight.fill_(0.0))

    for dead, sentence in fork_workers(work, 2):
        assert dead == [True] * 4
        assert re.search("cannot be written: this process has a part of it, of a training that has ended", sentence)


def test_the_hook_goes_with_the_models() -> None:
    plain = model()
    stale.StaleTensors(plain, {"0.weight": "why"}, {}).record_step()
    assert outcome(lambda: plain(BATCH[0])) and len(modules._global_forward_pre_hooks) == 1
    stale.StaleTensors(plain, {}, {})  # another job, of whole weights
    assert not outcome(lambda: plain(BATCH[0])) and not modules._global_forward_pre_hooks
