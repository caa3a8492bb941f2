"""Captured code against the model itself: the cases and examples, and everything a batch, a loss or a model may be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.recipe import Mean
from tests.support import models, subsets
from tests.support.reference.eager_and_captured import SIZES, assert_unchanged, captured, close, compare, state

# Libraries that ask whether they are being exported choose another kernel then: the same up to rounding.
ROUNDED = {"hf_llama", "hf_gpt2"}
LEAVES = {"moe": ["blocks.0.moe", "blocks.1.moe"]}


@pytest.mark.parametrize("name", subsets.one_in(3, [*models.CASES, *models.TINY], first=2))
def test_cases_are_captured_as_they_are(name: str) -> None:
    graph, model, case = captured(name)
    assert graph.is_opaque == (name == "branching")
    assert [note.split()[0] for note in graph.notes if "leaf" in note] == LEAVES.get(name, [])
    same = close if name in ROUNDED else torch.equal
    held = [compare(graph, model, case.loss, case.batch, samples, same) for samples in SIZES]
    assert all(held)


@pytest.mark.parametrize("name", subsets.one_in(3, subsets.one_in(5, [*models.CASES, *models.TINY]), first=2))
def test_names_are_unique_and_the_same_everywhere(name: str) -> None:
    graphs = [captured(name)[0], captured(name, samples=3)[0], captured(name, in_float64=True)[0]]
    names = [[node.name for node in graph.nodes] for graph in graphs]
    assert len(set(names[0])) == len(names[0])
    assert names[0] == names[1] == names[2]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert all(node.dtype not in ("float32", "bfloat16", "float16") for node in graphs[2].nodes)


@pytest.mark.parametrize("name", subsets.one_in(2, subsets.one_in(2, [*models.CASES, *models.TINY])))
def test_evaluation_is_captured_too(name: str) -> None:
    graph, model, case = captured(name, training=False)
    assert not graph.code.random
    assert not graph.code.has_batch_statistics
    for samples in (1, 3, 5):
        assert compare(graph, model, case.loss, case.batch, samples, close)


def test_capturing_evaluation_leaves_a_training_model() -> None:
    model = Shared()
    before = state(model)
    capture(model, models.classify, xy(4, 0), training=False)
    assert_unchanged(before, state(model))


# What a batch may be -------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    y: Tensor
    name: str = "record"
    weight: float = 0.5


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def xy(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    return models.vectors(samples, seed)


BATCHES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: (b[0], b[1])),
    "list": (lambda x, y: [x, y], lambda b: (b[0], b[1])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "named tuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Record, lambda b: (b.x * b.weight, b.y)),
    "nested": (lambda x, y: {"in": [x, {"y": (y,)}]}, lambda b: (b["in"][0], b["in"][1]["y"][0])),
    "numbers and words": (
        lambda x, y: {"x": x, "y": y, "scale": 2.0, "layers": 3, "on": True, "what": "digits", "none": None},
        lambda b: (b["x"] * b["scale"] * b["layers"] if b["on"] and b["none"] is None else b["x"], b["y"]),
    ),
    "scalar tensor": (lambda x, y: (x, y, torch.tensor(0.7)), lambda b: (b[0] * b[2], b[1])),
    "a table of its own": (lambda x, y: (x, y, torch.full((9, 16), 0.3)), lambda b: (b[0] + b[2].mean(0), b[1])),
}


@pytest.mark.parametrize("form", BATCHES)
def test_batches_of_any_form(form: str) -> None:
    make, read = BATCHES[form]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        return F.cross_entropy(model(x), y)

    def batch(samples: int, seed: int) -> Any:
        return make(*xy(samples, seed))

    graph = capture(mlp(), loss, batch(4, 0))
    assert not graph.notes
    assert all(compare(graph, mlp(), loss, batch, samples) for samples in SIZES)


def test_a_bare_tensor_is_a_batch() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    graph = capture(mlp(), loss, xy(4, 0)[0])
    assert compare(graph, mlp(), loss, lambda samples, seed: xy(samples, seed)[0], 3)


def test_an_example_of_one_sample_is_enough() -> None:
    graph = capture(mlp(), models.classify, xy(1, 0))
    assert graph.samples == 2
    assert all(compare(graph, mlp(), models.classify, xy, samples) for samples in SIZES)


# What a model may do -------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer used twice, one weight under two names, one layer frozen, and a BatchNorm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight
        self.again = self.first
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.norm(self.again(x)).relu()
        logits: Tensor = self.head(self.tied(self.frozen(x)))
        return logits


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(2))
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


class Regions(nn.Module):
    """Parts without gradient, and parts under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).tanh()
            same = x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.dropout(self.student(x), 0.1, self.training)
            with torch.autocast("cpu", enabled=False):
                y = y.float() + target
        logits: Tensor = self.head(y + same)
        return logits


