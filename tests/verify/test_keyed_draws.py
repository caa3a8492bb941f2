"""The user's own code draws the numbers that its captured graph draws by key, or says that it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import Objective
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.batch import flatten
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.verify.keyed_draws import DrawsDiffer, KeyedDraws, list_draws
from polylane.verify.whole_graph import run_graph

SAMPLES = 5


class Drawing(nn.Module):
    """A layer, and then whatever draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 12), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.layer(x))


class Recurrent(nn.Module):
    """Recurrent layers with dropout between them."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.first = batch_first
        self.layers = nn.LSTM(2, 4, num_layers=3, dropout=0.4, batch_first=batch_first, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        words = x.view(len(x), 3, 2)
        return self.layers(words if self.first else words.transpose(0, 1))[0]


def attention(x: Tensor) -> Tensor:
    heads = x.view(len(x), 2, 3, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(F.dropout(x, 0.1), 0.5),
    "channels": lambda x: F.dropout1d(x.view(len(x), 4, 3), 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "attention": attention,
    "noise": lambda x: x + 0.1 * torch.randn_like(x) * torch.rand(x.shape[1]),
    "in place": lambda x: x * torch.empty_like(x).uniform_(0.5, 2.0) + torch.empty_like(x).exponential_(),
    "choice": lambda x: x[:, torch.multinomial(torch.ones(12), 3)] * torch.bernoulli(torch.full_like(x[:, :3], 0.5)),
    "order": lambda x: x[:, torch.randperm(12)] * torch.arange(12) + torch.randint(0, 5, (12,)),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda draw=draw: Drawing(draw)) for name, draw in DRAWS.items()},  # type: ignore[misc]
    "lstm": lambda: Recurrent(batch_first=False),
    "lstm, samples first": lambda: Recurrent(batch_first=True),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.2, batch_first=True)
    ),
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


QUICK = ("attention", "in place", "lstm, samples first")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_the_model_draws_what_its_graph_draws(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]().double(), torch.randn(SAMPLES, 6, dtype=torch.float64)
    objective = Objective("loss", loss, lambda p: torch.optim.SGD([q for _, q in p], lr=0.1))
    prepared = compile_training(TrainingProblem(model, {"loss": objective}, batch), "data=1")
    code = prepared.main_partition.graph.code
    draws, tensors = list_draws(code), ModelTensors(model, [loss], torch.device("cpu"))
    assert draws
    part = SampleSlice(SAMPLES, batch=SAMPLES, step=3, seed=7)
    expected = run_graph(code, tensors, flatten(batch)[0], part)[0]
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with KeyedDraws(draws, part) as drawing:
        own = loss(model, batch)
        own.backward()  # type: ignore[no-untyped-call]
    drawing.check_all_drawn()
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-13)


def test_other_draws_than_those_captured_are_refused() -> None:
    torch.manual_seed(0)
    model, batch = Drawing(lambda x: F.dropout(x, 0.5)), torch.randn(SAMPLES, 6)
    objective = Objective("loss", loss, lambda p: torch.optim.SGD([q for _, q in p], lr=0.1))
    prepared = compile_training(TrainingProblem(model, {"loss": objective}, batch), "data=1")
    draws, part = list_draws(prepared.main_partition.graph.code), SampleSlice(SAMPLES, batch=SAMPLES)
    assert draws
    with pytest.raises(DrawsDiffer, match="draw 1 of the model's random numbers is randn"), KeyedDraws(draws, part):
        torch.randn(3)
    with pytest.raises(DrawsDiffer, match="drew random numbers 0 times, and 1 times"):
        KeyedDraws(draws, part).check_all_drawn()


def test_draws_of_the_users_own_python_have_no_key() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return F.dropout(y, 0.5) if float(y.sum()) > 1e6 else F.dropout(y, 0.1)

    model, batch = Own(), torch.randn(SAMPLES, 6)
    objective = Objective("loss", loss, lambda p: torch.optim.SGD([q for _, q in p], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, once a process
        prepared = compile_training(TrainingProblem(model, {"loss": objective}, batch), "data=1")
    code = prepared.main_partition.graph.code
    assert code.random
    assert list_draws(code) is None