class Buffers(nn.Module):
    """Buffers written in place: a count, and a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        logits: Tensor = self.fc(x - self.average)
        return logits


class Constants(nn.Module):
    """Tensors that are neither parameters nor buffers, and tensors made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)
        self.scale = torch.linspace(0.5, 1.5, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + torch.tensor([0.1] * 16) + torch.arange(16) / 16
        logits: Tensor = self.fc(x)
        return logits


class Lengths(nn.Module):
    """Asks for the number of samples in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x)) / len(x) + x.numel() / 16 / x.size(0)
        x = x.reshape(len(x), 4, -1).reshape(-1, 4).view(x.shape[0], x.shape[1])
        logits: Tensor = self.fc(x) * rows[:, None] + x.new_zeros(len(x), 4)
        return logits


class Lstms(nn.Module):
    """Recurrent layers with the time first, and a state made from the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.2, bidirectional=True)
        self.gru = nn.GRUCell(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        time_first = x.view(x.shape[0], 4, 4).transpose(0, 1)
        out, _ = self.lstm(time_first)
        state = out.new_zeros(x.shape[0], 8)
        for moment in out.unbind(0):
            state = self.gru(moment, state)
        logits: Tensor = self.head(state)
        return logits


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = x.unflatten(1, (4, 4))
        y, _ = self.attention(words, words, words, need_weights=False)
        logits: Tensor = self.head(y.flatten(1))
        return logits


class Frozen(nn.Module):
    """Its user keeps a BatchNorm in evaluation mode while all else trains."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.fc(x)))
        return logits


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.InstanceNorm2d(4, affine=True),
            nn.Dropout(0.2, inplace=True), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.view(-1, 1, 4, 4))
        return logits


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "regions": Regions,
    "buffers": Buffers,
    "constants": Constants,
    "lengths": Lengths,
    "recurrent": Lstms,
    "attention": Attended,
    "frozen norm": Frozen,
    "channels": Channels,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_have_a_graph(name: str) -> None:
    torch.manual_seed(0)
    model = ORDINARY[name]()
    before = state(model)
    graph = capture(model, models.classify, xy(5, 0))
    assert_unchanged(before, state(model))
    assert not graph.is_opaque
    assert not any("leaf" in note for note in graph.notes)
    assert bool(graph.checkpoints) == ("checkpoint" in name)
    held = [compare(graph, model, models.classify, xy, samples) for samples in SIZES]
    assert all(held[1:])


def test_one_sample_fails_where_eager_does() -> None:
    model = Shared()
    graph = capture(model, models.classify, xy(5, 0))
    assert not compare(graph, model, models.classify, xy, 1)


def test_distributions_are_captured_without_their_checks_of_values() -> None:
    def likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        normal = torch.distributions.Normal(model(batch[0]), 1.0)
        return -normal.log_prob(batch[1]).mean()

    graph = capture(nn.Linear(3, 1), likelihood, (torch.ones(4, 3), torch.ones(4, 1)))
    assert "check" not in {node.op for node in graph.nodes}


def test_tied_and_shared_weights_stand_once() -> None:
    graph = capture(Shared(), models.classify, xy(5, 0))
    assert graph.tied == {
        "tied.weight": "first.weight",
        "again.weight": "first.weight",
        "again.bias": "first.bias",
    }
    assert "tied.weight" not in graph.parameters
    assert sum("first.weight" in node.parameters for node in graph.nodes) == 3
    assert not graph.parameters["frozen.weight"].trainable


def test_trainable_names_what_is_differentiated() -> None:
    graph = capture(mlp(), models.classify, xy(4, 0), trainable={"2.weight"})
    assert [name for name, info in graph.parameters.items() if info.trainable] == ["2.weight"]
    assert not next(node for node in graph.nodes if node.module == "0").requires_grad


# What a loss may be --------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A loss that is a module, with class weights in a buffer and a temperature to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x) * self.temperature, y, weight=self.weights)


def test_a_loss_may_be_a_module() -> None:
    loss = Weighted()
    graph = capture(mlp(), loss, xy(5, 0))
    assert "loss.weights" in graph.buffers
    assert "loss.temperature" in graph.parameters
    assert all(compare(graph, mlp(), loss, xy, samples) for samples in SIZES)


def test_a_loss_may_be_a_mean() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        x, y = batch
        kept = y != 0
        total = (F.cross_entropy(model(x), y, reduction="none") * kept).sum()
        return Mean(total, kept.sum())

    graph = capture(mlp(), loss, xy(5, 0))
    assert not graph.loss_is_mean
    assert all(compare(graph, mlp(), loss, xy, samples) for samples in SIZES)


def test_a_count_may_be_a_number() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        x, y = batch
        return Mean(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    graph = capture(mlp(), loss, xy(5, 0))
    assert not graph.notes
    assert all(compare(graph, mlp(), loss, xy, samples) for samples in SIZES)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (lambda out: out, r"must return a scalar tensor or polylane.Mean.*not a tensor of shape \(4, 4\)"),
        (lambda out: {"loss": out.mean()}, "not a dict"),
        (lambda out: out.mean().item(), "not a float"),
        (lambda out: None, "not a NoneType"),
        (lambda out: Mean(out, 4), r"polylane.Mean\(total, count\) takes scalars"),
        (lambda out: out.mean() + out.no_such_thing, "AttributeError.*no_such_thing"),
    ],
)
def test_a_wrong_loss_is_one_sentence(result: Callable[[Tensor], Any], told: str) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return result(model(batch[0]))

    with pytest.raises(PolylaneError, match=told) as caught:
        capture(mlp(), loss, xy(4, 0))
    assert "test_capture.py:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_names_its_module() -> None:
    with pytest.raises(PolylaneError, match=r"fails on the example batch in 0: RuntimeError"):
        capture(nn.Sequential(nn.Linear(7, 4)), models.classify, xy(4, 0))


# Without allocating --------------------------------------------------------------------------------------------------


def test_a_meta_model_is_captured_without_allocating() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32000, hidden_size=4096, num_hidden_layers=1, num_attention_heads=32)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    graph = capture(model, models.hf_loss, {"input_ids": tokens, "labels": tokens})
    assert sum(info.bytes for info in graph.parameters.values()) > 1.8e9
    assert all(p.is_meta for p in model.parameters())
    assert sum(node.flops for node in graph.nodes) > 2 * 2 * 64 * 12 * 4096**2


# Whose line ----------------------------------------------------------------------------------------------------------


def test_nodes_know_the_users_module_and_line() -> None:
    graph = capture(Regions(), models.classify, xy(4, 0))
    linear = next(node for node in graph.nodes if node.name == "student/linear")
    assert linear.module == "student"
    file, _, line = linear.source.rpartition(":")
    assert file.endswith("test_capture.py")
    assert "self.student(x)" in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert graph.nodes[-1].module == "loss"
    assert "models.py:" in graph.nodes[-1].source


def test_a_checkout_called_polylane_is_the_users(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "polylane" / "examples"
    folder.mkdir(parents=True)
    (folder / "small_recipe.py").write_text(
        "import torch\ndef loss(model, batch):\n    return model(batch).mean()\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(folder))
    import small_recipe  # type: ignore[import-not-found]

    graph = capture(nn.Linear(4, 1), small_recipe.loss, torch.randn(3, 4))
    assert [node.source for node in graph.nodes] == [f"{folder}/small_recipe.py:3"] * 2


def graph_of(model: nn.Module) -> Graph:
    return capture(model, models.classify, xy(5, 0))


def test_capture_twice_gives_the_same_graph() -> None:
    model = Lstms()
    assert graph_of(model) == graph_of(copy.deepcopy(model))


def test_a_model_for_one_batch_size_is_checked_at_that_size() -> None:
    class Six(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)
            self.fc.register_full_backward_hook(lambda module, into, out: None if into[0] is None else (into[0] * 2,))
            self.stem = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(self.stem(x)).view(6, -1)
            return logits

    graph = capture(Six(), models.classify, xy(6, 0))
    assert [note.split()[0] for note in graph.notes] == ["fc"]
    assert compare(graph, Six(), models.classify, xy, 6)
    assert not compare(graph, Six(), models.classify, xy, 3)
